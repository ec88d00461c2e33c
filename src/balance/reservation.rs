//! One request's entry in a ledger: drawn down while tokens stream, settled once, released on drop.

use std::sync::Arc;

use crate::units::{Time, Tokens};
use crate::wire::Usage;

use super::ask::Ask;
use super::pool::Booked;
use super::remaining;
use super::replica::Replica;
use super::speed::Run;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    Completed,
    ClientGone,
    UpstreamError,
    Refused,
}

/// Tokens of one sequence in a run that speeds are learned from. Shorter runs measure the network's bunching.
const RUN_TOKENS: u64 = 16;
/// A run that ends with the answer is learned from if it has this many.
const RUN_TOKENS_MIN: u64 = 4;

/// Where a run of tokens started.
#[derive(Clone, Copy, Debug)]
struct Mark {
    at: Time,
    produced: u64,
    sequences: u64,
    context: u64,
    prompt_work: u64,
}

/// One request's booking on one replica. Dropping it releases exactly what is still booked.
///
/// It holds the replica itself, not its name: what is released leaves the books it was entered in, whatever was
/// reloaded in between.
#[derive(Debug)]
pub struct Reservation {
    replica: Arc<Replica>,
    ask: Arc<Ask>,
    slot: u32,
    /// Prompt tokens expected in the replica's prefix cache.
    cached: u64,
    /// Output tokens of all sequences so far.
    tokens: u64,
    sent_at: Option<Time>,
    /// Prompt work ahead of its own when it was sent.
    work_ahead: u64,
    /// Its own.
    work: u64,
    run: Option<Mark>,
    first_at: Option<Time>,
    /// Given up before it was used: its release makes no room that was not there before.
    given_up: bool,
}

impl Reservation {
    pub(super) fn new(booked: Booked, ask: Arc<Ask>) -> Reservation {
        let Booked { replica, slot, cached } = booked;
        Reservation {
            replica,
            ask,
            slot,
            cached,
            tokens: 0,
            sent_at: None,
            work_ahead: 0,
            work: 0,
            run: None,
            first_at: None,
            given_up: false,
        }
    }

    /// The replica it is booked on.
    pub fn replica(&self) -> &Arc<Replica> {
        &self.replica
    }

    /// What was asked.
    pub fn ask(&self) -> &Arc<Ask> {
        &self.ask
    }

    /// Prompt tokens expected in the replica's prefix cache.
    pub fn cached_tokens(&self) -> Tokens {
        Tokens(self.cached)
    }

    /// Releases a booking that was made a moment ago and is not wanted. Nobody is told of the room: whoever looks for
    /// room would make and give up the same booking again, for ever.
    pub(super) fn give_up(mut self) {
        self.given_up = true;
    }

    /// The request goes out to the replica now; learning measures from here.
    pub fn sent(&mut self) {
        self.sent_at = Some(self.replica.home.clock.now());
        self.work = self.replica.work_of(self.slot);
        self.work_ahead = self.replica.figures.prefill_work().saturating_sub(self.work);
    }

    /// Output tokens of all sequences so far. The first call marks the first token: the prefill is done.
    pub fn progress(&mut self, output_tokens: u64) {
        let now = self.replica.home.clock.now();
        if self.first_at.is_none() {
            self.first_token(output_tokens, now);
        }
        if output_tokens <= self.tokens {
            return;
        }
        self.tokens = output_tokens;
        let sequences = u64::from(self.ask.sequences.max(1));
        let produced = output_tokens / sequences;
        let window_left = self.replica.window_left(&self.ask);
        let expected = remaining::at(&self.ask.output, produced);
        let left = expected.min(window_left.saturating_sub(produced));
        let context = self.ask.prompt.0 + output_tokens;
        self.replica.change(self.slot, |entry| {
            entry.remaining = left;
            entry.context = context;
            entry.expect(context + left * sequences);
        });
        if let Some(run) = self.run
            && produced - run.produced >= RUN_TOKENS
        {
            self.end_run(run, produced, now);
            self.run = Some(self.mark(produced, now));
        }
    }

    fn first_token(&mut self, tokens: u64, now: Time) {
        self.first_at = Some(now);
        self.replica.prompt_done(self.slot);
        if let Some(sent) = self.sent_at {
            let seconds = now.since(sent).as_secs_f64();
            self.replica.learn_first_token(seconds, (self.work_ahead + self.work) as f64, now);
        }
        // The first call may carry several tokens; the run starts after them.
        let produced = tokens / u64::from(self.ask.sequences.max(1));
        self.run = Some(self.mark(produced, now));
        // Who waits so as not to stand behind this prompt need not any more.
        self.replica.made_room();
    }

    fn mark(&self, produced: u64, at: Time) -> Mark {
        let figures = &self.replica.figures;
        Mark {
            at,
            produced,
            sequences: figures.sequences(),
            context: figures.context(),
            prompt_work: self.replica.prompt_work_done(),
        }
    }

    fn end_run(&self, from: Mark, produced: u64, now: Time) {
        let to = self.mark(produced, now);
        let run = Run {
            seconds: to.at.since(from.at).as_secs_f64(),
            steps: (to.produced - from.produced) as f64,
            sequences: (from.sequences + to.sequences) as f64 / 2.0,
            context: (from.context + to.context) as f64 / 2.0,
            prompt_work: to.prompt_work.saturating_sub(from.prompt_work) as f64,
        };
        self.replica.learn_run(run, now);
    }

    /// Settles with what really happened: feeds the coefficients and the prefix index, releases the rest.
    pub fn settle(self, usage: Option<&Usage>, outcome: Outcome) {
        if outcome != Outcome::Completed {
            return;
        }
        let now = self.replica.home.clock.now();
        if let Some(usage) = usage {
            let slack = u64::from(self.ask.prefix_block_tokens.max(1)) * 4;
            if !self.ask.prefix.is_empty() {
                self.replica.cache.correct(self.cached, usage.cached_prompt, slack);
            }
            if !self.ask.stream {
                self.learn_whole(usage, now);
            }
        }
        if let Some(run) = self.run {
            let produced = self.tokens / u64::from(self.ask.sequences.max(1));
            if produced.saturating_sub(run.produced) >= RUN_TOKENS_MIN {
                self.end_run(run, produced, now);
            }
        }
    }

    /// An answer that came at once tells its whole time; what the prompt took of it is taken as expected.
    fn learn_whole(&self, usage: &Usage, now: Time) {
        let Some(sent) = self.sent_at else { return };
        let steps = usage.output as f64 / f64::from(self.ask.sequences.max(1));
        let c = self.replica.coefficients();
        let first = c.overhead + c.per_prompt * (self.work_ahead + self.work) as f64;
        let seconds = now.since(sent).as_secs_f64() - first;
        if steps < RUN_TOKENS as f64 || seconds <= 0.0 {
            return;
        }
        let figures = &self.replica.figures;
        let run = Run {
            seconds,
            steps,
            sequences: figures.sequences() as f64,
            context: figures.context() as f64,
            prompt_work: 0.0,
        };
        self.replica.learn_run(run, now);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.replica.release(self.slot);
        if !self.given_up {
            self.replica.made_room();
        }
    }
}
