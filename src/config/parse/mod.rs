//! YAML to a [`Config`]: a file per part of the document.

mod models;
mod replicas;
mod rules;
mod server;

use std::collections::BTreeSet;
use std::path::Path;

use serde_yaml::Value;

use super::error::{ConfigError, Errors};
use super::locate::{self, Step};
use super::reader::{Map, Node, Sink};
use super::types::{Config, ReplicaSpec};
use crate::units::ModelName;

pub use replicas::ReplicaReader;

const TOP: &[&str] = &[
    "listen",
    "admin",
    "limits",
    "shutdown",
    "models",
    "replicas",
    "replicas_file",
    "discovery",
    "regions",
    "bands",
    "tenants",
    "health",
    "scrape",
    "warmup",
    "retries",
    "balance",
    "answer_headers",
];

/// Every table of the document and the keys it may hold: what the documentation must name.
pub const TABLES: &[(&str, &[&str])] = &[
    ("", TOP),
    ("listen[]", server::LISTEN),
    ("listen[].tls", server::LISTEN_TLS),
    ("admin", server::ADMIN),
    ("limits", server::LIMITS),
    ("shutdown", server::SHUTDOWN),
    ("models[]", models::MODEL),
    ("models[].output", models::OUTPUT),
    ("replicas[]", replicas::REPLICA),
    ("replicas[].tls", replicas::TLS),
    ("discovery", replicas::DISCOVERY),
    ("discovery.dns", replicas::DNS),
    ("discovery.etcd", replicas::ETCD),
    ("discovery.consul", replicas::CONSUL),
    ("discovery.*.tls", replicas::TLS),
    ("discovery.*.template", replicas::TEMPLATE),
    ("regions", rules::REGIONS),
    ("bands[]", rules::BAND),
    ("bands[].queue", rules::QUEUE),
    ("tenants[]", rules::TENANT),
    ("health", rules::HEALTH),
    ("scrape", rules::SCRAPE),
    ("warmup", rules::WARMUP),
    ("retries", rules::RETRIES),
    ("balance", rules::BALANCE),
];

/// Reads and validates a configuration file. Blocking: it reads the files that the configuration names, too.
///
/// # Errors
/// Every fault that was found, each with file, line, key path and what is allowed.
pub fn load(path: &Path) -> Result<Config, Errors> {
    let file = path.display().to_string();
    let text = std::fs::read_to_string(path)
        .map_err(|e| Errors::one(&file, None, format!("cannot read it: {e}"), Some("a YAML file".to_owned())))?;
    read(&text, path.parent().unwrap_or(Path::new("")), &file)
}

/// Validates a configuration given as text; relative paths are taken from `base_dir`.
///
/// # Errors
/// As [`load`]; the file is named `config`.
pub fn parse(text: &str, base_dir: &Path) -> Result<Config, Errors> {
    read(text, base_dir, "config")
}

fn read(text: &str, base_dir: &Path, file: &str) -> Result<Config, Errors> {
    let value = document(text, file)?;
    // Absolute, so that the same configuration reads the same from wherever it is checked or run.
    let base = if base_dir.as_os_str().is_empty() { std::env::current_dir() } else { std::path::absolute(base_dir) };
    let sink = Sink::new(&base.unwrap_or_else(|_| base_dir.to_owned()));
    let config = Node::root(&value, &sink).map(TOP).map(|top| whole(&top));
    match (sink.errors(file, text), config) {
        (None, Some((config, None))) => Ok(config),
        (errors, config) => {
            let mut all = errors.map(|e| e.0).unwrap_or_default();
            // Faults of the replicas' own file follow those of the file that names it.
            all.extend(config.and_then(|(_, of_file)| of_file).map(|e| e.0).unwrap_or_default());
            Err(Errors(all))
        }
    }
}

/// Reads one YAML document; an empty file is a fault, since editors and full disks leave such files behind.
fn document(text: &str, file: &str) -> Result<Value, Errors> {
    if text.trim().is_empty() {
        let allowed = "a YAML mapping with at least listen, models and replicas";
        return Err(Errors::one(file, None, "the file is empty".to_owned(), Some(allowed.to_owned())));
    }
    let invalid = |e: serde_yaml::Error| {
        let line = e.location().map(|l| l.line());
        Errors::one(file, line, format!("not valid YAML: {e}"), Some("YAML without tabs as indentation".to_owned()))
    };
    let mut value: Value = serde_yaml::from_str(text).map_err(invalid)?;
    value.apply_merge().map_err(invalid)?;
    Ok(value)
}

