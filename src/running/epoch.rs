//! One configuration in force, with what was built from it.

use std::sync::Arc;

use crate::config::{BandSpec, Config, Model};
use crate::fleet::RetryBudget;
use crate::units::{Band, NameMap};
use crate::weigh::Weigher;

use super::tenants::Tenants;

/// A model as clients name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    Name,
    /// Another name for the model that the engine does not know.
    Alias,
    /// An adapter's name, which the engine knows.
    Adapter,
}

/// What a client's model name stands for.
#[derive(Clone, Debug)]
pub struct ModelEntry {
    pub model: Arc<Model>,
    pub named: Named,
}

/// One configuration in force.
#[derive(Debug)]
pub struct Epoch {
    pub revision: u64,
    pub config: Config,
    pub weigher: Arc<Weigher>,
    pub tenants: Tenants,
    pub retry_budget: RetryBudget,
    models: NameMap<String, ModelEntry>,
    default_band: Band,
}

impl Epoch {
    /// Builds an epoch, which follows `before`.
    ///
    /// # Errors
    /// A tenant's key file that cannot be read.
    pub fn new(revision: u64, config: Config, weigher: Arc<Weigher>, before: Option<&Epoch>) -> anyhow::Result<Epoch> {
        let tenants = Tenants::load(&config.tenants)?;
        let mut models = NameMap::default();
        for model in &config.models {
            let entry = Arc::new(model.clone());
            let all = std::iter::once((model.name.as_str().to_owned(), Named::Name))
                .chain(model.aliases.iter().map(|a| (a.clone(), Named::Alias)))
                .chain(model.adapters.iter().map(|a| (a.clone(), Named::Adapter)));
            for (name, named) in all {
                models.insert(name, ModelEntry { model: entry.clone(), named });
            }
        }
        let default_band = config.bands.iter().position(|b| b.default).unwrap_or(0);
        let default_band = Band(u8::try_from(default_band).unwrap_or(u8::MAX));
        let (share, min_per_second) = (config.retries.budget, config.retries.min_per_second);
        let retry_budget = match before {
            Some(before) => before.retry_budget.renewed(share, min_per_second),
            None => RetryBudget::new(share, min_per_second),
        };
        Ok(Epoch { revision, retry_budget, config, weigher, tenants, models, default_band })
    }

    /// What a client's model name stands for.
    pub fn model(&self, name: &str) -> Option<&ModelEntry> {
        self.models.get(name)
    }

    /// The one model, where only one is configured: clients may leave the name out.
    pub fn only_model(&self) -> Option<ModelEntry> {
        match self.config.models.as_slice() {
            [one] => self.models.get(one.name.as_str()).cloned(),
            _ => None,
        }
    }

    /// The band of a client that says nothing.
    pub fn default_band(&self) -> Band {
        self.default_band
    }

    /// A band's settings.
    pub fn band(&self, band: Band) -> &BandSpec {
        let last = self.config.bands.len().saturating_sub(1);
        &self.config.bands[usize::from(band.0).min(last)]
    }

    /// The band a client named or numbered.
    pub fn band_by_name(&self, text: &str) -> Option<Band> {
        let index = match self.config.bands.iter().position(|b| b.name == text) {
            Some(index) => index,
            None => text.parse::<usize>().ok().filter(|n| *n < self.config.bands.len())?,
        };
        u8::try_from(index).ok().map(Band)
    }
}
