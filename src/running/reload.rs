//! A reload: read, validated as a whole, then taken in one step; or refused, and nothing changes.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::balance::Settings;
use crate::config::{self, Config};
use crate::weigh::Weigher;

use super::{Epoch, Running};

/// Revisions remembered.
const REVISIONS_MAX: usize = 10;

/// One configuration that was in force.
#[derive(Clone, Debug, Serialize)]
pub struct Revision {
    pub revision: u64,
    pub taken_at_unix: f64,
    pub replicas: usize,
    pub models: usize,
    /// What changed against the revision before, a line each.
    pub changes: Vec<String>,
}

impl Revision {
    pub(super) fn of(epoch: &Epoch, changes: Vec<String>) -> Revision {
        Revision {
            revision: epoch.revision,
            taken_at_unix: unix_seconds(),
            replicas: epoch.config.replicas.len(),
            models: epoch.config.models.len(),
            changes,
        }
    }
}

/// What came of a reload.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "result", rename_all = "lowercase")]
pub enum ReloadOutcome {
    Applied { revision: u64, changes: Vec<String> },
    Unchanged { revision: u64 },
    Failed { errors: Vec<String> },
}

pub(super) fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

impl Running {
    /// Reads the configuration file again. `check` says what else is wrong with it (certificates that cannot be used).
    /// Blocking: file reads and validation; not for an async worker.
    pub fn reload(&self, check: impl Fn(&Config) -> Vec<String>) -> ReloadOutcome {
        // One at a time: two signals in a row must not interleave.
        let _one = self.reloading.lock();
        let outcome = match config::load(&self.config_path) {
            Ok(config) => match check(&config) {
                errors if errors.is_empty() => self.take(config),
                errors => ReloadOutcome::Failed { errors },
            },
            Err(errors) => ReloadOutcome::Failed { errors: errors.0.iter().map(ToString::to_string).collect() },
        };
        let label = match &outcome {
            ReloadOutcome::Applied { revision, changes } => {
                tracing::info!(revision, changes = changes.join("; "), "configuration applied");
                "applied"
            }
            ReloadOutcome::Unchanged { revision } => {
                tracing::info!(revision, "configuration unchanged");
                "unchanged"
            }
            ReloadOutcome::Failed { errors } => {
                for error in errors {
                    tracing::error!(file = %self.config_path.display(), "configuration refused, the old one stays: {error}");
                }
                "failed"
            }
        };
        let failed = matches!(outcome, ReloadOutcome::Failed { .. });
        self.metrics.config_reload_failed.set(i64::from(failed));
        if !failed {
            self.metrics.config_last_success.set(unix_seconds());
        }
        self.metrics.reloads.with_label_values(&[label]).inc();
        outcome
    }

    fn take(&self, config: Config) -> ReloadOutcome {
        let before = self.epoch();
        let changes: Vec<String> = config::diff(&config::digest(&before.config), &config::digest(&config))
            .iter()
            .map(std::string::ToString::to_string)
            .collect();
        let weigher = Weigher::new(&config, self.histories.clone(), Some(&before.weigher), self.clock.clone());
        if let Some(fleet) = self.fleet() {
            weigher.set_replica_ask(fleet.clone());
        }
        let epoch = match Epoch::new(before.revision + 1, config, weigher, Some(&before)) {
            Ok(epoch) => Arc::new(epoch),
            Err(e) => return ReloadOutcome::Failed { errors: vec![format!("{e:#}")] },
        };
        // Key files and certificates may have changed although the YAML did not: the epoch is taken all the same,
        // the revision counts only what the YAML says.
        if changes.is_empty() {
            let mut same = Arc::try_unwrap(epoch).unwrap_or_else(|_| unreachable!("an epoch that was not shared yet"));
            same.revision = before.revision;
            self.epoch.store(Arc::new(same));
            if let Some(fleet) = self.fleet() {
                fleet.read_files_again();
            }
            return ReloadOutcome::Unchanged { revision: before.revision };
        }
        let config = &epoch.config;
        let settings =
            Settings { balance: config.balance.clone(), bands: config.bands.clone(), regions: config.regions.clone() };
        match self.fleet() {
            Some(fleet) => fleet.apply(config, settings),
            None => self.balancer.apply(settings, &config.replicas),
        }
        self.quotas.apply(&config.tenants, self.clock.now());
        self.epoch.store(epoch.clone());
        self.metrics.config_revision.set(i64::try_from(epoch.revision).unwrap_or(i64::MAX));
        let revision = Revision::of(&epoch, changes.clone());
        let mut revisions = self.revisions.lock();
        revisions.push_back(revision);
        while revisions.len() > REVISIONS_MAX {
            revisions.pop_front();
        }
        ReloadOutcome::Applied { revision: epoch.revision, changes }
    }

    /// The last revisions, oldest first.
    pub fn revisions(&self) -> Vec<Revision> {
        self.revisions.lock().iter().cloned().collect()
    }
}
