//! Letting requests in: placed at once, put into their band's queue, or refused; and serving the queues.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::thread::LocalKey;
use std::time::Duration;

use crate::units::{Band, Time};

use super::ask::{Ask, Refusal};
use super::balancer::{Admission, Balancer, NO_REPLICA, State, Ticket, Waiter};
use super::fit::Terms;
use super::pool::Pool;
use super::queue::{self, Line, Place, Waiting};
use super::reservation::Reservation;

/// How many waiting requests one look at the queue considers: the first in turn, and those behind it that may be small
/// enough to fit beside what the first does not fit.
const CONSIDERED_PER_LOOK: usize = 32;
/// How many of them may find no room. What is no smaller than one that did not fit is not tried.
const TRIED_PER_LOOK: usize = 8;
/// How many of them may wait by choice where there is room; those behind take it.
const BY_CHOICE_PER_LOOK: usize = 8;
/// So long a request may wait for the replica that holds its prompt.
const FOR_ITS_PREFIX_MAX: Duration = Duration::from_secs(10);
/// For so long others may pass a request that is first in turn and does not fit. Then a replica is kept for it: if all
/// were, the fleet would stand half empty for one large request.
const PASSED_MAX: Duration = Duration::from_secs(2);
/// A request whose projected wait is longer than its band's limit by this factor is hopeless. Projections are rough:
/// refusing what would have been served costs more than letting it wait.
const HOPELESS: f64 = 1.5;

type Outcome = (Waiter, Result<Reservation, Refusal>);

thread_local! {
    /// Whether this thread serves queues now; a release in between asks it to look once more instead of nesting.
    static SERVING: Cell<bool> = const { Cell::new(false) };
    static AGAIN: Cell<bool> = const { Cell::new(false) };
    /// The terms of the placement that this thread is making, which goes through the shell's [`super::Placer`].
    static TERMS: Cell<Terms> = const { Cell::new(Terms::NOW) };
}

/// The terms of the placement that this thread is making.
pub(super) fn terms() -> Terms {
    TERMS.get()
}

/// Another value in a thread's cell for a while; the former one comes back, come what may.
struct ForAWhile<T: Copy + 'static> {
    cell: &'static LocalKey<Cell<T>>,
    former: T,
}

impl<T: Copy> ForAWhile<T> {
    fn set(cell: &'static LocalKey<Cell<T>>, value: T) -> Self {
        ForAWhile { cell, former: cell.replace(value) }
    }
}

impl<T: Copy> Drop for ForAWhile<T> {
    fn drop(&mut self) {
        self.cell.set(self.former);
    }
}

impl Balancer {
    /// Lets a request in: placed at once, put into its band's queue, or refused. `waiter` is called only where the
    /// answer is [`Admission::Waiting`], exactly once, unless the ticket is dropped first.
    pub fn admit(self: &Arc<Self>, ask: Arc<Ask>, waiter: Waiter) -> Admission {
        let state = self.state.load();
        let Some(pool) = state.pool(&ask.model) else {
            return Admission::Refused(NO_REPLICA);
        };
        let now = self.home.clock.now();
        if !self.others_first(&state, pool, &ask, now) {
            let waits = queue::band(&state.settings.bands, usize::from(ask.band.0)).queue.requests > 0;
            let terms =
                Terms { yields: waits && pool.serves_above(ask.band, now), seeks_its_prefix: waits, risen: false };
            match self.place_on(terms, &ask) {
                Ok(reservation) => return Admission::Placed(reservation),
                Err(Refusal::NoCapacity { .. }) => {}
                Err(refusal) => return Admission::Refused(refusal),
            }
        }
        let (admission, outcomes) = self.wait(&state, pool, ask, waiter, now);
        finish(outcomes);
        if AGAIN.take() {
            self.serve();
        }
        admission
    }

    fn place_on(self: &Arc<Self>, terms: Terms, ask: &Arc<Ask>) -> Result<Reservation, Refusal> {
        let _until_placed = ForAWhile::set(&TERMS, terms);
        self.place(ask, &[])
    }

