//! A model's directory: `tokenizer.json` (or `tekken.json`), `tokenizer_config.json`, `special_tokens_map.json`,
//! `chat_template.jinja`, `additional_chat_templates/NAME.jinja`.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value as Json;

use super::{Counting, Files, ranks};
use crate::weigh::count::Tokenizer;
use crate::weigh::media::MediaRules;

/// Special tokens that are template variables, in Hugging Face's names.
const SPECIALS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Reads a directory.
///
/// # Errors
/// What is missing or broken, with the file.
pub fn read(dir: &Path) -> Result<Files, String> {
    let path = dir.join("tokenizer.json");
    let tokenizer = if path.exists() {
        let json = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        Tokenizer::from_json(&json).map_err(|e| format!("{}: {e}", path.display()))?
    } else {
        let tekken = dir.join("tekken.json");
        let json = std::fs::read(&tekken).map_err(|_| {
            format!("{}: no tokenizer.json and no tekken.json there; name a directory that holds one", dir.display())
        })?;
        ranks::tekken(&json).map_err(|e| format!("{}: {e}", tekken.display()))?
    };
    let (templates, specials) = templates(dir)?;
    Ok(Files {
        counting: Counting::Tokenizer(Arc::new(tokenizer)),
        templates,
        specials,
        media: MediaRules::of_directory(dir),
    })
}

fn json(path: &Path) -> Result<Json, String> {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|e| format!("{}: {e}", path.display())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Json::Null),
        Err(e) => Err(format!("{}: {e}", path.display())),
    }
}

/// Names with their texts.
pub type Named = Vec<(String, String)>;

/// A directory's templates by name, and its special tokens.
///
/// # Errors
/// A file that is there and cannot be read.
pub fn templates(dir: &Path) -> Result<(Named, Named), String> {
    let config = json(&dir.join("tokenizer_config.json"))?;
    let map = json(&dir.join("special_tokens_map.json"))?;
    let specials = SPECIALS
        .iter()
        .filter_map(|name| Some(((*name).to_owned(), token(&config[*name]).or_else(|| token(&map[*name]))?)))
        .collect();
    let mut named = Named::new();
    let file = dir.join("chat_template.jinja");
    if let Ok(text) = std::fs::read_to_string(&file) {
        named.push(("default".to_owned(), text));
    }
    let more = dir.join("additional_chat_templates");
    if let Ok(entries) = std::fs::read_dir(&more) {
        let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        for path in paths.iter().filter(|path| path.extension().is_some_and(|e| e == "jinja")) {
            let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
            named.push((path.file_stem().unwrap_or_default().to_string_lossy().into_owned(), text));
        }
    }
    if named.is_empty() {
        let processor = json(&dir.join("chat_template.json"))?;
        let sent = if processor["chat_template"].is_null() { &config } else { &processor };
        named = in_config(&sent["chat_template"]);
    }
    Ok((named, specials))
}

/// A token given as text or as an object with its content.
fn token(value: &Json) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

/// One template as text, or several as a list of `{name, template}`.
fn in_config(value: &Json) -> Named {
    if let Some(text) = value.as_str() {
        return vec![("default".to_owned(), text.to_owned())];
    }
    let Some(list) = value.as_array() else { return Named::new() };
    list.iter()
        .filter_map(|entry| Some((entry["name"].as_str()?.to_owned(), entry["template"].as_str()?.to_owned())))
        .collect()
}
