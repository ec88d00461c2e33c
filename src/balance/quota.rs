//! What a tenant may use: requests and tokens a minute, and requests at a time.
//!
//! Each rate is a bucket that holds a minute's worth and refills evenly. Taking is one step under the tenant's lock,
//! so a burst never gets more than the bucket holds. A request takes its estimate; the [`Hold`] is settled with the
//! tokens that were really used, which may leave the bucket in debt, and dropped unsettled (refused, failed) it gives
//! everything back. Pure: the time is passed in.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};

use crate::config::Tenant;
use crate::units::{NameMap, TenantName, Time};

const MINUTE: f64 = 60.0;
/// When a request over the number at a time may come again: nobody knows when an answer ends.
const CONCURRENT_RETRY: Duration = Duration::from_secs(1);

/// A minute's worth of something.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    limit: f64,
    level: f64,
    at: Time,
}

impl Bucket {
    fn new(limit: u64, now: Time) -> Bucket {
        Bucket { limit: limit as f64, level: limit as f64, at: now }
    }

    fn refill(&mut self, now: Time) {
        let gained = now.since(self.at).as_secs_f64() * self.limit / MINUTE;
        self.level = (self.level + gained).min(self.limit);
        self.at = self.at.max(now);
    }

    /// How long until `amount` may be taken. What is larger than the whole bucket may be taken from a full one, which
    /// then is in debt: it could never be served otherwise.
    fn wait_for(&self, amount: f64) -> Duration {
        let missing = amount.min(self.limit) - self.level;
        // A hair's breadth of rounding must not refuse the last whole unit.
        if missing <= 1e-6 { Duration::ZERO } else { self.after(missing) }
    }

    fn after(&self, amount: f64) -> Duration {
        Duration::from_secs_f64((amount * MINUTE / self.limit.max(1e-9)).min(MINUTE * 60.0))
    }

    fn give_back(&mut self, amount: f64) {
        self.level = (self.level + amount).min(self.limit);
    }

    fn rate(&self) -> Rate {
        Rate {
            limit: self.limit as u64,
            remaining: (self.level + 1e-6).max(0.0) as u64,
            reset: self.after((self.limit - self.level).max(0.0)),
        }
    }
}

/// One limit as told to a client.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    pub limit: u64,
    pub remaining: u64,
    /// Until the whole of it is there again.
    pub reset: Duration,
}

/// A tenant's limits as told to a client.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    pub requests: Option<Rate>,
    pub tokens: Option<Rate>,
}

impl Rates {
    /// The header fields that OpenAI sends, for the limits that there are.
    pub fn headers(&self) -> Vec<(&'static str, String)> {
        let mut fields = Vec::new();
        let mut rate = |names: [&'static str; 3], rate: Option<Rate>| {
            if let Some(Rate { limit, remaining, reset }) = rate {
                fields.push((names[0], limit.to_string()));
                fields.push((names[1], remaining.to_string()));
                fields.push((names[2], reset_text(reset)));
            }
        };
        rate(
            ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"],
            self.requests,
        );
        rate(["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"], self.tokens);
        fields
    }
}

/// A span as OpenAI's reset fields write it: `17ms`, `8.64s`, `6m0s`.
fn reset_text(span: Duration) -> String {
    let millis = span.as_micros().div_ceil(1000);
    let (minutes, rest) = (millis / 60_000, millis % 60_000);
    match (minutes, rest) {
        (0, ms) if ms < 1000 => format!("{ms}ms"),
        (0, ms) => format!("{}s", seconds(ms)),
        (minutes, ms) => format!("{minutes}m{}s", seconds(ms)),
    }
}

fn seconds(millis: u128) -> String {
    let text = format!("{}.{:03}", millis / 1000, millis % 1000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Which limit a request would pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    Requests,
    Tokens,
    Concurrent,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Limit::Requests => "requests per minute",
            Limit::Tokens => "tokens per minute",
            Limit::Concurrent => "requests at a time",
        })
    }
}

/// A request over its tenant's limit: 429.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("the limit of {allowed} {limit} is reached: {wanted} asked for; try again in {retry_after:?}")]
pub struct Exceeded {
    pub limit: Limit,
    pub allowed: u64,
    pub wanted: u64,
    pub retry_after: Duration,
    pub rates: Rates,
}

#[derive(Debug, Default)]
struct Account {
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    concurrent_most: Option<u32>,
    concurrent: u32,
}

