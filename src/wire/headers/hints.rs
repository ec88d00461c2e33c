//! What clients hint about a request: its priority, task, session and objective.
//!
//! A hint is only a wish. Whether its tenant may have it is decided by who knows the tenants; hints never reach a
//! replica, since engines trust some of them.

use std::time::Duration;

use http::HeaderMap;

use crate::wire::request::Request;

/// A wish for a band.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PriorityHint {
    /// A band's name, or its number as text.
    Band(String),
    /// A body's `priority`: at or below 0 the tenant's highest band, above it the tenant's lowest.
    Level(i64),
}

/// A request's hints.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hints {
    pub priority: Option<PriorityHint>,
    pub task: Option<String>,
    /// What keeps the turns of one conversation together.
    pub session: Option<String>,
    /// When the client wants its first token.
    pub ttft_objective: Option<Duration>,
    /// Whom to share fairly with, below the tenant.
    pub fairness: Option<String>,
}

/// Longest hint that is read.
const HINT_BYTES_MAX: usize = 256;
/// Longest objective that means anything.
const OBJECTIVE_MAX: Duration = Duration::from_secs(3600);

// In order of precedence: ours, then the names that clients of other balancers send.
const PRIORITY: [&str; 3] = ["x-weighbridge-priority", "x-llm-d-inference-objective", "x-gateway-inference-objective"];
const TASK: [&str; 1] = ["x-weighbridge-task"];
const SESSION: [&str; 5] =
    ["x-session-id", "x-smg-routing-key", "x-dynamo-session-id", "x-olla-session-id", "x-claude-code-session-id"];
const TTFT_MS: [&str; 4] = ["x-weighbridge-ttft-slo-ms", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms", "x-sgl-ttft-slo-ms"];
const FAIRNESS: [&str; 3] = ["x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id", "x-smg-tenant-id"];
/// Not read, but not passed on either: an engine or a balancer behind this one would obey them.
const UNREAD: [&str; 7] = [
    "x-priority",
    "x-request-priority",
    "x-smg-priority",
    "x-dynamo-request-priority",
    "x-llm-d-slo-tpot-ms",
    "x-slo-tpot-ms",
    "x-sgl-tps-slo",
];

/// Whether a client's field of this name is a hint, and stays here.
pub(super) fn stripped(name: &str) -> bool {
    let known: [&[&str]; 6] = [&PRIORITY, &TASK, &SESSION, &TTFT_MS, &FAIRNESS, &UNREAD];
    name.starts_with("x-weighbridge-") || known.iter().any(|names| names.contains(&name))
}

impl Hints {
    /// Reads the hints in a request's header and body. A hint that is empty, too long or not text is not there.
    pub fn read(headers: &HeaderMap, request: &Request) -> Hints {
        // Most requests have none: one walk over their fields costs less than looking for each name.
        let hinted = headers.keys().any(|name| stripped(name.as_str()));
        let first = |names: &[&str]| if hinted { first(headers, names) } else { None };
        let band = first(&PRIORITY).map(PriorityHint::Band);
        let body_task = request.task_type.as_deref().and_then(bounded);
        Hints {
            priority: band.or(request.priority.map(PriorityHint::Level)),
            task: body_task.or_else(|| first(&TASK)),
            session: first(&SESSION),
            ttft_objective: first(&TTFT_MS).and_then(|text| milliseconds(&text)),
            fairness: first(&FAIRNESS),
        }
    }
}

fn first(headers: &HeaderMap, names: &[&str]) -> Option<String> {
    names.iter().find_map(|name| bounded(headers.get(*name)?.to_str().ok()?))
}

fn bounded(text: &str) -> Option<String> {
    let text = text.trim();
    (1..=HINT_BYTES_MAX).contains(&text.len()).then(|| text.to_owned())
}

fn milliseconds(text: &str) -> Option<Duration> {
    let ms: f64 = text.parse().ok()?;
    let objective = Duration::try_from_secs_f64(ms / 1000.0).ok()?;
    (objective > Duration::ZERO && objective <= OBJECTIVE_MAX).then_some(objective)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::HeaderValue;

    use super::*;
    use crate::wire::{Endpoint, ParseLimits};

    fn read(pairs: &[(&'static str, &'static str)], extra: &str) -> Hints {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        let body = format!("{{\"prompt\":\"a\"{extra}}}");
        let limits = ParseLimits { json_depth: 16 };
        Hints::read(&headers, &Request::parse(Endpoint::Completions, Bytes::from(body), &limits).unwrap())
    }

    #[test]
    fn our_own_field_comes_before_others_and_before_the_body() {
        let body = ",\"priority\":-1000";
        let band = |name: &str| Some(PriorityHint::Band(name.to_owned()));
        let all = [("x-llm-d-inference-objective", "batch"), ("x-weighbridge-priority", "1")];
        assert_eq!(read(&all, body).priority, band("1"));
        assert_eq!(read(&all[..1], body).priority, band("batch"));
        assert_eq!(read(&[], body).priority, Some(PriorityHint::Level(-1000)));
        assert_eq!(read(&[], "").priority, None);
        assert_eq!(read(&[("x-request-priority", "high")], "").priority, None);
    }

    #[test]
    fn task_session_objective_and_fairness_are_read() {
        let hints = read(
            &[
                ("x-weighbridge-task", "chat"),
                ("x-session-id", " s1 "),
                ("x-llm-d-slo-ttft-ms", "1500"),
                ("x-llm-d-inference-fairness-id", "f"),
            ],
            ",\"task_type\":\"code\"",
        );
        assert_eq!(hints.task.as_deref(), Some("code"));
        assert_eq!(hints.session.as_deref(), Some("s1"));
        assert_eq!(hints.ttft_objective, Some(Duration::from_millis(1500)));
        assert_eq!(hints.fairness.as_deref(), Some("f"));
        assert_eq!(read(&[("x-weighbridge-task", "chat")], ",\"task_type\":null").task.as_deref(), Some("chat"));
    }

    #[test]
    fn hints_that_make_no_sense_are_not_there() {
        for bad in ["", " ", "-5", "0", "inf", "NaN", "1e300", "3600001", "soon"] {
            let value: &'static str = Box::leak(bad.to_owned().into_boxed_str());
            assert_eq!(read(&[("x-weighbridge-ttft-slo-ms", value)], "").ttft_objective, None, "{bad}");
        }
        assert_eq!(read(&[("x-session-id", "é")], "").session, None);
        let long: &'static str = Box::leak("s".repeat(HINT_BYTES_MAX + 1).into_boxed_str());
        assert_eq!(read(&[("x-session-id", long)], "").session, None);
    }
}
