//! A model server's engine: continuous batching on a clock that is passed in.
//!
//! Pure. The simulated replica drives it in real time, the simulated fleet on a virtual clock; both see the same
//! waiting, batching, preemption and prefix reuse. It follows vLLM's scheduler: running sequences first, each
//! decoding one token or continuing its prompt within the step's token budget; then waiting ones, first come first
//! served (or by priority), while sequences, budget and KV blocks last; when a running sequence finds no block,
//! the last one (of the lowest priority) is preempted and computed again later.

mod blocks;
mod shape;

pub use blocks::{Blocks, Mixed};
pub use shape::{BLOCK_TOKENS, EngineShape};

use std::collections::VecDeque;
use std::sync::Arc;

use crate::units::Time;

/// One sequence to generate.
#[derive(Clone, Debug)]
pub struct Job {
    /// The caller's own number, unique while the job is in the engine.
    pub id: u64,
    /// Prompt tokens, at least 1.
    pub prompt: u32,
    /// Tokens to generate, at least 1.
    pub output: u32,
    /// Lower is sooner where the engine schedules by priority.
    pub priority: i64,
    /// Chained hashes of the blocks of prompt and answer, as far as another prompt may share them.
    pub chain: Arc<[u64]>,
}

/// What a step did for one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Emitted {
    pub id: u64,
    /// Tokens generated so far, the new one included.
    pub produced: u32,
    /// Prompt tokens that were found in the prefix cache when the prompt was first computed.
    pub cached: u32,
    pub finished: bool,
}

/// What an engine counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub steps: u64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub generated_tokens: u64,
    pub preemptions: u64,
}

#[derive(Debug)]
struct Sequence {
    job: Job,
    arrived: u64,
    /// Tokens whose keys and values are in memory.
    computed: u32,
    /// Tokens to compute before the next one can be generated: the prompt, and after a preemption the answer so far.
    target: u32,
    produced: u32,
    /// Tokens of this step; zero between steps.
    scheduled: u32,
    cached: u32,
    /// Registered blocks, from the front; then anonymous ones.
    registered: Vec<u32>,
    anonymous: u32,
    /// How far `chain` has been offered for registration.
    offered: u32,
}

impl Sequence {
    fn held(&self) -> u32 {
        self.registered.len() as u32 + self.anonymous
    }

    fn rank(&self) -> (i64, u64) {
        (self.job.priority, self.arrived)
    }
}

/// One engine.
#[derive(Debug)]
pub struct Engine {
    shape: EngineShape,
    blocks: Blocks,
    running: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    arrivals: u64,
    counters: Counters,
    step_end: Option<Time>,
}

impl Engine {
    /// An idle engine.
    pub fn new(shape: EngineShape) -> Engine {
        Engine {
            blocks: Blocks::new(shape.kv_blocks),
            shape,
            running: Vec::new(),
            waiting: VecDeque::new(),
            arrivals: 0,
            counters: Counters::default(),
            step_end: None,
        }
    }

    pub fn shape(&self) -> &EngineShape {
        &self.shape
    }

    /// Changes the speed from the next step on.
    pub fn set_speed(&mut self, speed: f64) {
        self.shape.speed = speed.max(1e-6);
    }

    /// Sequences being computed.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Sequences that wait for a place.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Held KV memory, 0 to 1.
    pub fn kv_usage(&self) -> f64 {
        self.blocks.usage()
    }

    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// When the step that was begun will be over; `None` between steps.
    pub fn step_end(&self) -> Option<Time> {
        self.step_end
    }

    /// Queues a job. One that no step could ever hold is queued all the same and never runs: refuse it before, by
    /// [`Engine::fits`].
    pub fn submit(&mut self, job: Job) {
        let arrived = self.arrivals;
        self.arrivals += 1;
        let job = Job { prompt: job.prompt.max(1), output: job.output.max(1), ..job };
        let sequence = Sequence {
            arrived,
            computed: 0,
            target: job.prompt,
            produced: 0,
            scheduled: 0,
            cached: 0,
            registered: Vec::new(),
            anonymous: 0,
            offered: 0,
            job,
        };
        self.enqueue(sequence);
    }

