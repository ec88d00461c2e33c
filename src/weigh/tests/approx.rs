//! How good estimates are, and what they may decide.

use super::*;
use crate::weigh::count::{Coefficients, Tokenizer};
use crate::weigh::source::ranks;
use crate::weigh::{CountSource, PromptCount};

/// Texts that nothing was fitted to, by kind: prose with tables, Rust, Python, conversations in many languages.
fn texts() -> Vec<(&'static str, String)> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let kinds: [(&str, &[&str]); 4] = [
        ("prose", &["docs/weighing.md", "docs/performance.md", "docs/architecture.md", "docs/configuration.md"]),
        ("Rust", &["src/weigh/draft.rs", "src/weigh/media.rs", "src/balance/pool.rs", "src/wire/error.rs"]),
        ("Python", &["benches/load.py", "tests/templates/generate.py", "src/weigh/data/fit.py"]),
        ("conversations", &["tests/templates/corpus.jsonl"]),
    ];
    let read = |file: &&str| std::fs::read_to_string(root.join(file)).unwrap();
    kinds.map(|(kind, files)| (kind, files.iter().map(read).collect())).into()
}

/// Mean errors over windows of so many bytes, by kind of text.
fn errors(bytes: usize, tokenizer: &Tokenizer, estimate: impl Fn(&str) -> f64) -> Vec<(&'static str, f64)> {
    let error = |text: &str| (estimate(text) / tokenizer.count(text) as f64 - 1.0).abs();
    let mean = |text: &str| {
        let mut windows = vec![String::new()];
        for line in text.split_inclusive('\n') {
            if windows.last().is_some_and(|window| window.len() >= bytes) {
                windows.push(String::new());
            }
            windows.last_mut().unwrap().push_str(line);
        }
        let whole = windows.iter().filter(|window| window.len() >= bytes);
        let (sum, n) = whole.map(|window| error(window)).fold((0.0, 0), |(sum, n), e| (sum + e, n + 1));
        assert!(n > 0);
        sum / f64::from(n)
    };
    texts().iter().map(|(kind, text)| (*kind, mean(text))).collect()
}

/// The mean of the kinds within one bound, and each kind within another.
fn within(errors: &[(&str, f64)], mean_max: f64, kind_max: f64) {
    let mean = errors.iter().map(|(_, error)| error).sum::<f64>() / errors.len() as f64;
    assert!(mean < mean_max && errors.iter().all(|(_, error)| *error < kind_max), "mean {mean:.3}: {errors:.3?}");
    println!("mean {mean:.3}: {errors:.3?}");
}

#[test]
fn a_tokenizer_s_estimate_is_within_three_percent_of_texts_it_was_not_fitted_to() {
    let tokenizers = [
        Arc::clone(smollm2().loaded(&ModelName::from("m1")).unwrap().1.tokenizer().unwrap()),
        Arc::new(ranks::tiktoken("cl100k_base").unwrap()),
        Arc::new(ranks::tiktoken("o200k_base").unwrap()),
    ];
    for tokenizer in &tokenizers {
        let corrected = |text: &str| tokenizer.approx().weigh(text) * tokenizer.per_estimate(std::iter::once(text));
        within(&errors(16 << 10, tokenizer, corrected), 0.03, 0.045);
    }
}

#[test]
fn a_family_s_ready_made_estimate_is_within_a_tenth_before_its_tokenizer_is_there() {
    for name in ["cl100k_base", "o200k_base"] {
        let (tokenizer, set) = (ranks::tiktoken(name).unwrap(), Coefficients::of_family(name).unwrap());
        within(&errors(2000, &tokenizer, |text| set.weigh(text)), 0.07, 0.1);
        within(&errors(2000, &tokenizer, |text| Coefficients::default().weigh(text)), 0.08, 0.13);
    }
}

#[test]
fn an_estimate_refuses_only_what_is_too_long_by_more_than_its_margin() {
    let count = |source, tokens| PromptCount { tokens: Tokens(tokens), prompts: 1, longest: Tokens(tokens), source };
    let held = |source, tokens| count(source, tokens).must_hold(Some(Tokens(1000))).0;
    // An exact count is what it is.
    assert_eq!(held(CountSource::Tokenizer, 999), 999);
    assert_eq!(held(CountSource::Replica, 1000), 1000);
    // An estimate that is sure to fit somewhere goes only where it is sure to fit.
    assert_eq!(held(CountSource::Approximate, 400), 500);
    // One that may fit goes to the largest window, whichever side of it the estimate is on.
    assert_eq!(held(CountSource::Approximate, 900), 999);
    assert_eq!(held(CountSource::Approximate, 1200), 999);
    // One that cannot fit is refused.
    assert!(held(CountSource::Approximate, 1340) >= 1000);
    assert_eq!(count(CountSource::Approximate, 400).must_hold(None).0, 500);
}
