//! Whether real servers have the engine's shape: it is fitted to their timings, run, and compared.

use serde::Deserialize;

use super::*;

#[derive(Deserialize)]
struct Timings {
    /// Tokens, wall seconds, CPU seconds.
    prefill: Vec<(u32, f64, f64)>,
    decode: Vec<Decode>,
}

#[derive(Deserialize)]
struct Decode {
    conc: u32,
    gap_p50: f64,
    cpu_per_step_est: f64,
}

/// Whether a timing counts by the wall clock or by CPU seconds, which a busy machine does not stretch.
#[derive(Clone, Copy)]
enum By {
    Wall,
    Cpu,
}

fn load(name: &str) -> Timings {
    let path = format!("{}/tests/data/calib/calib-{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Least squares of `y` against the columns of `x`, each point weighed by 1 / y, so that errors are relative.
fn least_squares<const K: usize>(x: &[[f64; K]], y: &[f64]) -> [f64; K] {
    let mut a = [[0.0; K]; K];
    let mut b = [0.0; K];
    for (row, &y) in x.iter().zip(y) {
        for i in 0..K {
            for j in 0..K {
                a[i][j] += row[i] * row[j] / (y * y);
            }
            b[i] += row[i] / y;
        }
    }
    for i in 0..K {
        for k in i + 1..K {
            let f = a[k][i] / a[i][i];
            let upper = a[i];
            a[k].iter_mut().zip(upper).for_each(|(cell, above)| *cell -= f * above);
            b[k] -= f * b[i];
        }
    }
    for i in (0..K).rev() {
        b[i] = (b[i] - (i + 1..K).map(|k| a[i][k] * b[k]).sum::<f64>()) / a[i][i];
    }
    b
}

/// The shape that fits best, in milliseconds.
fn fit(t: &Timings, decode: By) -> EngineShape {
    let gaps: Vec<f64> = t.decode.iter().map(|d| gap(d, decode) * 1e3).collect();
    let rows: Vec<[f64; 2]> = t.decode.iter().map(|d| [1.0, f64::from(d.conc)]).collect();
    let [base, sequence] = least_squares(&rows, &gaps);
    let first: Vec<f64> = t.prefill.iter().map(|p| p.2 * 1e3).collect();
    let rows: Vec<[f64; 3]> = t.prefill.iter().map(|p| f64::from(p.0)).map(|n| [1.0, n, n * n]).collect();
    let [overhead, prefill, square] = least_squares(&rows, &first);
    println!(
        "base {base:.1} ms, sequence {sequence:.2} ms, prefill {overhead:.0} + {prefill:.2}·n + {:.2} µs·n²",
        square * 1e3
    );
    EngineShape {
        base_ms: base.max(0.0),
        sequence_ms: sequence,
        context_ms: 0.0,
        prefill_ms: prefill,
        quad_tokens: prefill / (2.0 * square.max(1e-9)),
        ..EngineShape::default()
    }
}

fn gap(d: &Decode, by: By) -> f64 {
    match by {
        By::Wall => d.gap_p50,
        By::Cpu => d.cpu_per_step_est,
    }
}

/// The engine's own gap between tokens with so many streams.
fn engine_gap(shape: &EngineShape, streams: u32) -> f64 {
    let mut engine = Engine::new(shape.clone());
    for id in 0..u64::from(streams) {
        engine.submit(Job { id, prompt: 8, output: 40, priority: 0, chain: Arc::from([]) });
    }
    let mut out = Vec::new();
    let first = engine.begin_step(Time::ZERO).unwrap();
    engine.finish_step(&mut out);
    let mut now = first;
    for _ in 0..20 {
        now = engine.begin_step(now).unwrap();
        engine.finish_step(&mut out);
    }
    now.since(first).as_secs_f64() / 20.0
}

fn engine_ttft(shape: &EngineShape, prompt: u32) -> f64 {
    let mut engine = Engine::new(shape.clone());
    engine.submit(Job { id: 1, prompt, output: 1, priority: 0, chain: Arc::from([]) });
    engine.begin_step(Time::ZERO).unwrap().as_secs_f64()
}

/// Mean and largest relative error of the engine against the timings: of gaps, and of first tokens past the
/// shortest prompt, whose time is mostly the server's own.
fn errors(name: &str, decode: By) -> [(f64, f64); 2] {
    let t = load(name);
    let shape = fit(&t, decode);
    let of = |pairs: Vec<(f64, f64)>| {
        let all: Vec<f64> = pairs.iter().map(|(engine, real)| (engine / real - 1.0).abs()).collect();
        (all.iter().sum::<f64>() / all.len() as f64, all.iter().copied().fold(0.0, f64::max))
    };
    let gaps = of(t.decode.iter().map(|d| (engine_gap(&shape, d.conc), gap(d, decode))).collect());
    let prompts = t.prefill.iter().skip(1);
    let first = of(prompts.map(|p| (engine_ttft(&shape, p.0), p.2)).collect());
    println!(
        "{name}: gaps {:.0}% (at most {:.0}%), first tokens {:.0}% (at most {:.0}%)",
        100.0 * gaps.0,
        100.0 * gaps.1,
        100.0 * first.0,
        100.0 * first.1
    );
    [gaps, first]
}

#[test]
fn a_real_vllm_has_the_engines_shape() {
    let [gaps, first] = errors("vllm-fp32-t1", By::Wall);
    assert!(gaps.0 < 0.05 && gaps.1 < 0.08, "{gaps:?}");
    assert!(first.0 < 0.10 && first.1 < 0.30, "{first:?}");
    // The second run has one point (two streams) that another process stretched by half.
    let [gaps, first] = errors("vllm-fp32-t1-run2", By::Wall);
    assert!(gaps.0 < 0.15, "{gaps:?}");
    assert!(first.0 < 0.10, "{first:?}");
}

#[test]
fn a_real_llama_server_has_the_engines_shape_in_cpu_time() {
    let [gaps, first] = errors("llama-t1", By::Cpu);
    assert!(gaps.0 < 0.15, "{gaps:?}");
    assert!(first.0 < 0.15, "{first:?}");
}
