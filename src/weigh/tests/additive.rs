//! Counts add up over segments: the property that the count cache stands on, for every tokenizer in the repository.
//! `tests/templates/run.sh` asks the same of six families.

use proptest::prelude::*;
use proptest::test_runner::{Config as Cases, TestRunner};

use super::*;
use crate::weigh::count::approx::SAMPLE;
use crate::weigh::count::{CountCache, Tokenizer};
use crate::weigh::source::{Counting, directory, ranks};

/// Pieces of sample, any text, blanks and newlines in every order, long lines, and special tokens between.
fn texts(specials: Vec<String>) -> impl Strategy<Value = String> {
    let sample: Vec<&str> = SAMPLE.split_inclusive(['\n', '.']).collect();
    let special = if specials.is_empty() { vec![String::new()] } else { specials };
    let piece = prop_oneof![
        3 => proptest::sample::select(sample.clone()).prop_map(str::to_owned),
        3 => proptest::sample::select(special),
        2 => ".{0,12}",
        2 => "[ \\n\\t\\r]{0,6}",
        1 => "[a-zé天']{1,8}",
        1 => (proptest::sample::select(sample), 1..400usize).prop_map(|(text, n)| text.repeat(n)),
    ];
    proptest::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}

fn adds_up(name: &str, tokenizer: &Tokenizer) {
    assert!(tokenizer.additive().0, "{name} is counted by segments");
    let mut runner = TestRunner::new(Cases { cases: 300, failure_persistence: None, ..Cases::default() });
    let outcome = runner.run(&texts(tokenizer.special_texts()), |text| {
        let whole = tokenizer.count(&text);
        let cache = CountCache::new(1 << 20);
        prop_assert_eq!(tokenizer.count_cached(&text, &cache), whole, "cold");
        prop_assert_eq!(tokenizer.count_cached(&text, &cache), whole, "from the cache");
        let costs: u64 = tokenizer.costs(&text).iter().map(|cost| cost.tokens).sum();
        prop_assert_eq!(costs, whole, "what each segment costs");
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{name}: {error}");
    }
}

#[test]
fn counts_add_up_over_segments_of_the_repository_s_models() {
    for dir in ["data/smollm2", "data/byte-tokenizer"] {
        let Counting::Tokenizer(tokenizer) = directory::read(&data(dir)).unwrap().counting else { panic!("{dir}") };
        adds_up(dir, &tokenizer);
    }
}

#[test]
fn counts_add_up_over_segments_of_tiktoken_s_encodings() {
    for name in ["r50k_base", "p50k_base", "cl100k_base", "o200k_base", "o200k_harmony"] {
        adds_up(name, &ranks::tiktoken(name).unwrap());
    }
}
