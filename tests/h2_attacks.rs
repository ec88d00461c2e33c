//! Frames that no honest HTTP/2 client sends, played raw at a TLS listener: the kinds that took other servers down
//! (CVE-2019-9511 to 9518, CVE-2023-44487, CVE-2024-27316, CVE-2025-8671). For each: the connection ends or costs
//! nothing, the process lives and serves others meanwhile, nothing is booked, memory is bounded.

mod harness;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use harness::tls::{connect, pem};
use harness::{Reply, Running, Setup, Upstream, ms, run, within};
use tokio::io::{AsyncReadExt, AsyncWriteExt, WriteHalf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

const HI: &[u8] = br#"{"model":"m1","messages":[{"role":"user","content":"hi"}],"stream":true}"#;
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PRIORITY: u8 = 2;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;

const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const CANCEL: [u8; 4] = [0, 0, 0, 8];

/// How much a connection of this kind may make the process grow; an honest one is some 100 KiB.
const GROWTH_MAX: u64 = 8 << 20;
/// How long an attacker is let go on.
const PATIENCE: Duration = Duration::from_secs(20);

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    frame_of_length(payload.len(), kind, flags, stream, payload)
}

/// A frame whose header claims this length.
fn frame_of_length(length: usize, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![(length >> 16) as u8, (length >> 8) as u8, length as u8, kind, flags];
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(payload);
    out
}

/// A literal header field, not indexed, not Huffman-coded.
fn field(name: &[u8], value: &[u8]) -> Vec<u8> {
    let mut out = vec![0];
    for text in [name, value] {
        assert!(text.len() < 127, "a length of one byte");
        out.push(text.len() as u8);
        out.extend_from_slice(text);
    }
    out
}

/// A chat request's header fields.
fn chat_fields() -> Vec<u8> {
    // :method POST and :scheme https are in the static table.
    let mut out = vec![0x83, 0x87];
    out.extend(field(b":path", b"/v1/chat/completions"));
    out.extend(field(b":authority", b"lb.test"));
    out.extend(field(b"content-type", b"application/json"));
    out
}

/// What an attacker's connection came to.
#[derive(Clone, Default)]
struct Fate {
    closed: Arc<AtomicBool>,
    goaways: Arc<AtomicU64>,
    resets: Arc<AtomicU64>,
}

/// One raw HTTP/2 connection over TLS.
struct Raw {
    write: WriteHalf<TlsStream<TcpStream>>,
    fate: Fate,
    reading: tokio::task::JoinHandle<()>,
}

impl Drop for Raw {
    fn drop(&mut self) {
        self.reading.abort();
    }
}

impl Raw {
    /// Past the handshakes of TLS and HTTP/2.
    async fn open(to: SocketAddr) -> Raw {
        let mut raw = Raw::without_preface(to).await;
        raw.send(PREFACE).await;
        raw.send(&frame(SETTINGS, 0, 0, &[])).await;
        raw
    }

    async fn without_preface(to: SocketAddr) -> Raw {
        let tls = connect(to, &[b"h2"], false).await.expect("a handshake");
        let (mut read, write) = tokio::io::split(tls);
        let fate = Fate::default();
        let seen = fate.clone();
        let reading = tokio::spawn(async move {
            let mut bytes = Vec::new();
            loop {
                match read.read_buf(&mut bytes).await {
                    Ok(0) | Err(_) => break,
                    Ok(_) => {}
                }
                while bytes.len() >= 9 {
                    let length = usize::from(bytes[0]) << 16 | usize::from(bytes[1]) << 8 | usize::from(bytes[2]);
                    if bytes.len() < 9 + length {
                        break;
                    }
                    match bytes[3] {
                        GOAWAY => _ = seen.goaways.fetch_add(1, Ordering::Relaxed),
                        RST_STREAM => _ = seen.resets.fetch_add(1, Ordering::Relaxed),
                        _ => {}
                    }
                    bytes.drain(..9 + length);
                }
            }
            seen.closed.store(true, Ordering::Release);
        });
        Raw { write, fate, reading }
    }