    /// Whether somebody waits who has a better right to the room that there may be.
    fn others_first(&self, state: &State, pool: &Pool, ask: &Ask, now: Time) -> bool {
        if self.home.waiting.load(Relaxed) == 0 {
            return false;
        }
        let queue = pool.kept.queue.lock();
        if queue.is_empty() {
            return false;
        }
        let first = queue.in_turn(&state.settings.bands, now, 1);
        first.first().is_some_and(|&(_, level)| level <= ask.band)
    }

    /// Puts a request into the queue and looks whether it, or another, can be placed meanwhile.
    fn wait(
        self: &Arc<Self>,
        state: &State,
        pool: &Arc<Pool>,
        ask: Arc<Ask>,
        waiter: Waiter,
        now: Time,
    ) -> (Admission, Vec<Outcome>) {
        let mut outcomes = Vec::new();
        let bands = &state.settings.bands;
        let spec = queue::band(bands, usize::from(ask.band.0));
        let demand = state.demand(&ask, now);
        // Room that a placement below gives back is looked at afterwards: the queue is locked.
        let _nested = ForAWhile::set(&SERVING, true);
        let mut queue = pool.kept.queue.lock();
        let ahead = queue.ahead(ask.band);
        let refused = |queue_ahead| {
            Admission::Refused(Refusal::NoCapacity { retry_after: pool.retry_after(&demand, queue_ahead) })
        };
        let total: usize = bands.iter().map(|band| band.queue.requests).sum();
        let full = queue.depth(ask.band) >= spec.queue.requests || queue.len() >= total;
        let hopeless = pool.projected_wait(&demand, ahead) > HOPELESS * spec.queue.wait.as_secs_f64();
        // Some may wait by choice: nobody is refused, or put out, where there is room for this one.
        if spec.queue.requests > 0
            && (full || hopeless)
            && let Ok(reservation) = self.place_on(Terms::NOW, &ask)
        {
            return (Admission::Placed(reservation), outcomes);
        }
        if spec.queue.requests == 0 || hopeless {
            return (refused(ahead), outcomes);
        }
        if full {
            // A band that is full takes a place of the lowest band that waits.
            let Some(displaced) = queue.displaceable(ask.band).and_then(|id| queue.remove(id)) else {
                return (refused(ahead), outcomes);
            };
            self.home.waiting.fetch_sub(1, Relaxed);
            let retry_after = pool.retry_after(&state.demand(&displaced.what.ask, now), queue.ahead(displaced.band));
            outcomes.push((displaced.what.waiter, Err(Refusal::Displaced { retry_after })));
        }
        let tokens = demand.tokens();
        let (band, tenant) = (ask.band, ask.tenant.clone());
        let what = Waiting { ask, waiter, passed_since: None };
        let id = queue.push(Place { band, tenant, tokens, since: now, what });
        self.home.waiting.fetch_add(1, AcqRel);
        // Room that a release made since this request found none is not lost: the look below finds it.
        let mut mine = None;
        self.look(state, pool, &mut queue, now, |served, waiter, result| {
            if served == id { mine = Some(result) } else { outcomes.push((waiter, result)) }
        });
        drop(queue);
        let admission = match mine {
            Some(Ok(reservation)) => Admission::Placed(reservation),
            Some(Err(refusal)) => Admission::Refused(refusal),
            None => Admission::Waiting(Ticket { kept: pool.kept.clone(), home: self.home.clone(), id }),
        };
        (admission, outcomes)
    }

    /// Serves the queues of all models as far as there is room, and expires waits.
    pub(super) fn serve(self: &Arc<Self>) {
        if SERVING.get() {
            AGAIN.set(true);
            return;
        }
        let _serving = ForAWhile::set(&SERVING, true);
        loop {
            AGAIN.set(false);
            let state = self.state.load_full();
            for pool in &state.pools_in_order {
                let now = self.home.clock.now();
                let mut outcomes = Vec::new();
                {
                    let mut queue = pool.kept.queue.lock();
                    if queue.is_empty() {
                        continue;
                    }
                    self.expire(&state, pool, &mut queue, now, &mut outcomes);
                    self.look(&state, pool, &mut queue, now, |_, waiter, result| outcomes.push((waiter, result)));
                }
                finish(outcomes);
            }
            if !AGAIN.take() {
                break;
            }
        }
    }

