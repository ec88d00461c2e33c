//! Free loopback ports outside the range the kernel gives to outgoing connections.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};

const FIRST: u32 = 10_000;
const SPAN: u32 = 20_000;

/// An address on which nothing listens now, and that no outgoing connection will take.
pub fn free() -> SocketAddr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let start = std::process::id().wrapping_mul(131);
    for _ in 0..SPAN {
        let offset = start.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % SPAN;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, (FIRST + offset) as u16));
        if TcpListener::bind(address).is_ok() {
            return address;
        }
    }
    panic!("no free port between {FIRST} and {}", FIRST + SPAN);
}
