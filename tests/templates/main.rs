//! Rendered prompts and counts equal those of Python's transformers.
//!
//! By default the committed small form is compared: three families' templates, rendered texts by their hashes.
//! `run.sh` installs six families with their tokenizers, makes the corpus of 1,000 conversations and its truth anew,
//! and runs the same test over it with `WEIGHBRIDGE_TEMPLATES` set.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use sha2::{Digest, Sha256};
use weighbridge::config::{ContentFormat, Engine, Model, OutputSettings, TokenizerSource};
use weighbridge::units::{ModelName, Tokens};
use weighbridge::weigh::count::CountCache;
use weighbridge::weigh::draft::render_as;
use weighbridge::weigh::prompt::{Dialect, Form};
use weighbridge::weigh::source::directory;
use weighbridge::weigh::template::{RenderError, Templates, WallClock};
use weighbridge::wire::{Endpoint, ParseLimits, Request};

/// The moment at which the truth was rendered.
fn still() -> WallClock {
    Arc::new(|| chrono::NaiveDate::from_ymd_opt(2026, 2, 3).unwrap().and_hms_opt(4, 5, 6).unwrap())
}

fn model() -> Model {
    Model {
        name: ModelName::from("m"),
        aliases: Vec::new(),
        adapters: Vec::new(),
        tokenizer: TokenizerSource::Approximate,
        chat_template: None,
        output: OutputSettings::default(),
        tokens_per_image: Tokens(765),
        content_format: ContentFormat::Auto,
        tools_with_choice_none: true,
    }
}

struct Family {
    templates: Templates,
    /// Only where the tokenizer is installed.
    tokenizer: Option<Arc<weighbridge::weigh::count::Tokenizer>>,
}

fn family(dir: &Path) -> Family {
    let (templates, specials) = directory::templates(dir).unwrap();
    let installed = dir.join("tokenizer.json").exists() || dir.join("tekken.json").exists();
    let tokenizer = installed.then(|| {
        let files = directory::read(dir).unwrap();
        Arc::clone(files.load(None, &still()).tokenizer().unwrap())
    });
    if let Some(tokenizer) = &tokenizer {
        assert_eq!(tokenizer.additive(), (true, true), "{}", dir.display());
    }
    Family { templates: Templates::new(templates, specials, still()).unwrap(), tokenizer }
}

fn rendered(family: &Family, line: &str) -> Result<String, RenderError> {
    let limits = ParseLimits { json_depth: 128 };
    let request = Request::parse(Endpoint::ChatCompletions, Bytes::from(line.to_owned()), &limits).unwrap();
    let model = model();
    let Form::Chat(mut chat) = Form::read(&request, &model).unwrap() else { panic!("not a conversation: {line}") };
    render_as(&mut chat, &family.templates, &model, Dialect::Transformers, Engine::Auto, line.len())
}

fn compare(root: &Path, name: &str) -> (usize, usize) {
    let dir = root.join(name);
    let family = family(&dir);
    let corpus = std::fs::read_to_string(root.join("corpus.jsonl")).unwrap();
    let truth = std::fs::read_to_string(dir.join("truth.txt")).unwrap();
    assert_eq!(corpus.lines().count(), truth.lines().count());
    let cache = CountCache::new(16 << 20);
    let (mut same, mut raised) = (0, 0);
    let mut different = Vec::new();
    for (i, (line, expected)) in corpus.lines().zip(truth.lines()).enumerate() {
        match (rendered(&family, line), expected) {
            // Where Python raises the engine answers 400 itself, whatever is rendered here.
            (_, "raises") => raised += 1,
            (Err(error), _) => different.push(format!("{name} {i}: {error}")),
            (Ok(text), _) => {
                let (count, hash) = expected.split_once(' ').unwrap();
                let digest = Sha256::digest(text.as_bytes());
                let digest: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
                // By segments, through the cache; and whole, which must be the same.
                let counted = family.tokenizer.as_ref().map(|t| t.count_cached(&text, &cache));
                assert_eq!(counted, family.tokenizer.as_ref().map(|t| t.count(&text)), "{name} {i}: segments");
                if digest != hash {
                    different.push(format!("{name} {i}: rendered otherwise: {text:?}"));
                } else if counted.is_some_and(|counted| counted.to_string() != count) {
                    different.push(format!("{name} {i}: {counted:?} tokens, transformers has {count}"));
                } else {
                    same += 1;
                }
            }
        }
    }
    if let Some(tokenizer) = &family.tokenizer {
        adds_up(name, tokenizer, &corpus);
    }
    assert!(different.is_empty(), "{} of {same} differ; the first: {}", different.len(), different[0]);
    (same, raised)
}

/// Counts of random concatenations of texts and special tokens are the sums over their segments.
fn adds_up(name: &str, tokenizer: &weighbridge::weigh::count::Tokenizer, corpus: &str) {
    use proptest::prelude::*;
    let texts: Vec<String> = corpus.lines().flat_map(|line| line.split("\\n")).map(str::to_owned).collect();
    let piece = prop_oneof![
        3 => proptest::sample::select(texts),
        3 => proptest::sample::select(tokenizer.special_texts()),
        2 => ".{0,12}",
        2 => "[ \\n\\t\\r]{0,6}",
    ];
    let cases = proptest::test_runner::Config { cases: 1000, failure_persistence: None, ..Default::default() };
    let pieces = proptest::collection::vec(piece, 0..16).prop_map(|pieces| pieces.concat());
    let outcome = proptest::test_runner::TestRunner::new(cases).run(&pieces, |text| {
        let cache = CountCache::new(1 << 20);
        let whole = tokenizer.count(&text);
        prop_assert_eq!(tokenizer.count_cached(&text, &cache), whole, "cold");
        prop_assert_eq!(tokenizer.count_cached(&text, &cache), whole, "from the cache");
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{name}: {error}");
    }
}

#[test]
fn every_conversation_is_rendered_and_counted_as_transformers_does() {
    let (root, names): (PathBuf, &[&str]) = match std::env::var_os("WEIGHBRIDGE_TEMPLATES") {
        Some(cache) => (cache.into(), &["llama3", "qwen3", "gpt-oss", "deepseek-v3", "mistral", "gemma3"]),
        None => (Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/templates"), &["qwen3", "gpt-oss", "mistral"]),
    };
    for name in names {
        let (same, raised) = compare(&root, name);
        println!("{name}: {same} the same, {raised} refused by transformers");
        assert!(same > raised, "{name}: the corpus says little about this family");
    }
}
