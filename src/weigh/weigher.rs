//! Weighs requests: the prompt counted, the answer estimated.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;

use crate::config::{Config, Engine, Model};
use crate::units::{Clock, ModelName, NameMap, TenantName, Tokens};
use crate::wire::{ApiError, Endpoint, Request};

use super::count::cache::CACHE_BYTES;
use super::count::cut::has_long_run;
use super::count::{CountCache, Pool};
use super::counted::CountSource;
use super::counted::PromptCount;
use super::draft::{self, Draft, Drafted, Sources};
use super::estimate::task::{self, Shape};
use super::estimate::{Histories, HistoryKey, OutputCaps, OutputEstimate, Task};
use super::loader::{Slot, SlotState, Slots};
use super::prompt::form;
use super::source::replica::{self, ReplicaAsk};
use super::source::{Counting, Loaded};
use super::template::local_time;

/// What one request will cost.
#[derive(Clone, Debug)]
pub struct Weight {
    pub prompt: PromptCount,
    /// Of one sequence.
    pub output: OutputEstimate,
    /// Sequences the engine will run: prompts × n.
    pub sequences: u32,
    pub history: HistoryKey,
    /// Hashes of the rendered prompt's blocks, chained: the prefix that a replica may hold in its cache.
    pub prefix: Arc<[u64]>,
    /// Tokens in one block of [`Weight::prefix`], at least 1.
    pub prefix_block_tokens: u32,
    /// From the call to the answer.
    pub spent: Duration,
}

/// What the weigher is told beside the request.
#[derive(Clone, Debug, Default)]
pub struct WeighHints {
    pub tenant: Option<TenantName>,
    /// `x-weighbridge-task`.
    pub task: Option<String>,
    /// The largest window of the model's replicas.
    pub window: Option<Tokens>,
    /// The kind of the model's replicas: engines prepare conversations differently.
    pub engine: Engine,
}

/// Where a tokenizer stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerState {
    Loading,
    Ready,
    /// With the reason; the model is weighed by approximation.
    Failed(String),
}

/// Bounds on what weighing may do on the caller's task, and on how long it may take elsewhere.
#[derive(Clone, Copy, Debug)]
pub struct WeighLimits {
    /// Larger bodies are parsed and rendered on the pool.
    pub inline_body_bytes: usize,
    /// So much may be encoded at once on the caller's task (worst 0.7 ms) …
    pub inline_miss_bytes: usize,
    /// … or so much where no long run makes it slow (0.2 ms).
    pub inline_even_bytes: usize,
    /// Waiting for the pool, at least; a prompt that is not counted by then is estimated.
    pub deadline: Duration,
    /// Waiting for the pool, for each byte of the body more.
    pub deadline_per_byte: Duration,
    /// Asking a replica for a count.
    pub replica_deadline: Duration,
}

impl Default for WeighLimits {
    fn default() -> Self {
        WeighLimits {
            inline_body_bytes: 256 << 10,
            inline_miss_bytes: 4 << 10,
            inline_even_bytes: 16 << 10,
            deadline: Duration::from_millis(10),
            // 1 MB may take 100 ms: a third of the worst case, ten times the usual one, a hundredth of its prefill.
            deadline_per_byte: Duration::from_nanos(100),
            replica_deadline: Duration::from_millis(250),
        }
    }
}

/// Where an estimate leaves open whether a prompt fits its window, the count is waited for this many deadlines more.
const PATIENCE: u32 = 20;

#[derive(Debug)]
struct Entry {
    model: Model,
    slot: Arc<Slot>,
}

/// Weighs requests by one configuration's models.
#[derive(Debug)]
pub struct Weigher {
    entries: NameMap<ModelName, Arc<Entry>>,
    /// In the configuration's order.
    names: Vec<ModelName>,
    slots: Slots,
    histories: Arc<Histories>,
    cache: Arc<CountCache>,
    pool: Arc<Pool>,
    clock: Arc<dyn Clock>,
    limits: WeighLimits,
    prefix_block: Tokens,
    ask: RwLock<Option<Arc<dyn ReplicaAsk>>>,
}

impl Weigher {
    /// A weigher for a configuration's models. Tokenizers load in the background (call within a tokio runtime or
    /// not at all: loading uses threads of its own); those that `previous` already holds are shared.
    pub fn new(
        config: &Config,
        histories: Arc<Histories>,
        previous: Option<&Weigher>,
        clock: Arc<dyn Clock>,
    ) -> Arc<Weigher> {
        Self::with_limits(config, histories, previous, clock, WeighLimits::default())
    }

