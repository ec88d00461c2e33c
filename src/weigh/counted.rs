//! A prompt's count: how it came about, and what it may decide.

use crate::units::Tokens;

/// How a prompt was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CountSource {
    /// The model's own tokenizer and template.
    Tokenizer,
    /// Token ids given by the client.
    TokenIds,
    /// The engine's own `/tokenize`.
    Replica,
    /// The measured approximation: tokenizer not ready, not there, too slow, or media parts.
    Approximate,
}

impl CountSource {
    /// A label value for metrics.
    pub fn label(self) -> &'static str {
        match self {
            CountSource::Tokenizer => "tokenizer",
            CountSource::TokenIds => "token_ids",
            CountSource::Replica => "replica",
            CountSource::Approximate => "approximate",
        }
    }
}

/// A prompt's token count.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptCount {
    pub tokens: Tokens,
    /// Prompts in the request (a list of texts is several); each answers `n` times.
    pub prompts: u32,
    /// The longest single prompt, which must fit the window.
    pub longest: Tokens,
    pub source: CountSource,
}

/// How far an estimated count may be from the true one, as a share of it: more than all but one in a hundred windows of
/// text were off that `data/fit.py` looked at.
pub const ESTIMATE_MARGIN: f64 = 0.25;

impl PromptCount {
    /// Whether the engine will report the very same number.
    pub fn exact(&self) -> bool {
        self.source != CountSource::Approximate
    }

    /// The fewest tokens that the longest prompt may have.
    pub fn longest_least(&self) -> Tokens {
        if self.exact() { self.longest } else { Tokens((self.longest.0 as f64 * (1.0 - ESTIMATE_MARGIN)) as u64) }
    }

    /// The most tokens that the longest prompt may have.
    pub fn longest_most(&self) -> Tokens {
        if self.exact() {
            self.longest
        } else {
            Tokens((self.longest.0 as f64 * (1.0 + ESTIMATE_MARGIN)).ceil() as u64)
        }
    }

    /// What a replica's window must exceed, `largest` being the largest there is. An exact count is what it is. An
    /// estimate goes where it fits even if it is too low by its margin; where that is nowhere, to the largest window,
    /// whose engine decides; and is refused only where it would be too long even if it were too high by its margin.
    pub fn must_hold(&self, largest: Option<Tokens>) -> Tokens {
        match largest {
            Some(largest) if self.longest_most() >= largest && self.longest_least() < largest && !self.exact() => {
                Tokens(largest.0.saturating_sub(1))
            }
            _ => self.longest_most(),
        }
    }

    /// Whether it takes an exact count to say if the prompt fits a window.
    pub(super) fn leaves_open(&self, window: Option<Tokens>) -> bool {
        window.is_some_and(|window| self.longest_least() < window && window <= self.longest_most())
    }
}
