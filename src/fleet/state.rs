//! A replica's state in the fleet's own words, finer than the balancer's gate.

/// Where a replica stands, as people see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    Unknown,
    /// Loading its model.
    Loading,
    /// Taking our own warm-up requests.
    Warming,
    Open,
    HalfOpen,
    /// Failed its probes.
    Ill,
    /// Put out by traffic.
    Ejected,
    Draining,
}

impl State {
    /// Every state, for metrics.
    pub const ALL: [State; 8] = [
        State::Unknown,
        State::Loading,
        State::Warming,
        State::Open,
        State::HalfOpen,
        State::Ill,
        State::Ejected,
        State::Draining,
    ];

    /// The state's name in metrics, logs and the admin API.
    pub fn label(self) -> &'static str {
        match self {
            State::Unknown => "unknown",
            State::Loading => "loading",
            State::Warming => "warming",
            State::Open => "open",
            State::HalfOpen => "half_open",
            State::Ill => "ill",
            State::Ejected => "ejected",
            State::Draining => "draining",
        }
    }
}
