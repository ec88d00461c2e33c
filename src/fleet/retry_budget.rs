//! How many retries the fleet can bear: a share of recent traffic, so that retries cannot multiply an overload.
//!
//! A count per request alone is no bound: when every replica refuses, `n` attempts a request are `n` times the load.
//! A share alone is none either for a balancer of little traffic: a tenth of five requests is no retry at all, and a
//! replica that dies takes more than a tenth of a small fleet's requests with it. So there is a floor beside the share,
//! retries a second that need no traffic to stand for them, as in Finagle's `RetryBudget` (`minRetriesPerSec`, 10) and
//! linkerd's (`minRetriesPerSecond`, 10).

use std::time::Duration;

use parking_lot::Mutex;

use crate::units::Time;

/// How far back traffic counts.
const WINDOW: Duration = Duration::from_secs(10);
const SLOTS: usize = 10;

/// A budget of retries.
#[derive(Debug)]
pub struct RetryBudget {
    share: f64,
    /// Retries within the window that need no traffic to stand for them.
    reserve: f64,
    slots: Mutex<Slots>,
}

#[derive(Clone, Debug, Default)]
struct Slots {
    /// Requests and retries by the slot of time they came in.
    counts: [(u64, u64); SLOTS],
    /// The newest slot, counted from the clock's start.
    newest: u64,
}

impl RetryBudget {
    /// A budget of `share` retries a request and `min_per_second` retries a second beside them, whose unused ones of
    /// the last ten seconds can be taken at once. A share of 0 allows none at all.
    pub fn new(share: f64, min_per_second: f64) -> RetryBudget {
        RetryBudget { share, reserve: min_per_second * WINDOW.as_secs_f64(), slots: Mutex::default() }
    }

    /// The same past under other numbers: a reload must not be a fresh budget in the middle of a storm.
    pub fn renewed(&self, share: f64, min_per_second: f64) -> RetryBudget {
        RetryBudget { slots: Mutex::new(self.slots.lock().clone()), ..RetryBudget::new(share, min_per_second) }
    }

    /// A request came in (first attempts only).
    pub fn request(&self, now: Time) {
        let mut slots = self.slots.lock();
        slots.turn(now).0 += 1;
    }

    /// Asks for one retry and takes it where the budget has one.
    pub fn retry(&self, now: Time) -> bool {
        if self.share <= 0.0 {
            return false;
        }
        let mut slots = self.slots.lock();
        slots.turn(now);
        let (requests, retries) = slots.counts.iter().fold((0, 0), |sum, c| (sum.0 + c.0, sum.1 + c.1));
        let allowed = requests as f64 * self.share + self.reserve;
        if (retries + 1) as f64 > allowed {
            return false;
        }
        slots.turn(now).1 += 1;
        true
    }
}

impl Slots {
    /// The slot of `now`, older ones cleared.
    fn turn(&mut self, now: Time) -> &mut (u64, u64) {
        let width = (WINDOW / SLOTS as u32).as_micros() as u64;
        let slot = (now.0 / width).max(self.newest);
        let passed = (slot - self.newest).min(SLOTS as u64);
        for i in 0..passed {
            self.counts[((slot - i) % SLOTS as u64) as usize] = (0, 0);
        }
        self.newest = slot;
        &mut self.counts[(slot % SLOTS as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: f64) -> Time {
        Time::from_secs_f64(seconds)
    }

    /// c102
    #[test]
    fn a_storm_of_failures_gets_its_share_of_retries_and_no_more() {
        let budget = RetryBudget::new(0.1, 1.0);
        let mut granted = 0;
        for i in 0..1000 {
            let now = at(f64::from(i) * 0.01);
            budget.request(now);
            granted += (0..3).filter(|_| budget.retry(now)).count();
        }
        assert!((100..=110).contains(&granted), "{granted} retries of 1,000 requests in one window");
    }

    #[test]
    fn a_quiet_balancer_may_retry_its_one_request() {
        let budget = RetryBudget::new(0.1, 10.0);
        budget.request(at(0.0));
        assert!(budget.retry(at(0.1)) && budget.retry(at(0.2)));
    }

    #[test]
    fn the_floor_is_ten_a_second_over_the_window_and_comes_back_with_it() {
        let budget = RetryBudget::new(0.1, 10.0);
        let take = |now: f64| std::iter::repeat_with(|| budget.retry(at(now))).take(1000).filter(|got| *got).count();
        assert_eq!(take(1.0), 100, "a window's worth, where none was used");
        assert_eq!(take(5.0), 0);
        assert_eq!(take(12.0), 100);
    }

    #[test]
    fn without_a_floor_the_share_alone_counts() {
        let budget = RetryBudget::new(0.1, 0.0);
        (0..9).for_each(|_| budget.request(at(1.0)));
        assert!(!budget.retry(at(1.0)));
        budget.request(at(1.0));
        assert!(budget.retry(at(1.0)) && !budget.retry(at(1.0)));
    }

    #[test]
    fn a_reload_spends_from_the_same_past() {
        let budget = RetryBudget::new(0.1, 1.0);
        while budget.retry(at(1.0)) {}
        assert!(!budget.renewed(0.1, 1.0).retry(at(1.0)));
        assert!(budget.renewed(0.1, 2.0).retry(at(1.0)), "with more to spend there is more");
    }

    #[test]
    fn a_share_of_zero_allows_none() {
        let budget = RetryBudget::new(0.0, 10.0);
        (0..100).for_each(|_| budget.request(at(1.0)));
        assert!(!budget.retry(at(1.0)));
    }

    #[test]
    fn what_was_spent_comes_back_when_the_window_has_passed() {
        let budget = RetryBudget::new(0.5, 10.0);
        while budget.retry(at(1.0)) {}
        assert!(!budget.retry(at(9.0)));
        assert!(budget.retry(at(11.5)));
        assert!(budget.retry(at(100_000.0)), "long after, as well");
    }

    #[test]
    fn a_clock_that_seems_to_step_back_is_harmless() {
        let budget = RetryBudget::new(0.5, 10.0);
        budget.request(at(50.0));
        budget.request(at(1.0));
        assert!(budget.retry(at(2.0)));
    }
}
