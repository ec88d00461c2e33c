//! Tokenizers loaded in the background, each source once.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use super::source::{self, Loaded};
use super::template::WallClock;
use crate::config::{Model, TokenizerSource};

/// Threads that load at once: each takes seconds of CPU and up to 400 MB while it reads.
const THREADS_MAX: usize = 2;

/// A source with a chat template in place of its own, or none.
type SlotKey = (TokenizerSource, Option<PathBuf>);

/// A source's slots, each with the chat template that stands in place of the source's own.
type SlotsOfSource = Vec<(Option<PathBuf>, Arc<Slot>)>;

/// What a model is weighed with, now.
#[derive(Debug)]
pub enum SlotState {
    Loading,
    Ready(Arc<Loaded>),
    Failed(String),
}

/// The place of a loaded source; models with the same source share it.
#[derive(Debug)]
pub struct Slot {
    state: ArcSwap<SlotState>,
}

impl Slot {
    fn new(state: SlotState) -> Arc<Slot> {
        Arc::new(Slot { state: ArcSwap::from_pointee(state) })
    }

    /// Where it stands.
    pub fn state(&self) -> Arc<SlotState> {
        self.state.load_full()
    }

    /// What is loaded, if it is.
    pub fn ready(&self) -> Option<Arc<Loaded>> {
        match &**self.state.load() {
            SlotState::Ready(loaded) => Some(Arc::clone(loaded)),
            SlotState::Loading | SlotState::Failed(_) => None,
        }
    }
}

/// Slots by source.
#[derive(Debug, Default)]
pub struct Slots {
    slots: HashMap<SlotKey, Arc<Slot>>,
}

impl Slots {
    /// Slots for these models: those that `previous` holds and that did not fail are taken over, the rest begin to
    /// load on threads of their own.
    pub fn new(models: &[Model], previous: Option<&Slots>, clock: &WallClock) -> Slots {
        let mut slots: HashMap<SlotKey, Arc<Slot>> = HashMap::new();
        let mut wanted: HashMap<TokenizerSource, SlotsOfSource> = HashMap::new();
        for model in models {
            let key = (model.tokenizer.clone(), model.chat_template.clone());
            if slots.contains_key(&key) {
                continue;
            }
            let known = previous.and_then(|previous| previous.slots.get(&key));
            if let Some(known) = known.filter(|slot| !matches!(&*slot.state(), SlotState::Failed(_))) {
                slots.insert(key, Arc::clone(known));
                continue;
            }
            let slot = Slot::new(SlotState::Loading);
            wanted.entry(key.0.clone()).or_default().push((key.1.clone(), Arc::clone(&slot)));
            slots.insert(key, slot);
        }
        load(wanted.into_iter().collect(), clock);
        Slots { slots }
    }

    /// A model's slot.
    pub fn of(&self, model: &Model) -> Option<Arc<Slot>> {
        self.slots.get(&(model.tokenizer.clone(), model.chat_template.clone())).map(Arc::clone)
    }
}

type Wanted = Vec<(TokenizerSource, SlotsOfSource)>;

fn load(mut wanted: Wanted, clock: &WallClock) {
    // What needs no reading is ready at once.
    wanted.retain(|(source, slots)| {
        let light = matches!(source, TokenizerSource::Approximate | TokenizerSource::Replica);
        if light {
            fill(source, slots, clock);
        }
        !light
    });
    let threads = wanted.len().min(THREADS_MAX);
    let queue = Arc::new(Mutex::new(wanted));
    for i in 0..threads {
        let (jobs, clock) = (Arc::clone(&queue), Arc::clone(clock));
        let work = move || {
            loop {
                let Some((source, slots)) = jobs.lock().pop() else { return };
                let filled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| fill(&source, &slots, &clock)));
                if filled.is_err() {
                    fail(&slots, "the file made the tokenizers library panic");
                }
            }
        };
        if thread::Builder::new().name(format!("tokenizer-{i}")).spawn(work).is_err() && i == 0 {
            for (_, slots) in queue.lock().drain(..) {
                fail(&slots, "no thread could be started to load it");
            }
        }
    }
}

fn fail(slots: &[(Option<PathBuf>, Arc<Slot>)], reason: &str) {
    for (_, slot) in slots {
        slot.state.store(Arc::new(SlotState::Failed(reason.to_owned())));
    }
}

fn fill(source: &TokenizerSource, slots: &[(Option<PathBuf>, Arc<Slot>)], clock: &WallClock) {
    match source::read(source) {
        Ok(files) => {
            for (template, slot) in slots {
                let loaded = files.load(template.as_deref(), clock);
                if let (Some(error), Some(_)) = (&loaded.template_error, loaded.tokenizer()) {
                    log::warn!("{source:?}: {error}; conversations are weighed by approximation");
                }
                slot.state.store(Arc::new(SlotState::Ready(Arc::new(loaded))));
            }
        }
        Err(reason) => {
            log::warn!("tokenizer {source:?}: {reason}; its models are weighed by approximation");
            fail(slots, &reason);
        }
    }
}
