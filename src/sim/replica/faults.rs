//! What goes wrong on purpose: one grammar for the command line, the `x-sim-fault` header and `POST /sim/fault`.

use std::str::FromStr;
use std::time::Duration;

/// Faults of one replica, or of one request. Written as a list such as `status=503,retry-after=2,times=5`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Faults {
    /// `hang`: the engine stands still; requests are accepted and get no token.
    pub hang: bool,
    /// `slow=F`: every step takes F times as long.
    pub slow: Option<f64>,
    /// `status=CODE`: generation requests are answered with this status.
    pub status: Option<u16>,
    /// `retry-after=SECONDS` on such answers.
    pub retry_after: Option<u64>,
    /// `times=N`: only the next N requests get `status`.
    pub times: Option<u32>,
    /// `die-after=N`: the connection is cut once an answer has N tokens.
    pub die_after: Option<u32>,
    /// `stall-after=N`: nothing more is sent after N tokens, and the connection stays open.
    pub stall_after: Option<u32>,
    /// `error-after=N`: an error object and `[DONE]` in the stream after N tokens.
    pub error_after: Option<u32>,
    /// `delay=TIME`: before the response header.
    pub delay: Option<Duration>,
    /// `health=CODE`: `/health` answers this.
    pub health: Option<u16>,
    /// `health-hang`: `/health` never answers.
    pub health_hang: bool,
    /// `metrics=CODE`: `/metrics` answers this.
    pub metrics: Option<u16>,
    /// `no-usage`: usage is never sent, asked for or not.
    pub no_usage: bool,
    /// `no-done`: streams end without `[DONE]`.
    pub no_done: bool,
}

impl FromStr for Faults {
    type Err = String;

    fn from_str(text: &str) -> Result<Faults, String> {
        let mut faults = Faults::default();
        for part in text.split(',').map(str::trim).filter(|p| !p.is_empty() && *p != "none") {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            match name {
                "hang" => faults.hang = true,
                "slow" => faults.slow = Some(read(name, value)?),
                "status" => faults.status = Some(status(name, value)?),
                "retry-after" => faults.retry_after = Some(read(name, value)?),
                "times" => faults.times = Some(read(name, value)?),
                "die-after" => faults.die_after = Some(read(name, value)?),
                "stall-after" => faults.stall_after = Some(read(name, value)?),
                "error-after" => faults.error_after = Some(read(name, value)?),
                "delay" => {
                    let delay = humantime::parse_duration(value).map_err(|e| format!("`delay={value}`: {e}"))?;
                    faults.delay = Some(delay);
                }
                "health" => faults.health = Some(status(name, value)?),
                "health-hang" => faults.health_hang = true,
                "metrics" => faults.metrics = Some(status(name, value)?),
                "no-usage" => faults.no_usage = true,
                "no-done" => faults.no_done = true,
                _ => {
                    return Err(format!(
                        "unknown fault `{part}`: expected a list of hang, slow=F, status=CODE, retry-after=SECONDS, \
                         times=N, die-after=N, stall-after=N, error-after=N, delay=TIME, health=CODE, health-hang, \
                         metrics=CODE, no-usage, no-done, or none"
                    ));
                }
            }
        }
        Ok(faults)
    }
}

fn read<T: FromStr>(name: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("`{name}={value}`: expected a number"))
}

fn status(name: &str, value: &str) -> Result<u16, String> {
    let code = read(name, value)?;
    if (200..600).contains(&code) { Ok(code) } else { Err(format!("`{name}={value}`: expected 200 to 599")) }
}

impl Faults {
    /// These faults with those of one request laid over them.
    pub fn with(&self, request: Faults) -> Faults {
        Faults {
            hang: self.hang || request.hang,
            slow: request.slow.or(self.slow),
            status: request.status.or(self.status),
            retry_after: request.retry_after.or(self.retry_after),
            times: request.times.or(self.times),
            die_after: request.die_after.or(self.die_after),
            stall_after: request.stall_after.or(self.stall_after),
            error_after: request.error_after.or(self.error_after),
            delay: request.delay.or(self.delay),
            health: request.health.or(self.health),
            health_hang: self.health_hang || request.health_hang,
            metrics: request.metrics.or(self.metrics),
            no_usage: self.no_usage || request.no_usage,
            no_done: self.no_done || request.no_done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_faults_is_read_and_a_wrong_one_is_named() {
        let faults: Faults = "status=503, retry-after=2,times=5".parse().unwrap();
        assert_eq!((faults.status, faults.retry_after, faults.times), (Some(503), Some(2), Some(5)));
        assert_eq!("none".parse::<Faults>().unwrap(), Faults::default());
        assert!("explode".parse::<Faults>().unwrap_err().contains("explode"));
        assert!("status=99".parse::<Faults>().unwrap_err().contains("200 to 599"));
    }
}