    /// As [`Weigher::new`], with other limits.
    pub fn with_limits(
        config: &Config,
        histories: Arc<Histories>,
        previous: Option<&Weigher>,
        clock: Arc<dyn Clock>,
        limits: WeighLimits,
    ) -> Arc<Weigher> {
        let slots = Slots::new(&config.models, previous.map(|previous| &previous.slots), &local_time());
        let mut entries = NameMap::default();
        for model in &config.models {
            histories.set_percentile(&model.name, model.output.percentile);
            if let Some(slot) = slots.of(model) {
                entries.insert(model.name.clone(), Arc::new(Entry { model: model.clone(), slot }));
            }
        }
        Arc::new(Weigher {
            entries,
            names: config.models.iter().map(|model| model.name.clone()).collect(),
            slots,
            histories,
            cache: previous.map_or_else(|| Arc::new(CountCache::new(CACHE_BYTES)), |p| Arc::clone(&p.cache)),
            pool: previous.map_or_else(Pool::new, |previous| Arc::clone(&previous.pool)),
            clock,
            limits,
            prefix_block: config.balance.prefix_block,
            ask: RwLock::new(previous.and_then(|previous| previous.ask.read().clone())),
        })
    }

    /// Gives the way to ask replicas, for models whose tokenizer is `replica`. Until then they are approximated.
    pub fn set_replica_ask(&self, ask: Arc<dyn ReplicaAsk>) {
        *self.ask.write() = Some(ask);
    }

    /// Weighs a request. Small prompts are counted on the caller's task, large ones on the bounded pool.
    ///
    /// # Errors
    /// `invalid_request` where the template refuses the conversation; `context_length_exceeded` is decided by the
    /// caller, who knows the windows, except for bodies whose length alone proves that no window holds them.
    pub async fn weigh(&self, model: &ModelName, request: &Request, hints: &WeighHints) -> Result<Weight, ApiError> {
        let start = self.clock.now();
        let entry = self.entry(model);
        let (count, text) = self.count(&entry, request, hints).await?;
        Ok(self.weight(&entry, request, hints, count, &text, start))
    }

    /// Weighs a request wholly on the caller's thread, however long it takes. For commands and benches.
    ///
    /// # Errors
    /// As [`Weigher::weigh`].
    pub fn weigh_here(&self, model: &ModelName, request: &Request, hints: &WeighHints) -> Result<Weight, ApiError> {
        let start = self.clock.now();
        let entry = self.entry(model);
        let loaded = entry.slot.ready();
        let sources = Sources { model: &entry.model, loaded: loaded.as_deref(), cache: &self.cache };
        let (count, text) = counted_here(&sources, request, hints)?;
        Ok(self.weight(&entry, request, hints, count, &text, start))
    }

    /// A model's entry. The caller resolved the name by the same configuration, so it is there; a model that a
    /// reload has just removed is weighed by approximation.
    fn entry(&self, model: &ModelName) -> Arc<Entry> {
        match self.entries.get(model) {
            Some(entry) => Arc::clone(entry),
            None => {
                let model = approximate_model(model);
                let slots = Slots::new(std::slice::from_ref(&model), None, &local_time());
                let slot =
                    slots.of(&model).unwrap_or_else(|| unreachable!("slots hold every model they were made for"));
                Arc::new(Entry { model, slot })
            }
        }
    }

    async fn count(
        &self,
        entry: &Arc<Entry>,
        request: &Request,
        hints: &WeighHints,
    ) -> Result<(PromptCount, Vec<u8>), ApiError> {
        let loaded = entry.slot.ready();
        if let Some(Counting::Replica) = loaded.as_ref().map(|loaded| &loaded.counting)
            && let Some(counted) = self.ask_replica(entry, request, hints).await
        {
            return Ok(counted);
        }
        let extra = self.limits.deadline_per_byte.saturating_mul(u32::try_from(request.body.len()).unwrap_or(u32::MAX));
        let deadline = self.limits.deadline.saturating_add(extra);
        let sources = Sources { model: &entry.model, loaded: loaded.as_deref(), cache: &self.cache };
        if request.body.len() > self.limits.inline_body_bytes
            && loaded.as_ref().is_some_and(|l| l.tokenizer().is_some())
        {
            let (send, mut receive) = tokio::sync::oneshot::channel();
            let (entry2, cache) = (Arc::clone(entry), Arc::clone(&self.cache));
            let (request2, hints2) = (request.clone(), hints.clone());
            let loaded2 = loaded.clone();
            let queued = self.pool.run(move || {
                let sources = Sources { model: &entry2.model, loaded: loaded2.as_deref(), cache: &cache };
                // Nobody may be waiting any more; the cache has the counts all the same.
                let _ = send.send(counted_here(&sources, &request2, &hints2));
            });
            if queued && let Ok(Ok(counted)) = tokio::time::timeout(deadline, &mut receive).await {
                return counted;
            }
            // Parsing once more here costs a few ms for the largest bodies, and encodes 4 KiB.
            let estimate = draft::estimated(&sources, request)?;
            let patience = deadline.saturating_mul(PATIENCE);
            if queued
                && estimate.0.leaves_open(hints.window)
                && let Ok(Ok(counted)) = tokio::time::timeout(patience, receive).await
            {
                return counted;
            }
            return Ok(estimate);
        }
        let draft = match draft::draft(&sources, request, hints)? {
            Drafted::Count(count, text) => return Ok((count, text)),
            Drafted::Draft(draft) => draft,
        };
        if self.small(&draft) {
            let count = draft.count(&self.cache)?;
            return Ok((count, first_text(draft)));
        }
        let draft = Arc::new(draft);
        let count = self.count_on_pool(&draft, deadline, hints.window).await?;
        let text = match Arc::try_unwrap(draft) {
            Ok(draft) => first_text(draft),
            Err(draft) => draft.prompts.first().map(|prompt| prompt.text.clone().into_bytes()).unwrap_or_default(),
        };
        Ok((count, text))
    }