    /// Whether the bytes were taken.
    async fn send(&mut self, bytes: &[u8]) -> bool {
        let sent = tokio::time::timeout(ms(500), async {
            self.write.write_all(bytes).await?;
            self.write.flush().await
        });
        matches!(sent.await, Ok(Ok(())))
    }

    /// Sends what `next` makes, counted from 0, until the connection is closed, nothing more is taken, or `count` are
    /// sent; how many were.
    async fn flood(&mut self, count: u32, mut next: impl FnMut(u32) -> Vec<u8>) -> u32 {
        let end = tokio::time::Instant::now() + PATIENCE;
        for n in 0..count {
            if self.fate.closed.load(Ordering::Acquire)
                || tokio::time::Instant::now() > end
                || !self.send(&next(n)).await
            {
                return n;
            }
        }
        count
    }

    async fn closes(&self) -> bool {
        within(PATIENCE, async || self.fate.closed.load(Ordering::Acquire)).await
    }
}

async fn listening() -> (Upstream, Running) {
    let a = Upstream::start().await;
    a.replies(|_| Reply::new(200, "text/event-stream").events(3, ms(5)).send(harness::reply::DONE));
    let listen = format!(
        "\n  - {{address: $ADDRESS, tls: {{cert: {}, key: {}}}}}",
        pem("server.pem").display(),
        pem("server.key").display()
    );
    let lb = Setup::m1().section("listen", &listen).replica("a", &a.url()).start().await;
    // What a first connection costs once is no attacker's memory.
    for _ in 0..4 {
        assert!(honest(lb.address).await, "an honest client is served");
    }
    (a, lb)
}

/// Whether an honest client is served.
async fn honest(to: SocketAddr) -> bool {
    let Ok(tls) = connect(to, &[b"h2"], false).await else { return false };
    let mut client = harness::h2::H2Client::over(tls).await;
    let answer = client.chat(HI, harness::h2::Ending::OnLastData).await;
    answer.status == 200 && answer.reset.is_none()
}

/// What must hold after every attack.
async fn unharmed(lb: &Running, before: u64, what: &str) {
    assert!(lb.exited().is_none(), "{what}: the process lives");
    assert!(honest(lb.address).await, "{what}: others are served");
    lb.books().settled().await;
    let grown = lb.rss().saturating_sub(before);
    assert!(grown < GROWTH_MAX, "{what}: grown by {grown} bytes");
    assert!(!lb.log().contains("panicked"), "{what}: {}", lb.log());
}

#[test]
fn what_breaks_the_protocol_ends_the_connection() {
    run(async {
        let (a, lb) = listening().await;
        let served = a.count();
        let open = |stream| frame(HEADERS, END_HEADERS, stream, &chat_fields());
        let attacks: Vec<(&str, bool, Vec<u8>)> = vec![
            ("no preface", false, b"GET / HTTP/1.1\r\nhost: lb.test\r\n\r\n".to_vec()),
            ("rubbish in place of a preface", false, (0..200).map(|n| (n * 37) as u8).collect()),
            ("a preface cut short", false, [&PREFACE[..20], b"XXXX", &frame(SETTINGS, 0, 0, &[])].concat()),
            ("a frame larger than was allowed", true, frame_of_length((1 << 24) - 1, DATA, 0, 1, &[0; 1000])),
            (
                "a HEADERS frame larger than was allowed",
                true,
                frame_of_length(1 << 20, HEADERS, END_HEADERS, 1, &[0; 1000]),
            ),
            ("a SETTINGS frame of odd length", true, frame(SETTINGS, 0, 0, &[0; 5])),
            ("a PING of the wrong length", true, frame(PING, 0, 0, &[0; 7])),
            ("DATA for a stream that is idle", true, frame(DATA, 0, 5, b"x")),
            ("DATA for no stream", true, frame(DATA, 0, 0, b"x")),
            ("HEADERS for an even stream", true, open(2)),
            ("CONTINUATION without HEADERS", true, frame(CONTINUATION, END_HEADERS, 1, &chat_fields())),
            (
                "another frame between HEADERS and CONTINUATION",
                true,
                [frame(HEADERS, 0, 1, &chat_fields()), frame(PING, 0, 0, &[0; 8])].concat(),
            ),
            ("header fields that cannot be decoded", true, frame(HEADERS, END_HEADERS, 1, &[0xff; 60])),
            ("an index beyond the tables", true, frame(HEADERS, END_HEADERS, 1, &[0x83, 0x87, 0xfe])),
            ("a window that overflows", true, {
                let full = 0x7fff_ffff_u32.to_be_bytes();
                [frame(WINDOW_UPDATE, 0, 0, &full), frame(WINDOW_UPDATE, 0, 0, &full)].concat()
            }),
            ("padding longer than its frame", true, [open(1), frame(DATA, 8, 1, &[200, 1, 2])].concat()),
        ];
        let attacks_made = attacks.len();
        for (what, past_preface, bytes) in attacks {
            let before = lb.rss();
            let mut raw =
                if past_preface { Raw::open(lb.address).await } else { Raw::without_preface(lb.address).await };
            raw.send(&bytes).await;
            assert!(raw.closes().await, "{what}: the connection ends");
            unharmed(&lb, before, what).await;
        }
        let honest = a.count() - served;
        assert_eq!(honest, attacks_made, "nothing of this went to a replica");
    });
}

