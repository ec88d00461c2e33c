//! Open client connections, in all and per address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::units::ReplicaId;

use super::stream::ConnState;

/// Counts open connections.
#[derive(Debug, Default)]
pub struct Connections {
    open: AtomicUsize,
    by_address: Mutex<HashMap<IpAddr, usize>>,
    /// HTTP/1 connections, by the address of their state, so that those of one replica can be ended.
    states: Mutex<HashMap<usize, Weak<ConnState>>>,
}

/// A connection that can be ended; dropping it forgets it.
#[derive(Debug)]
pub struct Endable {
    connections: Arc<Connections>,
    key: usize,
}

impl Drop for Endable {
    fn drop(&mut self) {
        self.connections.states.lock().remove(&self.key);
    }
}

/// One open connection; dropping it gives its place back.
#[derive(Debug)]
pub struct OpenConnection {
    connections: Arc<Connections>,
    address: Option<IpAddr>,
}

impl Connections {
    /// Connections that are open now.
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Keeps this connection among those that [`Connections::end`] finds.
    pub fn endable(self: &Arc<Self>, state: &Arc<ConnState>) -> Endable {
        let key = Arc::as_ptr(state) as usize;
        self.states.lock().insert(key, Arc::downgrade(state));
        Endable { connections: self.clone(), key }
    }

    /// Ends the exchanges that a replica is answering or owes an answer; how many there were.
    pub fn end(&self, replica: &ReplicaId) -> usize {
        let states: Vec<Arc<ConnState>> = self.states.lock().values().filter_map(Weak::upgrade).collect();
        let served = states.iter().filter(|state| state.is_served_by(replica));
        served.map(|state| state.set_deadline(Some(std::time::Duration::ZERO))).count()
    }

    /// Takes a place, or `None` where `all` or `per_address` (0: no limit) are taken.
    pub fn enter(self: &Arc<Self>, address: Option<IpAddr>, all: usize, per_address: usize) -> Option<OpenConnection> {
        if self.open.fetch_add(1, Ordering::Relaxed) >= all {
            self.open.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        // Addresses are counted only where there is a limit on them, and forgotten with their last connection.
        let counted = address.filter(|_| per_address > 0);
        if let Some(ip) = counted {
            let mut by_address = self.by_address.lock();
            let n = by_address.entry(ip).or_insert(0);
            if *n >= per_address {
                drop(by_address);
                self.open.fetch_sub(1, Ordering::Relaxed);
                return None;
            }
            *n += 1;
        }
        Some(OpenConnection { connections: self.clone(), address: counted })
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.connections.open.fetch_sub(1, Ordering::Relaxed);
        if let Some(ip) = self.address {
            let mut by_address = self.connections.by_address.lock();
            if let Some(n) = by_address.get_mut(&ip) {
                *n -= 1;
                if *n == 0 {
                    by_address.remove(&ip);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_exchanges_of_the_named_replica_are_ended() {
        let connections = Arc::new(Connections::default());
        let [a, b, idle] = [0, 1, 2].map(|_| ConnState::new());
        let known = [&a, &b, &idle].map(|state| connections.endable(state));
        a.served_by(&ReplicaId::from("a"));
        b.served_by(&ReplicaId::from("b"));
        assert_eq!(connections.end(&ReplicaId::from("a")), 1);
        a.await_request();
        assert_eq!(connections.end(&ReplicaId::from("a")), 0, "its answer is over");
        drop(known);
        assert!(connections.states.lock().is_empty());
    }

    #[test]
    fn connections_are_limited_in_all_and_per_address_and_leave_nothing_behind() {
        let connections = Arc::new(Connections::default());
        let a: IpAddr = "10.0.0.1".parse().unwrap();
        let b: IpAddr = "10.0.0.2".parse().unwrap();
        let first = connections.enter(Some(a), 3, 2).unwrap();
        let second = connections.enter(Some(a), 3, 2).unwrap();
        assert!(connections.enter(Some(a), 3, 2).is_none(), "two of one address");
        let third = connections.enter(Some(b), 3, 2).unwrap();
        assert!(connections.enter(Some(b), 3, 2).is_none(), "three in all");
        drop((first, second, third));
        assert_eq!(connections.open(), 0);
        assert!(connections.by_address.lock().is_empty());
    }
}