    /// Whether an empty engine could run such a job to its end.
    pub fn fits(&self, prompt: u32, output: u32) -> bool {
        prompt.saturating_add(output) <= self.shape.max_model_len
            && (prompt.saturating_add(output)).div_ceil(BLOCK_TOKENS) <= self.shape.kv_blocks
    }

    /// Takes a job out, running or waiting; its blocks are free at once. Tells whether it was there.
    pub fn cancel(&mut self, id: u64) -> bool {
        if let Some(at) = self.running.iter().position(|s| s.job.id == id) {
            let sequence = self.running.remove(at);
            self.blocks.give_back(sequence.anonymous, &sequence.registered);
            return true;
        }
        if let Some(at) = self.waiting.iter().position(|s| s.job.id == id) {
            self.waiting.remove(at);
            return true;
        }
        false
    }

    /// Takes out everything and forgets the prefix cache, as a restart does. Returns the jobs' ids.
    pub fn reset(&mut self) -> Vec<u64> {
        let ids = self.running.iter().chain(self.waiting.iter()).map(|s| s.job.id).collect();
        self.running.clear();
        self.waiting.clear();
        self.blocks = Blocks::new(self.shape.kv_blocks);
        self.step_end = None;
        ids
    }

    /// Schedules the next step at `now` and returns when it will be over; `None` where there is nothing to compute
    /// or a step is still on its way.
    pub fn begin_step(&mut self, now: Time) -> Option<Time> {
        if self.step_end.is_some() {
            return None;
        }
        let mut budget = self.shape.step_tokens;
        let mut plan = Plan::default();
        let preempted = self.schedule_running(&mut budget, &mut plan);
        if !preempted {
            self.admit_waiting(&mut budget, &mut plan);
        }
        if plan.sequences == 0 {
            return None;
        }
        let end = now.after(self.shape.step(plan.sequences, plan.context, plan.prefill_seconds));
        self.counters.steps += 1;
        self.step_end = Some(end);
        Some(end)
    }

    /// Ends the step that was begun, and appends what each sequence got from it.
    pub fn finish_step(&mut self, out: &mut Vec<Emitted>) {
        if self.step_end.take().is_none() {
            return;
        }
        let mut any_finished = false;
        for sequence in &mut self.running {
            if sequence.scheduled == 0 {
                continue;
            }
            sequence.computed += sequence.scheduled;
            sequence.scheduled = 0;
            register(&mut self.blocks, sequence);
            if sequence.computed < sequence.target {
                continue;
            }
            sequence.produced += 1;
            sequence.target = sequence.computed + 1;
            self.counters.generated_tokens += 1;
            let finished = sequence.produced >= sequence.job.output;
            any_finished |= finished;
            out.push(Emitted { id: sequence.job.id, produced: sequence.produced, cached: sequence.cached, finished });
        }
        if any_finished {
            let blocks = &mut self.blocks;
            self.running.retain(|sequence| {
                let keep = sequence.produced < sequence.job.output;
                if !keep {
                    blocks.give_back(sequence.anonymous, &sequence.registered);
                }
                keep
            });
        }
    }

    /// Returns whether a sequence was preempted.
    fn schedule_running(&mut self, budget: &mut u32, plan: &mut Plan) -> bool {
        let mut preempted = false;
        let mut at = 0;
        while at < self.running.len() && *budget > 0 {
            let sequence = &self.running[at];
            let tokens = (sequence.target - sequence.computed).min(*budget);
            let wanted = (sequence.computed + tokens).div_ceil(BLOCK_TOKENS).saturating_sub(sequence.held());
            let mut gone = false;
            while wanted > 0 && !self.blocks.take(wanted) {
                preempted = true;
                let victim = self.victim();
                gone = victim == at;
                self.preempt(victim, budget, plan);
                if gone {
                    break;
                }
                at -= usize::from(victim < at);
            }
            if gone {
                continue;
            }
            let sequence = &mut self.running[at];
            sequence.anonymous += wanted;
            sequence.scheduled = tokens;
            *budget -= tokens;
            plan.add(&self.shape, sequence);
            at += 1;
        }
        preempted
    }

