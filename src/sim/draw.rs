//! Draws from the distributions that mixes and answer lengths are made of.

use rand::Rng;

/// A standard normal (Box and Muller's transform).
pub fn normal(rng: &mut impl Rng) -> f64 {
    let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
    radius * (std::f64::consts::TAU * rng.random::<f64>()).cos()
}

/// A lognormal by its median and the σ of its logarithm, rounded, within `1..=max`.
pub fn lognormal(rng: &mut impl Rng, median: f64, sigma: f64, max: u32) -> u32 {
    (median * (sigma * normal(rng)).exp()).round().clamp(1.0, f64::from(max)) as u32
}

/// An exponential of this mean.
pub fn exponential(rng: &mut impl Rng, mean: f64) -> f64 {
    -mean * (1.0 - rng.random::<f64>()).ln()
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    #[test]
    fn a_lognormal_has_its_median_and_an_exponential_its_mean() {
        let mut rng = StdRng::seed_from_u64(3);
        let mut drawn: Vec<u32> = (0..20_001).map(|_| lognormal(&mut rng, 400.0, 0.6, 100_000)).collect();
        drawn.sort_unstable();
        assert!((380..420).contains(&drawn[10_000]), "{}", drawn[10_000]);
        let mean = (0..20_000).map(|_| exponential(&mut rng, 3.0)).sum::<f64>() / 20_000.0;
        assert!((mean - 3.0).abs() < 0.1, "{mean}");
    }
}