impl Account {
    fn configure(&mut self, tenant: &Tenant, now: Time) {
        let bucket = |before: Option<Bucket>, limit: Option<u64>| {
            let limit = limit?;
            let mut bucket = before.unwrap_or(Bucket::new(limit, now));
            bucket.refill(now);
            // What was used stays used under a changed limit.
            let used = bucket.limit - bucket.level;
            Some(Bucket { limit: limit as f64, level: limit as f64 - used, at: now })
        };
        self.requests = bucket(self.requests, tenant.requests_per_minute);
        self.tokens = bucket(self.tokens, tenant.tokens_per_minute);
        self.concurrent_most = tenant.concurrent;
    }

    fn take(&mut self, tokens: u64, now: Time) -> Result<Rates, Exceeded> {
        for bucket in [&mut self.requests, &mut self.tokens].into_iter().flatten() {
            bucket.refill(now);
        }
        let exceeded = |account: &Account, limit, allowed, wanted, retry_after| {
            Err(Exceeded { limit, allowed, wanted, retry_after, rates: account.rates() })
        };
        if let Some(most) = self.concurrent_most
            && self.concurrent >= most
        {
            return exceeded(
                self,
                Limit::Concurrent,
                u64::from(most),
                u64::from(self.concurrent) + 1,
                CONCURRENT_RETRY,
            );
        }
        for (limit, bucket, wanted) in [(Limit::Requests, &self.requests, 1), (Limit::Tokens, &self.tokens, tokens)] {
            let Some(bucket) = bucket else { continue };
            let wait = bucket.wait_for(wanted as f64);
            if wait > Duration::ZERO {
                return exceeded(self, limit, bucket.limit as u64, wanted, wait);
            }
        }
        if let Some(requests) = &mut self.requests {
            requests.level -= 1.0;
        }
        if let Some(bucket) = &mut self.tokens {
            bucket.level -= tokens as f64;
        }
        self.concurrent += 1;
        Ok(self.rates())
    }

    fn rates(&self) -> Rates {
        Rates { requests: self.requests.as_ref().map(Bucket::rate), tokens: self.tokens.as_ref().map(Bucket::rate) }
    }
}

/// All tenants' accounts.
#[derive(Debug, Default)]
pub struct Quotas {
    accounts: RwLock<NameMap<TenantName, Arc<Mutex<Account>>>>,
}

impl Quotas {
    /// Accounts for these tenants, all buckets full.
    pub fn new(tenants: &[Tenant], now: Time) -> Quotas {
        let quotas = Quotas::default();
        quotas.apply(tenants, now);
        quotas
    }

    /// Takes changed limits. What a tenant used stays used; what runs is settled as it would have been.
    pub fn apply(&self, tenants: &[Tenant], now: Time) {
        let mut accounts = self.accounts.write();
        accounts.retain(|name, _| tenants.iter().any(|tenant| tenant.name == *name));
        for tenant in tenants {
            accounts.entry(tenant.name.clone()).or_default().lock().configure(tenant, now);
        }
    }

    /// Takes one request of `tokens` (prompt and expected answer) from a tenant's limits: all of it or nothing. A
    /// tenant without an account has no limits.
    ///
    /// # Errors
    /// The limit that it would pass, and when to ask again.
    pub fn take(&self, tenant: &TenantName, tokens: u64, now: Time) -> Result<Hold, Exceeded> {
        let account = self.accounts.read().get(tenant).cloned().unwrap_or_default();
        let rates = account.lock().take(tokens, now)?;
        Ok(Hold { account, tokens, rates, settled: false })
    }
}

/// What one request took. Dropped unsettled, it gives all of it back: the request was refused, or failed.
#[derive(Debug)]
pub struct Hold {
    account: Arc<Mutex<Account>>,
    tokens: u64,
    rates: Rates,
    settled: bool,
}

impl Hold {
    /// The tenant's limits just after this request was taken, for the answer's header.
    pub fn rates(&self) -> Rates {
        self.rates
    }

