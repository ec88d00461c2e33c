//! One request being answered, token by token.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use parking_lot::Mutex;

use super::answer::{Counts, Finish, Flavour, Writer};
use super::ask::SimError;
use super::faults::Faults;
use super::runner::Running;
use super::server::json_response;
use super::{metrics, text};

/// How long written bytes get before a connection is cut on purpose.
const FLUSH: Duration = Duration::from_millis(20);

/// What one sequence will say.
#[derive(Debug)]
pub struct Plan {
    pub seed: u64,
    pub finish: Finish,
}

/// One request being answered. Dropping it (the client went away) takes its sequences out of the engine.
#[derive(Debug)]
pub struct Generation {
    pub running: Running,
    pub writer: Writer,
    pub plans: Vec<Plan>,
    pub counts: Counts,
    pub faults: Faults,
    pub usage: bool,
    pub served: Arc<Mutex<metrics::Served>>,
    pub started: Instant,
    /// Sequences whose cached tokens are counted.
    pub cached_seen: Vec<u64>,
    /// Events not yet sent.
    pub pending: VecDeque<String>,
    pub ended: bool,
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.ended {
            self.served.lock().aborted += 1;
        }
    }
}

/// One token of one sequence, as the answer sees it.
struct Token {
    index: u32,
    produced: u32,
    word: &'static str,
    finish: Option<Finish>,
}

impl Generation {
    async fn next(&mut self) -> Option<Token> {
        let emitted = self.running.tokens.recv().await?;
        let index = (emitted.id - self.running.first_id) as u32;
        let plan = &self.plans[index as usize];
        if self.counts.completion == 0 {
            self.served.lock().first_token(self.started.elapsed().as_secs_f64());
        }
        if !self.cached_seen.contains(&emitted.id) {
            self.cached_seen.push(emitted.id);
            self.counts.cached += u64::from(emitted.cached);
        }
        self.counts.completion += 1;
        let finish = emitted.finished.then_some(plan.finish);
        if let Some(finish) = finish {
            let mut served = self.served.lock();
            match finish {
                Finish::Stop => served.stopped += 1,
                Finish::Length => served.length += 1,
            }
        }
        Some(Token { index, produced: emitted.produced, word: text::word(plan.seed, emitted.produced - 1), finish })
    }

    /// What an answer's fault does now that it has this many tokens.
    fn struck(&self) -> Option<Strike> {
        let past = |limit: Option<u32>| limit.is_some_and(|n| self.counts.completion >= u64::from(n));
        if past(self.faults.die_after) {
            Some(Strike::Die)
        } else if past(self.faults.stall_after) {
            Some(Strike::Stall)
        } else if past(self.faults.error_after) {
            Some(Strike::Error)
        } else {
            None
        }
    }

    /// Answers as a stream of events, each a chunk of its own.
    pub fn stream(self) -> Response {
        let content_type = match self.writer.flavour {
            Flavour::Vllm => "text/event-stream; charset=utf-8",
            Flavour::Llamacpp => "text/event-stream",
        };
        let events = futures::stream::unfold(Box::new(self), |mut generation| async move {
            let event = generation.next_event().await?;
            Some((event.map(Bytes::from), generation))
        });
        let mut response = Response::new(Body::from_stream(events));
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        response
    }

    async fn next_event(&mut self) -> Option<io::Result<String>> {
        if let Some(event) = self.pending.pop_front() {
            return Some(Ok(event));
        }
        if self.ended {
            return None;
        }
        match self.struck() {
            Some(Strike::Die) => {
                self.ended = true;
                // What was written before reaches the client first.
                tokio::time::sleep(FLUSH).await;
                return Some(Err(io::Error::other("cut on purpose")));
            }
            // Until the client goes away.
            Some(Strike::Stall) => futures::future::pending::<()>().await,
            Some(Strike::Error) => {
                self.ended = true;
                self.pending.extend([self.writer.stream_error(), "data: [DONE]\n\n".to_owned()]);
                return self.pending.pop_front().map(Ok);
            }
            None => {}
        }
        let before = self.counts;
        match self.next().await {
            Some(token) => {
                if token.produced == 1 {
                    self.pending.extend(self.writer.role(token.index, before));
                }
                let event = self.writer.token(token.index, token.word, token.finish, self.counts);
                self.pending.push_back(event);
            }
            None => {
                self.ended = true;
                if self.usage && !self.faults.no_usage {
                    self.pending.push_back(self.writer.usage_event(self.counts));
                }
                if !self.faults.no_done {
                    self.pending.push_back("data: [DONE]\n\n".to_owned());
                }
            }
        }
        self.pending.pop_front().map(Ok)
    }

    /// Answers as one document.
    pub async fn whole(mut self) -> Response {
        let mut texts: Vec<(String, Finish)> = self.plans.iter().map(|p| (String::new(), p.finish)).collect();
        loop {
            match self.struck() {
                Some(Strike::Die) => {
                    let cut = futures::stream::iter([Ok(Bytes::from("{")), Err(io::Error::other("cut on purpose"))]);
                    return Response::new(Body::from_stream(cut));
                }
                Some(Strike::Stall) => futures::future::pending::<()>().await,
                Some(Strike::Error) => {
                    self.ended = true;
                    let error = SimError::new(500, "InternalServerError", None, "EngineCore encountered an issue.");
                    return json_response(500, &error.body);
                }
                None => {}
            }
            let Some(token) = self.next().await else { break };
            if token.finish != Some(Finish::Stop) {
                texts[token.index as usize].0.push_str(token.word);
            }
        }
        self.ended = true;
        json_response(200, &self.writer.document(&texts, self.counts, !self.faults.no_usage))
    }
}

enum Strike {
    Die,
    Stall,
    Error,
}
