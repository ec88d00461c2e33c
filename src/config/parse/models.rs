//! The models that clients may name.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use serde::{Serialize, Serializer};

use super::super::reader::{Map, Node};
use super::super::types::{ContentFormat, Model, OutputSettings, TokenizerSource};
use super::unique;
use crate::units::Tokens;

pub(super) const MODEL: &[&str] = &[
    "name",
    "aliases",
    "adapters",
    "tokenizer",
    "chat_template",
    "output",
    "tokens_per_image",
    "content_format",
    "tools_with_choice_none",
];
pub(super) const OUTPUT: &[&str] = &["percentile", "history"];

const TOKENIZER: &str =
    "a directory with tokenizer.json, hub:ORG/REPO, tiktoken:NAME, mistral:FILE, replica, or approximate";

/// What a tokenizer directory must hold one of.
const TOKENIZER_FILES: [&str; 2] = ["tokenizer.json", "tekken.json"];

impl fmt::Display for TokenizerSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TokenizerSource::Directory(path) => write!(f, "{}", path.display()),
            TokenizerSource::Hub(repo) => write!(f, "hub:{repo}"),
            TokenizerSource::Tiktoken(name) => write!(f, "tiktoken:{name}"),
            TokenizerSource::Mistral(path) => write!(f, "mistral:{}", path.display()),
            TokenizerSource::Replica => f.write_str("replica"),
            TokenizerSource::Approximate => f.write_str("approximate"),
        }
    }
}

impl Serialize for TokenizerSource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

pub(super) fn models(top: &Map<'_>) -> Vec<Model> {
    let allowed = "a list with at least one model: [{name: ..., tokenizer: ...}]";
    let Some(node) = top.required("models", allowed) else { return Vec::new() };
    let nodes = node.list("models");
    if node.is_list() && nodes.is_empty() {
        node.wrong(allowed);
    }
    // One name space: what a client writes as `model` must mean one thing.
    let mut seen = BTreeSet::new();
    let found: Vec<(Model, Node<'_>)> = nodes.into_iter().filter_map(|n| model(&n).map(|m| (m, n))).collect();
    unique("model name", found.iter().map(|(m, n)| (m.name.to_string(), n.clone())), &mut seen);
    for (_, node) in &found {
        let Some(map) = node.map_quietly() else { continue };
        for key in ["aliases", "adapters"] {
            let names = map.get(key).map(|n| n.children()).unwrap_or_default();
            let names = names.into_iter().filter_map(|n| n.as_text().map(|t| (t.to_owned(), n)));
            unique("model name", names, &mut seen);
        }
    }
    found.into_iter().map(|(m, _)| m).collect()
}

fn model(node: &Node<'_>) -> Option<Model> {
    let map = node.map(MODEL)?;
    let tokenizer = map.required("tokenizer", TOKENIZER).and_then(|n| tokenizer(&n));
    let names =
        |key: &str| map.get(key).map(|n| n.texts("names")).unwrap_or_default().into_iter().map(|(t, _)| t).collect();
    let aliases = names("aliases");
    let adapters = names("adapters");
    let chat_template = map.get("chat_template").and_then(|n| n.file());
    let mut output = OutputSettings::default();
    if let Some(map) = map.get("output").and_then(|n| n.map(OUTPUT)) {
        map.set("percentile", &mut output.percentile, |n| n.uint(50..=99).map(|v| v as u8));
        output.history = map.get("history").and_then(|n| n.path());
    }
    let mut tokens_per_image = Tokens(765);
    map.set("tokens_per_image", &mut tokens_per_image, |n| n.uint(0..=1_000_000).map(Tokens));
    let mut content_format = ContentFormat::Auto;
    let formats = [("auto", ContentFormat::Auto), ("string", ContentFormat::String), ("parts", ContentFormat::Parts)];
    map.choice("content_format", &mut content_format, &formats);
    let mut tools_with_choice_none = true;
    map.set("tools_with_choice_none", &mut tools_with_choice_none, Node::bool);
    let name = map.required("name", "the name that clients give")?.text()?;
    Some(Model {
        name: name.into(),
        aliases,
        adapters,
        // A model whose tokenizer is wrong is an error already; the name still counts for the checks that follow.
        tokenizer: tokenizer.unwrap_or(TokenizerSource::Approximate),
        chat_template,
        output,
        tokens_per_image,
        content_format,
        tools_with_choice_none,
    })
}

fn tokenizer(node: &Node<'_>) -> Option<TokenizerSource> {
    let text = node.text()?;
    match text.split_once(':') {
        Some(("hub", repo)) => {
            let parts: Vec<&str> = repo.split('/').collect();
            let good = parts.len() == 2 && parts.iter().all(|p| !p.is_empty() && !p.starts_with('.'));
            if !good {
                node.wrong("hub:ORG/REPO");
                return None;
            }
            return Some(TokenizerSource::Hub(repo.to_owned()));
        }
        Some(("tiktoken", name)) if !name.is_empty() => return Some(TokenizerSource::Tiktoken(name.to_owned())),
        Some(("mistral", file)) if !file.is_empty() => {
            let path = node.sink.base.join(file);
            if !path.is_file() {
                node.fail(format!("{} is no file", path.display()), Some("mistral:FILE, a tekken file".to_owned()));
            }
            return Some(TokenizerSource::Mistral(path));
        }
        _ => {}
    }
    match text.as_str() {
        "replica" => Some(TokenizerSource::Replica),
        "approximate" => Some(TokenizerSource::Approximate),
        _ => {
            let path = node.sink.base.join(&text);
            if let Some(fault) = directory_fault(&path) {
                node.fail(fault, Some(TOKENIZER.to_owned()));
            }
            Some(TokenizerSource::Directory(path))
        }
    }
}

fn directory_fault(path: &Path) -> Option<String> {
    if !path.is_dir() {
        return Some(format!("{} is no directory", path.display()));
    }
    let holds = TOKENIZER_FILES.iter().any(|f| path.join(f).is_file());
    (!holds).then(|| format!("{} holds no tokenizer.json", path.display()))
}