#[test]
fn an_endless_header_is_bounded_and_ends_the_connection() {
    run(async {
        let (a, lb) = listening().await;
        let before = lb.rss();
        let served = a.count();
        // CVE-2024-27316: CONTINUATION without end, each full of fields.
        let mut raw = Raw::open(lb.address).await;
        raw.send(&frame(HEADERS, END_STREAM, 1, &chat_fields())).await;
        let fields: Vec<u8> = (0..100).flat_map(|n| field(format!("x-flood-{n}").as_bytes(), &[b'v'; 100])).collect();
        let sent = raw.flood(20_000, |_| frame(CONTINUATION, 0, 1, &fields)).await;
        assert!(raw.closes().await, "the connection ends");
        assert!(sent < 2_000, "{sent} frames of {} bytes were taken", fields.len());
        unharmed(&lb, before, "CONTINUATION flood").await;
        // The same of empty ones, which no limit on bytes would ever see.
        let mut raw = Raw::open(lb.address).await;
        raw.send(&frame(HEADERS, END_STREAM, 1, &chat_fields())).await;
        let sent = raw.flood(200_000, |_| frame(CONTINUATION, 0, 1, &[]).repeat(50)).await;
        let closed = raw.closes().await;
        println!("empty CONTINUATION: {} frames taken, closed: {closed}", u64::from(sent) * 50);
        assert!(closed, "the connection ends");
        unharmed(&lb, before, "empty CONTINUATION flood").await;
        // A small header that unfolds: one long field in the dynamic table, named again and again (CVE-2016-6581).
        let mut raw = Raw::open(lb.address).await;
        let mut bomb = vec![0x83, 0x87];
        bomb.extend(field(b":path", b"/v1/chat/completions"));
        bomb.push(0x40);
        bomb.push(1);
        bomb.push(b'x');
        // 3,000 bytes: the length in HPACK's prefix of seven bits.
        bomb.extend([0x7f, 0xb9, 0x16]);
        bomb.extend(vec![b'v'; 3000 - 48]);
        bomb.extend(vec![0xbe; 12_000]);
        raw.send(&frame(HEADERS, END_HEADERS | END_STREAM, 1, &bomb)).await;
        let refused = within(PATIENCE, async || {
            raw.fate.closed.load(Ordering::Acquire) || raw.fate.resets.load(Ordering::Relaxed) > 0
        })
        .await;
        assert!(refused, "a header that unfolds to megabytes is refused");
        unharmed(&lb, before, "header bomb").await;
        assert_eq!(a.count() - served, 3, "only the honest clients' went to a replica");
    });
}