/// A fault of a model that only shows when its tokenizer or template is loaded, placed where the file names it.
pub fn model_fault(path: &Path, model: usize, key: &str, problem: String) -> ConfigError {
    let steps = [Step::Key("models".to_owned()), Step::Index(model), Step::Key(key.to_owned())];
    ConfigError {
        file: path.display().to_string(),
        line: std::fs::read_to_string(path).ok().and_then(|text| locate::line(&text, &steps, false)),
        path: locate::show(&steps),
        problem,
        allowed: None,
    }
}

/// Reads the list of replicas in a `replicas_file`: a YAML list, or a mapping with the one key `replicas`. An empty
/// list is a fault here as well: it would take every model out of service.
///
/// # Errors
/// As [`load`].
pub fn load_replicas(path: &Path, models: &BTreeSet<ModelName>) -> Result<Vec<ReplicaSpec>, Errors> {
    let file = path.display().to_string();
    let allowed = Some("a YAML list of replicas".to_owned());
    let text =
        std::fs::read_to_string(path).map_err(|e| Errors::one(&file, None, format!("cannot read it: {e}"), allowed))?;
    let value = document(&text, &file)?;
    let sink = Sink::new(path.parent().unwrap_or(Path::new("")));
    let root = Node::root(&value, &sink);
    let list = if root.is_map() { root.map(&["replicas"]).and_then(|m| m.get("replicas")) } else { Some(root.clone()) };
    let found = match list {
        Some(list) => replicas::list(&list, models),
        None => {
            root.fail("no replicas", Some("a list with at least one replica".to_owned()));
            Vec::new()
        }
    };
    match sink.errors(&file, &text) {
        None => Ok(found),
        Some(errors) => Err(errors),
    }
}

/// The whole document, as far as it could be read, and the faults of a replicas' file.
fn whole(top: &Map<'_>) -> (Config, Option<Errors>) {
    let models = models::models(top);
    let names: BTreeSet<ModelName> = models.iter().map(|m| m.name.clone()).collect();
    let bands = rules::bands(top);
    let regions = rules::regions(top);
    let mut of_file = None;
    let replicas_file = top.get("replicas_file").and_then(|n| n.path());
    let mut specs = top.get("replicas").map(|n| replicas::list(&n, &names)).unwrap_or_default();
    let discovery = top.get("discovery").and_then(|n| replicas::discovery(&n, &names));
    match (&replicas_file, top.get("replicas"), top.get("discovery")) {
        (Some(_), Some(node), _) => {
            node.fail(
                "both `replicas` and `replicas_file`",
                Some("one of them; discovery may stand beside it".to_owned()),
            );
        }
        (Some(file), None, _) => match load_replicas(file, &names) {
            Ok(found) => specs = found,
            Err(errors) => of_file = Some(errors),
        },
        (None, None, None) => {
            top.node.fail("no replicas", Some("replicas: [...], replicas_file: FILE, or discovery: {...}".to_owned()));
        }
        _ => {}
    }
    replicas::check_regions(top, &specs, &regions);
    let config = Config {
        listen: server::listen(top),
        admin: server::admin(top),
        limits: server::limits(top),
        shutdown: server::shutdown(top),
        tenants: rules::tenants(top, &models, &bands),
        models,
        replicas: specs,
        replicas_file,
        discovery,
        regions,
        bands,
        health: rules::health(top),
        scrape: rules::scrape(top),
        warmup: rules::warmup(top),
        retries: rules::retries(top),
        balance: rules::balance(top),
        answer_headers: top.get("answer_headers").and_then(|n| n.bool()).unwrap_or(true),
    };
    (config, of_file)
}

/// Writes down every name that was given before, at its second place.
fn unique<'a>(what: &str, names: impl IntoIterator<Item = (String, Node<'a>)>, seen: &mut BTreeSet<String>) {
    for (name, node) in names {
        if !seen.insert(name.clone()) {
            node.fail(format!("the {what} `{name}` is given twice"), Some(format!("each {what} once")));
        }
    }
}