    /// Whether a draft is encoded faster than it is handed over, and in no case slowly.
    fn small(&self, draft: &Draft) -> bool {
        let bytes = draft.miss_bytes();
        bytes <= self.limits.inline_miss_bytes
            || bytes <= self.limits.inline_even_bytes && !draft.misses().any(has_long_run)
    }

    /// Counts on the pool; estimates where the queue is full or the deadline passes, unless the estimate leaves open
    /// whether the prompt fits at all.
    async fn count_on_pool(
        &self,
        draft: &Arc<Draft>,
        deadline: Duration,
        window: Option<Tokens>,
    ) -> Result<PromptCount, ApiError> {
        let (send, mut receive) = tokio::sync::oneshot::channel();
        let (draft2, cache) = (Arc::clone(draft), Arc::clone(&self.cache));
        let queued = self.pool.run(move || {
            let counted = draft2.count(&cache);
            drop(draft2);
            let _ = send.send(counted);
        });
        if queued && let Ok(Ok(counted)) = tokio::time::timeout(deadline, &mut receive).await {
            return counted;
        }
        let estimate = draft.approximate();
        if queued
            && estimate.leaves_open(window)
            && let Ok(Ok(counted)) = tokio::time::timeout(deadline.saturating_mul(PATIENCE), receive).await
        {
            return counted;
        }
        Ok(estimate)
    }

    async fn ask_replica(
        &self,
        entry: &Entry,
        request: &Request,
        hints: &WeighHints,
    ) -> Option<(PromptCount, Vec<u8>)> {
        let ask = self.ask.read().clone()?;
        let asked = replica::count(&*ask, &entry.model, request, hints.engine, &self.cache);
        let tokens = tokio::time::timeout(self.limits.replica_deadline, asked).await.ok()??;
        // The text for the prefix is what an estimate would be made of: roles and contents in their order.
        let sources = Sources { model: &entry.model, loaded: None, cache: &self.cache };
        let Ok(Drafted::Count(_, text)) = draft::draft(&sources, request, hints) else { return None };
        let count =
            PromptCount { tokens: Tokens(tokens), prompts: 1, longest: Tokens(tokens), source: CountSource::Replica };
        Some((count, text))
    }

    fn weight(
        &self,
        entry: &Entry,
        request: &Request,
        hints: &WeighHints,
        prompt: PromptCount,
        text: &[u8],
        start: crate::units::Time,
    ) -> Weight {
        let loaded = entry.slot.ready();
        let history = HistoryKey {
            tenant: hints.tenant.clone(),
            model: entry.model.name.clone(),
            task: task_of(request, hints, loaded.as_deref()),
        };
        let caps = OutputCaps {
            max_tokens: request.max_tokens,
            min_tokens: request.min_tokens.unwrap_or(0),
            ignore_eos: request.ignore_eos,
            window_left: hints.window.map(|window| window.saturating_sub(prompt.longest).0),
        };
        let output = if answers_in_tokens(request.endpoint) {
            self.histories.estimate(&history, &caps)
        } else {
            OutputEstimate::exact(0)
        };
        let (prefix, prefix_block_tokens) = draft::chained(&entry.model, text, &prompt, self.prefix_block);
        Weight {
            sequences: prompt.prompts.saturating_mul(request.n.max(1)),
            prompt,
            output,
            history,
            prefix,
            prefix_block_tokens,
            spent: self.clock.now().since(start),
        }
    }

    /// The histories that answers are estimated by.
    pub fn histories(&self) -> &Arc<Histories> {
        &self.histories
    }

    /// What a model is weighed with, once it is loaded.
    pub fn loaded(&self, model: &ModelName) -> Option<(Model, Arc<Loaded>)> {
        let entry = self.entries.get(model)?;
        Some((entry.model.clone(), entry.slot.ready()?))
    }

    /// The cache of counts.
    pub fn cache(&self) -> &Arc<CountCache> {
        &self.cache
    }