#[test]
fn streams_that_are_opened_and_reset_at_once_are_not_served_without_end() {
    run(async {
        let (a, lb) = listening().await;
        let before = lb.rss();
        // CVE-2023-44487: each request is whole, and taken back in the same write. CVE-2025-8671: the server is made to
        // reset it by a fault in the stream.
        for (attack, kind, payload) in
            [("rapid reset", RST_STREAM, &CANCEL), ("made you reset", WINDOW_UPDATE, &[0; 4])]
        {
            let mut raw = Raw::open(lb.address).await;
            let served = a.count();
            let sent = raw
                .flood(50_000, |n| {
                    let stream = 2 * n + 1;
                    [
                        frame(HEADERS, END_HEADERS, stream, &chat_fields()),
                        frame(DATA, END_STREAM, stream, HI),
                        frame(kind, 0, stream, payload),
                    ]
                    .concat()
                })
                .await;
            let closed = raw.closes().await;
            println!("{attack}: {sent} streams taken, {} requests sent on, closed: {closed}", a.count() - served);
            assert!(closed, "the connection ends");
            unharmed(&lb, before, attack).await;
        }
    });
}

#[test]
fn floods_of_small_frames_cost_no_memory() {
    run(async {
        let (_a, lb) = listening().await;
        let open = frame(HEADERS, END_HEADERS, 1, &chat_fields());
        let floods: [(&str, Vec<u8>); 6] = [
            ("PING", frame(PING, 0, 0, &[7; 8])),
            ("SETTINGS", frame(SETTINGS, 0, 0, &[0, 4, 0, 1, 0, 0])),
            ("PRIORITY", frame(PRIORITY, 0, 3, &[0, 0, 0, 0, 9])),
            ("empty DATA", frame(DATA, 0, 1, &[])),
            ("WINDOW_UPDATE", frame(WINDOW_UPDATE, 0, 1, &[0, 0, 0, 1])),
            ("unknown", frame(0x7f, 0, 0, &[1; 16])),
        ];
        for (what, one) in floods {
            let before = lb.rss();
            let mut raw = Raw::open(lb.address).await;
            raw.send(&open).await;
            let many = one.repeat(500);
            let sent = raw.flood(200, |_| many.clone()).await;
            println!("{what}: {} frames taken, closed: {}", sent * 500, raw.fate.closed.load(Ordering::Relaxed));
            assert!(honest(lb.address).await, "{what}: others are served meanwhile");
            let grown = lb.rss().saturating_sub(before);
            assert!(grown < GROWTH_MAX, "{what}: grown by {grown} bytes");
            drop(raw);
            unharmed(&lb, before, what).await;
        }
    });
}

#[test]
fn a_client_that_gives_no_window_holds_little_and_is_cut() {
    run(async {
        let a = Upstream::start().await;
        let listen = format!(
            "\n  - {{address: $ADDRESS, tls: {{cert: {}, key: {}}}}}",
            pem("server.pem").display(),
            pem("server.key").display()
        );
        let lb = Setup::m1()
            .section("listen", &listen)
            .section("limits", "{slow_reader_timeout: 1s}")
            .replica("a", &a.url())
            .start()
            .await;
        a.replies(|_| Reply::new(200, "text/event-stream").events(3, ms(5)).send(harness::reply::DONE));
        assert!(honest(lb.address).await);
        let before = lb.rss();
        // CVE-2019-9511: a window of nothing, and answers without end. SETTINGS_INITIAL_WINDOW_SIZE is 4.
        a.replies(|_| Reply::new(200, "text/event-stream").events(20_000, Duration::ZERO));
        let mut raw = Raw::without_preface(lb.address).await;
        raw.send(PREFACE).await;
        raw.send(&frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0])).await;
        let warm = a.count();
        for n in 0..20u32 {
            let stream = 2 * n + 1;
            raw.send(&frame(HEADERS, END_HEADERS, stream, &chat_fields())).await;
            raw.send(&frame(DATA, END_STREAM, stream, HI)).await;
        }
        a.wait_for(warm + 20).await;
        let grown = lb.rss().saturating_sub(before);
        assert!(grown < 20 << 20, "grown by {grown} bytes");
        let cut = within(Duration::from_secs(15), async || lb.books().left_over().await.is_empty()).await;
        assert!(cut, "what nobody takes is let go: {:?}", lb.books().left_over().await);
        a.replies(|_| Reply::new(200, "text/event-stream").events(3, ms(5)).send(harness::reply::DONE));
        drop(raw);
        unharmed(&lb, before, "no window").await;
    });
}
