//! The order in which waiting requests are served.
//!
//! Bands strictly, the highest first; in a band tenants take turns by the tokens they were served (start-time fair
//! queueing), and a tenant's own requests keep their order. A request rises one band for each `aging` span it waited.
//! Risen requests take part at the level they have reached, one for every [`NATIVES_PER_RISEN`] of the band's own:
//! enough that the lowest band is always served, too little for a flood of old batch work to be in the way of the
//! band it has risen to.
//!
//! Every operation is O(log n) in the waiting.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use crate::config::BandSpec;
use crate::units::{Band, TenantName, Time};

use super::ask::Ask;
use super::balancer::Waiter;

/// Requests of a band itself that are served for one that rose into it, while both wait.
pub const NATIVES_PER_RISEN: u32 = 4;

/// A request that waits.
pub(super) struct Waiting {
    pub ask: Arc<Ask>,
    pub waiter: Waiter,
    /// Since when others behind it were placed because it did not fit.
    pub passed_since: Option<Time>,
}

impl std::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiting").field("ask", &self.ask).finish_non_exhaustive()
    }
}

/// What is served before a request is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ahead {
    pub requests: u64,
    pub tokens: u64,
}

/// One place in a line.
#[derive(Debug)]
pub(super) struct Place<T> {
    pub band: Band,
    pub tenant: Option<TenantName>,
    /// What it weighs in the tenant's turn, in tokens.
    pub tokens: u64,
    pub since: Time,
    pub what: T,
}

/// A tenant's requests in one band.
#[derive(Debug, Default)]
struct TenantLine {
    /// First come, first served.
    ids: BTreeSet<u64>,
    /// Tokens served, on the band's virtual clock.
    served: u64,
}

#[derive(Debug, Default)]
struct BandLine {
    /// All of the band's, the oldest first (ids only grow).
    ids: BTreeSet<u64>,
    tenants: HashMap<Option<TenantName>, TenantLine>,
    /// Tenants that wait, the one served least first.
    turns: BTreeSet<(u64, Option<TenantName>)>,
    /// The served tokens of the tenant whose turn was last: who comes new starts here.
    virtual_now: u64,
    /// Tokens of all that wait.
    tokens: u64,
    /// Own requests served since one that rose into this band was.
    natives_since_risen: u32,
}

/// A tenant that does not wait is remembered as long as fewer than this many are.
const TENANTS_KEPT: usize = 1024;

/// Waiting requests in the order in which they are served.
#[derive(Debug)]
pub(super) struct Line<T> {
    places: BTreeMap<u64, Place<T>>,
    bands: Vec<BandLine>,
    next_id: u64,
}

impl<T> Default for Line<T> {
    fn default() -> Self {
        Line { places: BTreeMap::new(), bands: Vec::new(), next_id: 0 }
    }
}

impl<T> Line<T> {
    pub fn len(&self) -> usize {
        self.places.len()
    }

    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Waiting in this band.
    pub fn depth(&self, band: Band) -> usize {
        self.bands.get(usize::from(band.0)).map_or(0, |line| line.ids.len())
    }

    /// What waits in this band and higher ones.
    pub fn ahead(&self, band: Band) -> Ahead {
        let lines = self.bands.iter().take(usize::from(band.0) + 1);
        lines.fold(Ahead::default(), |ahead, line| Ahead {
            requests: ahead.requests + line.ids.len() as u64,
            tokens: ahead.tokens + line.tokens,
        })
    }

    pub fn get_mut(&mut self, id: u64) -> Option<&mut Place<T>> {
        self.places.get_mut(&id)
    }

