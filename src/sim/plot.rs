//! Plots of runs: latency distributions, and each policy's load over time.

use std::path::Path;

use plotters::prelude::*;

use super::fleet::Run;

/// One policy's run to draw.
#[derive(Debug)]
pub struct Curve<'a> {
    pub name: &'a str,
    pub run: &'a Run,
}

const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 90, 181),
    RGBColor(220, 50, 32),
    RGBColor(0, 140, 90),
    RGBColor(230, 140, 0),
    RGBColor(120, 70, 170),
    RGBColor(110, 110, 110),
    RGBColor(20, 20, 20),
];

/// Pixels of the whole picture.
const WIDTH: u32 = 1_200;
const ROW: u32 = 420;
/// Seconds below which latencies are drawn at the axis.
const LATENCY_MIN: f64 = 0.01;

/// Draws the distributions of TTFT and E2E side by side, and below them, for each policy, every replica's
/// sequences over time.
///
/// # Errors
/// Where the file cannot be written.
pub fn draw(path: &Path, title: &str, curves: &[Curve<'_>]) -> anyhow::Result<()> {
    let rows = curves.len().div_ceil(2).max(1) as u32;
    let area = SVGBackend::new(path, (WIDTH, ROW + rows * ROW / 2 + 40)).into_drawing_area();
    let fault = |e: &dyn std::fmt::Display| anyhow::anyhow!("cannot draw {}: {e}", path.display());
    draw_all(&area, title, curves, rows as usize).map_err(|e| fault(&e))?;
    area.present().map_err(|e| fault(&e))
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Fault<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;

fn draw_all<'a>(area: &Area<'a>, title: &str, curves: &[Curve<'_>], rows: usize) -> Result<(), Fault<'a>> {
    area.fill(&WHITE)?;
    let area = area.titled(title, ("sans-serif", 22))?;
    let (top, bottom) = area.split_vertically(ROW);
    let (left, right) = top.split_horizontally(WIDTH / 2);
    let ttft = |run: &Run| run.records.iter().filter_map(|r| r.ttft).collect::<Vec<_>>();
    let e2e = |run: &Run| run.records.iter().filter_map(|r| r.e2e).collect::<Vec<_>>();
    cdf(&left, "time to first token, s", curves, ttft)?;
    cdf(&right, "end to end, s", curves, e2e)?;
    for (cell, curve) in bottom.split_evenly((rows, 2)).iter().zip(curves) {
        load(cell, curve)?;
    }
    Ok(())
}

fn cdf<'a>(
    area: &Area<'a>,
    caption: &str,
    curves: &[Curve<'_>],
    values: impl Fn(&Run) -> Vec<f64>,
) -> Result<(), Fault<'a>> {
    let series: Vec<(usize, Vec<f64>)> = curves
        .iter()
        .map(|curve| {
            let mut all: Vec<f64> = values(curve.run).iter().map(|v| v.max(LATENCY_MIN)).collect();
            all.sort_by(f64::total_cmp);
            all
        })
        .enumerate()
        .collect();
    let most = series.iter().filter_map(|(_, s)| s.last().copied()).fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 16))
        .margin(8)
        .x_label_area_size(28)
        .y_label_area_size(44)
        .build_cartesian_2d((LATENCY_MIN..most * 1.1).log_scale(), 0.0..1.0f64)?;
    chart.configure_mesh().y_desc("share of requests").draw()?;
    for (which, values) in series {
        let colour = COLOURS[which % COLOURS.len()];
        // A few hundred points draw the same line as all of them.
        let every = (values.len() / 400).max(1);
        let count = values.len() as f64;
        let points = values.iter().enumerate().filter(|(i, _)| i % every == 0 || i + 1 == values.len());
        let line = points.map(|(i, &v)| (v, (i + 1) as f64 / count)).collect::<Vec<_>>();
        chart
            .draw_series(LineSeries::new(line, colour.stroke_width(2)))?
            .label(curves[which].name)
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    chart.configure_series_labels().position(SeriesLabelPosition::LowerRight).background_style(WHITE.mix(0.8)).draw()
}

fn load<'a>(area: &Area<'a>, curve: &Curve<'_>) -> Result<(), Fault<'a>> {
    let seconds = curve.run.load.len().max(1);
    let most = curve.run.load.iter().flatten().copied().max().unwrap_or(1).max(1);
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{}: sequences on each replica", curve.name), ("sans-serif", 14))
        .margin(6)
        .x_label_area_size(24)
        .y_label_area_size(44)
        .build_cartesian_2d(0..seconds, 0..most + 1)?;
    chart.configure_mesh().x_labels(8).y_labels(5).draw()?;
    let replicas = curve.run.load.first().map_or(0, Vec::len);
    let every = (seconds / 600).max(1);
    for replica in 0..replicas {
        let points = curve.run.load.iter().enumerate().step_by(every).map(|(t, all)| (t, all[replica]));
        chart.draw_series(LineSeries::new(points, COLOURS[replica % COLOURS.len()]))?;
    }
    Ok(())
}