    /// The pool that large prompts are counted on.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Whether every tokenizer is loaded or has failed.
    pub fn ready(&self) -> bool {
        self.entries.values().all(|entry| !matches!(&*entry.slot.state(), SlotState::Loading))
    }

    /// Tells each model's tokenizer state, for metrics and `check`.
    pub fn tokenizers(&self) -> Vec<(ModelName, TokenizerState)> {
        let state = |entry: &Arc<Entry>| match &*entry.slot.state() {
            SlotState::Loading => TokenizerState::Loading,
            SlotState::Ready(_) => TokenizerState::Ready,
            SlotState::Failed(reason) => TokenizerState::Failed(reason.clone()),
        };
        self.names.iter().filter_map(|name| Some((name.clone(), state(self.entries.get(name)?)))).collect()
    }
}

fn first_text(draft: Draft) -> Vec<u8> {
    draft.prompts.into_iter().next().map(|prompt| prompt.text.into_bytes()).unwrap_or_default()
}

/// Counts a request on this thread.
fn counted_here(
    sources: &Sources<'_>,
    request: &Request,
    hints: &WeighHints,
) -> Result<(PromptCount, Vec<u8>), ApiError> {
    match draft::draft(sources, request, hints)? {
        Drafted::Count(count, text) => Ok((count, text)),
        Drafted::Draft(draft) => {
            let count = draft.count(sources.cache)?;
            Ok((count, first_text(draft)))
        }
    }
}

fn approximate_model(name: &ModelName) -> Model {
    Model {
        name: name.clone(),
        aliases: Vec::new(),
        adapters: Vec::new(),
        tokenizer: crate::config::TokenizerSource::Approximate,
        chat_template: None,
        output: crate::config::OutputSettings::default(),
        tokens_per_image: Tokens(765),
        content_format: crate::config::ContentFormat::Auto,
        tools_with_choice_none: true,
    }
}

/// Whether an endpoint's answer is generated.
fn answers_in_tokens(endpoint: Endpoint) -> bool {
    match endpoint {
        Endpoint::ChatCompletions
        | Endpoint::Completions
        | Endpoint::Responses
        | Endpoint::Messages
        | Endpoint::AudioTranscriptions
        | Endpoint::AudioTranslations
        | Endpoint::AudioSpeech => true,
        Endpoint::Embeddings
        | Endpoint::Rerank
        | Endpoint::Score
        | Endpoint::Classify
        | Endpoint::CountTokens
        | Endpoint::Tokenize
        | Endpoint::Detokenize => false,
    }
}

/// The client's hint, else what the request's shape says.
fn task_of(request: &Request, hints: &WeighHints, loaded: Option<&Loaded>) -> Task {
    let hinted = [request.task_type.as_deref(), hints.task.as_deref()].into_iter().flatten().find_map(Task::from_hint);
    if let Some(task) = hinted {
        return task;
    }
    let text = ["messages", "prompt", "input"].iter().find_map(|name| form::raw(request, name));
    let choice_none = form::raw(request, "tool_choice") == Some(b"\"none\"");
    let structured =
        ["response_format", "guided_json", "guided_choice", "guided_grammar", "structured_outputs", "grammar"]
            .iter()
            .filter_map(|name| form::raw(request, name))
            .any(|raw| memchr::memmem::find(raw, b"\"text\"").is_none());
    task::detect(&Shape {
        tools: !choice_none && form::raw(request, "tools").is_some_and(|raw| raw.len() > 2),
        structured,
        max_tokens: request.max_tokens,
        reasoning: reasons(request, loaded),
        text: text.unwrap_or_default(),
    })
}

/// Whether the answer begins with reasoning: the request's switch, else the template's own default. Answers with and
/// without reasoning never share a history.
fn reasons(request: &Request, loaded: Option<&Loaded>) -> bool {
    use super::template::dict::from_json;
    let json = |name: &str| from_json(form::raw(request, name)?).ok();
    let attr = |value: &minijinja::Value, name: &str| value.get_attr(name).ok().filter(|v| !v.is_undefined());
    if let Some(kwargs) = json("chat_template_kwargs")
        && let Some(on) = attr(&kwargs, "enable_thinking").or_else(|| attr(&kwargs, "thinking"))
    {
        return on.is_true();
    }
    let effort = json("reasoning_effort").or_else(|| attr(&json("reasoning")?, "effort"));
    if let Some(effort) = effort.as_ref().and_then(|effort| effort.as_str()) {
        return !matches!(effort, "none" | "minimal");
    }
    if let Some(thinking) = json("thinking") {
        return attr(&thinking, "type").is_some_and(|kind| kind.as_str() != Some("disabled"));
    }
    loaded.and_then(|loaded| loaded.templates.as_ref()).is_some_and(|templates| templates.reasons())
}