    /// Puts a request at the end of its tenant's line and gives its id.
    pub fn push(&mut self, place: Place<T>) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        let index = usize::from(place.band.0);
        if self.bands.len() <= index {
            self.bands.resize_with(index + 1, BandLine::default);
        }
        let line = &mut self.bands[index];
        line.ids.insert(id);
        line.tokens += place.tokens;
        let tenant = line.tenants.entry(place.tenant.clone()).or_default();
        if tenant.ids.is_empty() {
            // Turns that were not used are not saved up.
            tenant.served = tenant.served.max(line.virtual_now);
            line.turns.insert((tenant.served, place.tenant.clone()));
        }
        tenant.ids.insert(id);
        self.places.insert(id, place);
        id
    }

    /// Takes a request out unserved.
    pub fn remove(&mut self, id: u64) -> Option<Place<T>> {
        self.take(id, false)
    }

    /// Takes a request out because it is served: its tenant's turn is used.
    pub fn serve(&mut self, id: u64, level: Band) -> Option<Place<T>> {
        let place = self.take(id, true)?;
        if let Some(line) = self.bands.get_mut(usize::from(level.0)) {
            line.natives_since_risen = if place.band == level { line.natives_since_risen + 1 } else { 0 };
        }
        Some(place)
    }

    fn take(&mut self, id: u64, served: bool) -> Option<Place<T>> {
        let place = self.places.remove(&id)?;
        let line = &mut self.bands[usize::from(place.band.0)];
        line.ids.remove(&id);
        line.tokens -= place.tokens;
        let waiting = line.ids.len();
        if let Some(tenant) = line.tenants.get_mut(&place.tenant) {
            line.turns.remove(&(tenant.served, place.tenant.clone()));
            tenant.ids.remove(&id);
            if served {
                line.virtual_now = line.virtual_now.max(tenant.served);
                tenant.served += place.tokens.max(1);
            }
            if !tenant.ids.is_empty() {
                line.turns.insert((tenant.served, place.tenant.clone()));
            } else if line.tenants.len() > TENANTS_KEPT.max(waiting) {
                line.tenants.remove(&place.tenant);
            }
        }
        Some(place)
    }

    /// The oldest of each band that waited past its band's limit.
    pub fn expired(&self, bands: &[BandSpec], now: Time) -> Option<u64> {
        self.bands.iter().enumerate().find_map(|(index, line)| {
            let id = *line.ids.first()?;
            let limit = band(bands, index).queue.wait;
            (now.since(self.places[&id].since) >= limit).then_some(id)
        })
    }

    /// The newest request of the lowest band below `band`: the one that a higher band displaces.
    pub fn displaceable(&self, band: Band) -> Option<u64> {
        self.bands.iter().enumerate().skip(usize::from(band.0) + 1).rev().find_map(|(_, line)| line.ids.last().copied())
    }

    /// Up to `most` requests in the order in which they should be served, each with the level at which it is.
    pub fn in_turn(&self, bands: &[BandSpec], now: Time, most: usize) -> Vec<(u64, Band)> {
        let mut order: Vec<(u64, Band)> = Vec::with_capacity(most);
        for (level, line) in self.bands.iter().enumerate() {
            let risen = self.bands.iter().enumerate().skip(level + 1).filter_map(|(index, lower)| {
                let id = *lower.ids.first()?;
                let waited = now.since(self.places[&id].since);
                (index - rise(bands, index, waited) <= level).then_some(id)
            });
            // The first of each tenant in their turns, then the second ones, and so on: who comes after one that does
            // not fit may fit.
            let natives = (0..most).flat_map(|round| {
                let tenants = line.turns.iter().take(most).map(|(_, tenant)| &line.tenants[tenant]);
                tenants.filter_map(move |tenant| tenant.ids.iter().nth(round).copied())
            });
            let natives = natives.take(most);
            let level = Band(level as u8);
            let mut take = |id: u64| {
                if order.len() < most && !order.iter().any(|&(known, _)| known == id) {
                    order.push((id, level));
                }
            };
            if line.natives_since_risen >= NATIVES_PER_RISEN || line.ids.is_empty() {
                risen.for_each(&mut take);
                natives.for_each(&mut take);
            } else {
                natives.for_each(&mut take);
                risen.for_each(&mut take);
            }
            if order.len() >= most {
                break;
            }
        }
        order
    }
}

/// How many bands a request of the `index`th has risen.
fn rise(bands: &[BandSpec], index: usize, waited: Duration) -> usize {
    let aging = band(bands, index).aging.as_secs_f64();
    if aging <= 0.0 { index } else { ((waited.as_secs_f64() / aging) as usize).min(index) }
}

/// The band's settings; a band that a new configuration no longer has counts as the last.
pub(super) fn band(bands: &[BandSpec], index: usize) -> &BandSpec {
    &bands[index.min(bands.len() - 1)]
}