    fn expire(
        self: &Arc<Self>,
        state: &State,
        pool: &Pool,
        queue: &mut Line<Waiting>,
        now: Time,
        outcomes: &mut Vec<Outcome>,
    ) {
        let bands = &state.settings.bands;
        while let Some(place) = queue.expired(bands, now).and_then(|id| queue.remove(id)) {
            self.home.waiting.fetch_sub(1, Relaxed);
            // It may have waited by choice.
            if let Ok(reservation) = self.place_on(Terms::NOW, &place.what.ask) {
                outcomes.push((place.what.waiter, Ok(reservation)));
                continue;
            }
            let demand = state.demand(&place.what.ask, now);
            let retry_after = pool.retry_after(&demand, queue.ahead(place.band));
            let waited = now.since(place.since);
            outcomes.push((place.what.waiter, Err(Refusal::QueueTimeout { waited, retry_after })));
        }
    }

    /// Places waiting requests in their order until none of those in turn fits.
    fn look(
        self: &Arc<Self>,
        state: &State,
        pool: &Pool,
        queue: &mut Line<Waiting>,
        now: Time,
        mut served: impl FnMut(u64, Waiter, Result<Reservation, Refusal>),
    ) {
        while let Some((id, level, result)) = self.first_that_fits(state, pool, queue, now) {
            let Some(place) = queue.serve(id, level) else { break };
            self.home.waiting.fetch_sub(1, Relaxed);
            served(id, place.what.waiter, result);
        }
    }

    fn first_that_fits(
        self: &Arc<Self>,
        state: &State,
        pool: &Pool,
        queue: &mut Line<Waiting>,
        now: Time,
    ) -> Option<(u64, Band, Result<Reservation, Refusal>)> {
        let mut refused: Vec<Arc<Ask>> = Vec::new();
        let (mut before, mut by_choice, mut keeps, mut cut_short) = (Vec::new(), 0, false, false);
        for (id, level) in queue.in_turn(&state.settings.bands, now, CONSIDERED_PER_LOOK) {
            if refused.len() >= TRIED_PER_LOOK {
                cut_short = true;
                break;
            }
            let Some(place) = queue.get_mut(id) else { continue };
            let risen = level < place.band;
            let terms = Terms {
                yields: !risen && !pool.keeps_one_for(&place.what.ask) && pool.serves_above(place.band, now),
                seeks_its_prefix: by_choice < BY_CHOICE_PER_LOOK && now.since(place.since) < FOR_ITS_PREFIX_MAX,
                risen,
            };
            let demand = state.demand(&place.what.ask, now).on(terms);
            if !refused.iter().any(|ask| demand.no_smaller_than(&state.demand(ask, now))) {
                match self.place_on(terms, &place.what.ask) {
                    Ok(reservation) => {
                        passed(queue, &before, now);
                        return Some((id, level, Ok(reservation)));
                    }
                    // Its window is gone, or its model: waiting does not help.
                    Err(refusal @ Refusal::ContextLength { .. }) => return Some((id, level, Err(refusal))),
                    Err(refusal @ Refusal::NoReplica { .. }) if pool.is_gone() => {
                        return Some((id, level, Err(refusal)));
                    }
                    // What waits by choice says nothing of what others find.
                    Err(_) if pool.has_room(&demand.clone().on(Terms::NOW)) => by_choice += 1,
                    Err(_) => refused.push(place.what.ask.clone()),
                }
            }
            let passed_for_long = place.what.passed_since.is_some_and(|since| now.since(since) > PASSED_MAX);
            if !keeps && passed_for_long && !pool.has_room(&demand) {
                pool.keep_one_for(&demand, level);
                keeps = true;
            }
            before.push(id);
        }
        if !keeps && !cut_short {
            pool.kept.keep.release();
        }
        None
    }
}

/// Others were placed before these, which did not fit.
fn passed(queue: &mut Line<Waiting>, ids: &[u64], now: Time) {
    for &id in ids {
        if let Some(place) = queue.get_mut(id) {
            place.what.passed_since.get_or_insert(now);
        }
    }
}

fn finish(outcomes: Vec<Outcome>) {
    for (waiter, result) in outcomes {
        waiter(result);
    }
}