    /// The request used `tokens` (prompt and answer), reported or else counted.
    pub fn settle(mut self, tokens: u64) {
        self.settled = true;
        if let Some(bucket) = &mut self.account.lock().tokens {
            bucket.give_back(self.tokens as f64 - tokens as f64);
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut account = self.account.lock();
        account.concurrent = account.concurrent.saturating_sub(1);
        if self.settled {
            return;
        }
        if let Some(requests) = &mut account.requests {
            requests.give_back(1.0);
        }
        if let Some(tokens) = &mut account.tokens {
            tokens.give_back(self.tokens as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(requests: Option<u64>, tokens: Option<u64>, concurrent: Option<u32>) -> Tenant {
        Tenant {
            name: "t".into(),
            key_file: "keys".into(),
            models: Vec::new(),
            bands: Vec::new(),
            tokens_per_minute: tokens,
            requests_per_minute: requests,
            concurrent,
            max_tokens: None,
        }
    }

    fn at(seconds: f64) -> Time {
        Time::from_secs_f64(seconds)
    }

    #[test]
    fn a_burst_gets_exactly_the_limit() {
        let quotas = Quotas::new(&[tenant(Some(10), None, None)], at(0.0));
        let name = "t".into();
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..50).map(|_| scope.spawn(|| quotas.take(&name, 1, at(0.0)))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 10);
        let refused = results.iter().find_map(|result| result.as_ref().err()).unwrap();
        assert_eq!((refused.limit, refused.retry_after), (Limit::Requests, Duration::from_secs(6)));
        results.into_iter().flatten().for_each(|hold| hold.settle(1));
        assert!(quotas.take(&name, 1, at(5.9)).is_err());
        assert!(quotas.take(&name, 1, at(6.0)).is_ok());
    }

    #[test]
    fn an_estimate_is_corrected_to_what_was_used() {
        let quotas = Quotas::new(&[tenant(None, Some(1000), None)], at(0.0));
        let name = "t".into();
        quotas.take(&name, 600, at(0.0)).unwrap().settle(300);
        let hold = quotas.take(&name, 700, at(0.0)).unwrap();
        assert_eq!(hold.rates().tokens.unwrap().remaining, 0);
        hold.settle(900);
        let refused = quotas.take(&name, 100, at(0.0)).unwrap_err();
        assert_eq!(refused.retry_after, Duration::from_secs(18), "200 in debt and 100 wanted, at 1,000 a minute");
        assert!(quotas.take(&name, 100, at(18.0)).is_ok());
    }

    #[test]
    fn what_was_refused_or_failed_is_given_back() {
        let quotas = Quotas::new(&[tenant(Some(1), Some(1000), Some(1))], at(0.0));
        let name = "t".into();
        let hold = quotas.take(&name, 1000, at(0.0)).unwrap();
        let second = quotas.take(&name, 1, at(0.0)).unwrap_err();
        assert_eq!(second.limit, Limit::Concurrent);
        drop(hold);
        assert!(quotas.take(&name, 1000, at(0.0)).is_ok());
    }

    #[test]
    fn a_request_larger_than_the_limit_is_taken_from_a_full_bucket() {
        let quotas = Quotas::new(&[tenant(None, Some(1000), None)], at(0.0));
        let name = "t".into();
        quotas.take(&name, 1500, at(0.0)).unwrap().settle(1500);
        assert_eq!(quotas.take(&name, 1500, at(0.0)).unwrap_err().retry_after, Duration::from_secs(90));
    }

    #[test]
    fn what_was_used_stays_used_over_a_changed_limit() {
        let quotas = Quotas::new(&[tenant(Some(10), None, None)], at(0.0));
        let name = "t".into();
        for _ in 0..8 {
            quotas.take(&name, 1, at(0.0)).unwrap().settle(1);
        }
        quotas.apply(&[tenant(Some(20), None, None)], at(0.0));
        assert_eq!(quotas.take(&name, 1, at(0.0)).unwrap().rates().requests.unwrap().remaining, 11);
        quotas.apply(&[], at(0.0));
        assert_eq!(quotas.take(&name, 1, at(0.0)).unwrap().rates(), Rates::default());
    }

    #[test]
    fn limits_are_told_in_the_words_openai_uses() {
        let quotas = Quotas::new(&[tenant(Some(10), Some(200_000), None)], at(0.0));
        let hold = quotas.take(&"t".into(), 50, at(0.0)).unwrap();
        let fields = hold.rates().headers();
        let text: Vec<String> = fields.iter().map(|(name, value)| format!("{name}: {value}")).collect();
        assert_eq!(
            text,
            [
                "x-ratelimit-limit-requests: 10",
                "x-ratelimit-remaining-requests: 9",
                "x-ratelimit-reset-requests: 6s",
                "x-ratelimit-limit-tokens: 200000",
                "x-ratelimit-remaining-tokens: 199950",
                "x-ratelimit-reset-tokens: 15ms",
            ]
        );
        assert_eq!(reset_text(Duration::from_secs(360)), "6m0s");
        assert_eq!(reset_text(Duration::from_millis(8640)), "8.64s");
    }
}
