//! Histories over a restart: a small file a model, written whole or not at all, ignored where it is damaged.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Histories, Task};
use crate::config::Model;
use crate::units::{ModelName, TenantName};

/// The file's own version; another one is not read.
const VERSION: u32 = 1;
/// The largest file read: 200 histories of 10,000 answers.
const FILE_BYTES_MAX: u64 = 16 << 20;

#[derive(Serialize, Deserialize)]
struct File {
    version: u32,
    model: ModelName,
    histories: Vec<Kept>,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    tenant: Option<TenantName>,
    task: Option<Task>,
    /// Output tokens, oldest first.
    lengths: Vec<u32>,
}

impl Histories {
    /// Reads the state files of these models. What is missing or damaged is left out, with a line in the log.
    pub fn load(&self, models: &[Model]) {
        for model in models {
            self.set_percentile(&model.name, model.output.percentile);
            let Some(path) = &model.output.history else { continue };
            match read(path, &model.name) {
                Ok(Some(file)) => {
                    let percentile = self.percentile(&model.name);
                    for kept in file.histories {
                        let lengths = kept.lengths.into_iter().map(u64::from);
                        self.history(&model.name, kept.task, kept.tenant, |h| h.fill(lengths, percentile));
                    }
                }
                Ok(None) => {}
                Err(reason) => log::warn!("{}: {reason}; histories begin anew", path.display()),
            }
        }
    }

    /// Writes the state files of these models: whole beside the old file, then in its place.
    ///
    /// # Errors
    /// The first file that could not be written, with its name; the others are written all the same.
    pub fn save(&self, models: &[Model]) -> Result<(), String> {
        let mut result = Ok(());
        for model in models {
            let Some(path) = &model.output.history else { continue };
            let mut histories: Vec<Kept> = Vec::new();
            let mut places: Vec<_> = {
                let places = self.places.read();
                let own = places.iter().filter(|(place, _)| place.model == model.name);
                own.map(|(place, history)| (place.clone(), std::sync::Arc::clone(history))).collect()
            };
            places.sort_by(|a, b| a.0.cmp(&b.0));
            for (place, history) in places {
                let lengths = history.sketch.lock().samples().collect();
                histories.push(Kept { tenant: place.tenant, task: place.task, lengths });
            }
            let file = File { version: VERSION, model: model.name.clone(), histories };
            let written = serde_json::to_vec(&file).map_err(|e| e.to_string()).and_then(|text| write(path, &text));
            if let Err(error) = written {
                result = result.and(Err(format!("{}: {error}", path.display())));
            }
        }
        result
    }
}

fn read(path: &Path, model: &ModelName) -> Result<Option<File>, String> {
    let size = match std::fs::metadata(path) {
        Ok(metadata) => metadata.len(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e.to_string()),
    };
    if size > FILE_BYTES_MAX {
        return Err(format!("{size} bytes are more than such a file has"));
    }
    let text = std::fs::read(path).map_err(|e| e.to_string())?;
    let file: File = serde_json::from_slice(&text).map_err(|e| format!("damaged: {e}"))?;
    if file.version != VERSION || file.model != *model {
        return Err(format!("it is of model {} and version {}", file.model, file.version));
    }
    Ok(Some(file))
}

fn write(path: &Path, text: &[u8]) -> Result<(), String> {
    use std::io::Write;
    let told = |e: std::io::Error| e.to_string();
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        std::fs::create_dir_all(dir).map_err(told)?;
    }
    let part = path.with_extension(format!("part-{}", std::process::id()));
    let mut file = std::fs::File::create(&part).map_err(told)?;
    file.write_all(text).map_err(told)?;
    // On the disk before it takes the old file's place, or a power cut could leave neither.
    file.sync_all().map_err(told)?;
    std::fs::rename(&part, path).map_err(told)
}