    fn admit_waiting(&mut self, budget: &mut u32, plan: &mut Plan) {
        while *budget > 0 && self.running.len() < self.shape.max_sequences as usize {
            let Some(sequence) = self.waiting.front() else { break };
            // The last prompt token is always computed: its result is the first token of the answer.
            let sharable = if self.shape.prefix_cache { (sequence.target - 1) / BLOCK_TOKENS } else { 0 };
            let chain = &sequence.job.chain[..sequence.job.chain.len().min(sharable as usize)];
            let (found, idle) = self.blocks.find(chain);
            let cached = found * BLOCK_TOKENS;
            let tokens = (sequence.target - cached).min(*budget);
            let wanted = (cached + tokens).div_ceil(BLOCK_TOKENS) - found;
            if wanted + idle > self.blocks.available() {
                break;
            }
            let Some(mut sequence) = self.waiting.pop_front() else { break };
            sequence.registered.clear();
            for hash in &sequence.job.chain[..found as usize] {
                sequence.registered.extend(self.blocks.hold(*hash));
            }
            let taken = self.blocks.take(wanted);
            debug_assert!(taken, "room was counted above");
            sequence.anonymous = wanted;
            sequence.offered = found;
            sequence.computed = cached;
            sequence.scheduled = tokens;
            if sequence.produced == 0 {
                sequence.cached = cached;
                self.counters.prompt_tokens += u64::from(sequence.job.prompt);
                self.counters.cached_tokens += u64::from(cached);
            }
            *budget -= tokens;
            plan.add(&self.shape, &sequence);
            self.running.push(sequence);
        }
    }

    fn victim(&self) -> usize {
        let last = self.running.len() - 1;
        if !self.shape.priority {
            return last;
        }
        (0..=last).max_by_key(|&i| self.running[i].rank()).unwrap_or(last)
    }

    fn preempt(&mut self, at: usize, budget: &mut u32, plan: &mut Plan) {
        let mut sequence = self.running.remove(at);
        if sequence.scheduled > 0 {
            *budget += sequence.scheduled;
            plan.remove(&self.shape, &sequence);
        }
        self.blocks.give_back(sequence.anonymous, &sequence.registered);
        self.counters.preemptions += 1;
        sequence.registered.clear();
        sequence.anonymous = 0;
        sequence.offered = 0;
        sequence.computed = 0;
        sequence.scheduled = 0;
        sequence.target = sequence.job.prompt + sequence.produced;
        self.enqueue(sequence);
    }

    /// First come first served by default: a preempted sequence came before all that wait.
    fn enqueue(&mut self, sequence: Sequence) {
        let by_priority = self.shape.priority;
        let key = |s: &Sequence| if by_priority { s.rank() } else { (0, s.arrived) };
        let own = key(&sequence);
        let at = self.waiting.partition_point(|other| key(other) < own);
        self.waiting.insert(at, sequence);
    }
}

/// The step being put together.
#[derive(Debug, Default)]
struct Plan {
    sequences: usize,
    context: u64,
    prefill_seconds: f64,
}

impl Plan {
    fn cost(shape: &EngineShape, sequence: &Sequence) -> (u64, f64) {
        // A decoding sequence computes one token past all that it holds; anything longer is prefill.
        if sequence.scheduled == 1 && sequence.produced > 0 && sequence.computed + 1 == sequence.target {
            return (u64::from(sequence.computed), 0.0);
        }
        (0, shape.prefill_seconds(sequence.computed, sequence.computed + sequence.scheduled))
    }

    fn add(&mut self, shape: &EngineShape, sequence: &Sequence) {
        let (context, prefill) = Plan::cost(shape, sequence);
        self.sequences += 1;
        self.context += context;
        self.prefill_seconds += prefill;
    }

    fn remove(&mut self, shape: &EngineShape, sequence: &Sequence) {
        let (context, prefill) = Plan::cost(shape, sequence);
        self.sequences -= 1;
        self.context -= context;
        self.prefill_seconds -= prefill;
    }
}

/// Registers the blocks that are full now, as far as the chain names them.
fn register(blocks: &mut Blocks, sequence: &mut Sequence) {
    let full = (sequence.computed / BLOCK_TOKENS).min(sequence.job.chain.len() as u32);
    while sequence.offered < full {
        // A block of the same content computed elsewhere at the same time: this copy stays anonymous.
        if let Some(slot) = blocks.register(sequence.job.chain[sequence.offered as usize]) {
            sequence.registered.push(slot);
            sequence.anonymous -= 1;
        }
        sequence.offered += 1;
    }
}

#[cfg(test)]
mod calibration;
#[cfg(test)]
mod tests;
