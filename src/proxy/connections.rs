//! Open client connections, in all and per address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

/// Counts open connections.
#[derive(Debug, Default)]
pub struct Connections {
    open: AtomicUsize,
    by_address: Mutex<HashMap<IpAddr, usize>>,
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
