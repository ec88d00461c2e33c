//! Weighing as a whole: real engines' counts, the field cases, deadlines.

mod additive;
mod approx;
mod cases;
mod engines;
mod flow;
mod forms;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::weigher::WeighLimits;
use super::{Histories, WeighHints, Weigher, Weight};
use crate::config::{Config, ContentFormat, Model, OutputSettings, TokenizerSource};
use crate::units::{ModelName, SystemClock, Tokens};
use crate::wire::{ApiError, Endpoint, ParseLimits, Request};

/// A file of the repository's test data.
pub(super) fn data(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests").join(path)
}

/// A model with everything at its default.
pub(super) fn model(name: &str, tokenizer: TokenizerSource) -> Model {
    Model {
        name: ModelName::from(name),
        aliases: Vec::new(),
        adapters: Vec::new(),
        tokenizer,
        chat_template: None,
        output: OutputSettings::default(),
        tokens_per_image: Tokens(765),
        content_format: ContentFormat::Auto,
        tools_with_choice_none: true,
    }
}

/// A configuration of these models alone.
pub(super) fn config(models: Vec<Model>) -> Config {
    Config {
        listen: Vec::new(),
        admin: crate::config::Admin { address: ([127, 0, 0, 1], 0).into(), token_file: None },
        limits: crate::config::Limits::default(),
        shutdown: crate::config::Shutdown::default(),
        models,
        replicas: Vec::new(),
        replicas_file: None,
        discovery: None,
        regions: crate::config::Regions::default(),
        bands: vec![crate::config::BandSpec::default()],
        tenants: Vec::new(),
        health: crate::config::Health::default(),
        scrape: crate::config::Scrape::default(),
        warmup: crate::config::Warmup::default(),
        retries: crate::config::Retries::default(),
        balance: crate::config::Balance::default(),
        answer_headers: true,
    }
}

/// A weigher with its tokenizers loaded, and no deadline that a slow machine could miss.
pub(super) fn weigher(models: Vec<Model>) -> Arc<Weigher> {
    let limits = WeighLimits { deadline: Duration::from_secs(60), ..WeighLimits::default() };
    let histories = Arc::new(Histories::default());
    let weigher = Weigher::with_limits(&config(models), histories, None, Arc::new(SystemClock::new()), limits);
    wait(&weigher);
    weigher
}

/// Waits until every tokenizer is loaded or has failed.
pub(super) fn wait(weigher: &Weigher) {
    for _ in 0..6000 {
        if weigher.ready() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("tokenizers did not load within a minute");
}

/// A weigher for SmolLM2, model `m1`.
pub(super) fn smollm2() -> Arc<Weigher> {
    weigher(vec![model("m1", TokenizerSource::Directory(data("data/smollm2")))])
}

pub(super) fn request(endpoint: Endpoint, body: impl Into<Bytes>) -> Request {
    Request::parse(endpoint, body.into(), &ParseLimits { json_depth: 128 }).unwrap()
}

pub(super) fn chat(body: &str) -> Request {
    request(Endpoint::ChatCompletions, body.to_owned())
}

pub(super) fn weigh(weigher: &Weigher, request: &Request) -> Result<Weight, ApiError> {
    weigher.weigh_here(&ModelName::from("m1"), request, &WeighHints::default())
}
