//! cancellation: a client that leaves stops its generation, whatever the phase.

use std::time::{Duration, Instant};

use crate::harness::h2::{Ending, H2Client};
use crate::harness::{Reply, Setup, case_bytes, ms};
use crate::runner::{Case, case};
use crate::support::*;

pub fn cases() -> Vec<Case> {
    vec![
        case!(c118, "a client that leaves during the prefill stops it"),
        case!(c119, "a client that leaves stops a non-stream answer, over HTTP/1.1 and HTTP/2"),
    ]
}

async fn c118() {
    // The case's two and sixty seconds, scaled.
    for head_first in [false, true] {
        let (a, lb) = one().await;
        a.plays(if head_first {
            Reply::new(200, "text/event-stream").pause(Duration::from_secs(60))
        } else {
            Reply::never()
        });
        let mut client = lb.ask(&case_bytes("c091-request.json")).await;
        a.wait_for(1).await;
        if head_first {
            client.head().await;
        }
        tokio::time::sleep(ms(100)).await;
        let left = Instant::now();
        drop(client);
        let late = a.left_after(0, left, Duration::from_secs(2)).await.expect("the upstream is closed");
        assert!(late < ms(500), "{late:?}");
        outcomes(&lb.books(), "client_gone", 1).await;
        lb.books().settled().await;
        assert_eq!(lb.books().state("a").await, "open", "no fault of the replica");
    }
}

async fn c119() {
    let (a, lb) = one().await;
    a.plays(Reply::never());
    let client = lb.ask(&case_bytes("c119-request.json")).await;
    a.wait_for(1).await;
    let left = Instant::now();
    drop(client);
    let late = a.left_after(0, left, Duration::from_secs(2)).await.expect("the upstream is closed");
    assert!(late < ms(500), "{late:?}");
    outcomes(&lb.books(), "client_gone", 1).await;
    lb.books().settled().await;
    // HTTP/2: one stream is reset, its neighbour on the connection lives.
    let (a, lb) = one_with(Setup::m1().section("listen", "\n  - {address: $ADDRESS, h2c: true}")).await;
    a.then(Reply::never());
    a.then(Reply::chat(3, 2).after(ms(600)));
    let mut h2 = H2Client::connect(lb.address).await;
    let leaving = h2.ask(&case_bytes("c119-request.json"), Ending::OnLastData).await;
    a.wait_for(1).await;
    let staying = h2.ask(HI, Ending::OnLastData).await;
    a.wait_for(2).await;
    let left = Instant::now();
    leaving.cancel();
    let late = a.left_after(0, left, Duration::from_secs(2)).await.expect("the upstream is closed");
    assert!(late < ms(500), "{late:?}");
    assert_eq!(staying.answer().await.status, 200);
    outcomes(&lb.books(), "client_gone", 1).await;
    lb.books().settled().await;
}
