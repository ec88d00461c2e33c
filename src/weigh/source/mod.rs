//! Where tokenizers and chat templates come from.

pub mod directory;
pub mod hub;
pub mod ranks;
pub mod replica;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::TokenizerSource;

use super::count::Tokenizer;
use super::media::MediaRules;
use super::template::{Templates, WallClock};

/// What a source gave.
#[derive(Debug)]
pub struct Loaded {
    pub counting: Counting,
    /// `None` where the model has no chat template, with the reason in `template_error`.
    pub templates: Option<Templates>,
    pub template_error: Option<String>,
    pub media: MediaRules,
}

/// What counts a model's text.
#[derive(Clone, Debug)]
pub enum Counting {
    Tokenizer(Arc<Tokenizer>),
    /// The engine's own `/tokenize`.
    Replica,
    /// The approximation alone.
    Approximate,
}

impl Loaded {
    /// A model that is weighed by approximation.
    pub fn approximate() -> Loaded {
        Loaded { counting: Counting::Approximate, templates: None, template_error: None, media: MediaRules::default() }
    }

    /// The tokenizer, where there is one.
    pub fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        match &self.counting {
            Counting::Tokenizer(tokenizer) => Some(tokenizer),
            Counting::Replica | Counting::Approximate => None,
        }
    }
}

/// A tokenizer with the files around it, before templates are compiled for each model.
#[derive(Debug)]
pub struct Files {
    pub counting: Counting,
    /// Templates by name.
    pub templates: Vec<(String, String)>,
    /// `bos_token` and its kin.
    pub specials: Vec<(String, String)>,
    pub media: MediaRules,
}

impl Files {
    fn without_templates(counting: Counting) -> Files {
        Files { counting, templates: Vec::new(), specials: Vec::new(), media: MediaRules::default() }
    }

    /// Compiles the templates, `chat_template` (a file) in place of the source's own where it is given.
    pub fn load(&self, chat_template: Option<&Path>, clock: &WallClock) -> Loaded {
        let named = match chat_template {
            Some(path) => std::fs::read_to_string(path)
                .map(|text| vec![("default".to_owned(), text)])
                .map_err(|e| format!("chat template {}: {e}", path.display())),
            None if self.templates.is_empty() => Err("the model has no chat template".to_owned()),
            None => Ok(self.templates.clone()),
        };
        let compiled = named.and_then(|named| Templates::new(named, self.specials.clone(), Arc::clone(clock)));
        let (templates, template_error) = match compiled {
            Ok(templates) => (Some(templates), None),
            Err(error) => (None, Some(error)),
        };
        Loaded { counting: self.counting.clone(), templates, template_error, media: self.media.clone() }
    }
}

/// Reads a source. Takes seconds of CPU: never on the event loop.
///
/// # Errors
/// What is missing or broken, with the file.
pub fn read(source: &TokenizerSource) -> Result<Files, String> {
    match source {
        TokenizerSource::Directory(dir) => directory::read(dir),
        TokenizerSource::Hub(repo) => directory::read(&hub::fetch(repo, &hub::Hub::from_env())?),
        TokenizerSource::Tiktoken(name) => {
            ranks::tiktoken(name).map(|t| Files::without_templates(Counting::Tokenizer(Arc::new(t))))
        }
        TokenizerSource::Mistral(file) => mistral(file),
        TokenizerSource::Replica => Ok(Files::without_templates(Counting::Replica)),
        TokenizerSource::Approximate => Ok(Files::without_templates(Counting::Approximate)),
    }
}

/// A tekken file, with the template and configuration that stand beside it.
fn mistral(file: &Path) -> Result<Files, String> {
    let json = std::fs::read(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let tokenizer = ranks::tekken(&json).map_err(|e| format!("{}: {e}", file.display()))?;
    let dir: PathBuf = file.parent().map(Path::to_path_buf).unwrap_or_default();
    let (templates, mut specials) = directory::templates(&dir)?;
    if specials.is_empty() {
        specials = [("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>")]
            .map(|(name, text)| (name.to_owned(), text.to_owned()))
            .to_vec();
    }
    Ok(Files {
        counting: Counting::Tokenizer(Arc::new(tokenizer)),
        templates,
        specials,
        media: MediaRules::of_directory(&dir),
    })
}
