//! A scripted replica over raw TCP: it plays its answers byte for byte and keeps what it was sent.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::ports;
use super::reply::{Act, Framing, Reply};
use super::within;

type Handler = Arc<dyn Fn(&Seen) -> Reply + Send + Sync>;

/// One request as it came in.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Which connection it came on, counted from 0, and its place on it.
    pub connection: u64,
    pub place: u64,
    pub method: String,
    pub target: String,
    /// As sent, in order, names in lower case.
    pub headers: Vec<(String, String)>,
    /// Without its framing.
    pub body: Bytes,
    /// Every byte, framing included.
    pub raw: Bytes,
    pub at: Instant,
    /// When each `Send` or `Raw` was flushed.
    pub sent: Vec<Instant>,
    /// When the balancer closed the connection while the answer was still going (or owed).
    pub left: Option<Instant>,
    /// When the answer was played to its end.
    pub played: Option<Instant>,
}

impl Seen {
    /// The value of the one header of this name.
    pub fn header(&self, name: &str) -> Option<&str> {
        let all: Vec<_> = self.headers.iter().filter(|(n, _)| n == name).collect();
        assert!(all.len() < 2, "header {name} is there {} times: {all:?}", all.len());
        all.first().map(|(_, v)| v.as_str())
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("a JSON body")
    }
}

#[derive(Default)]
struct State {
    seen: Mutex<Vec<Seen>>,
    handler: Mutex<Option<Handler>>,
    next: Mutex<VecDeque<Reply>>,
    /// What `GET /health` answers.
    health: Mutex<Option<Reply>>,
    /// What `GET` of other paths answers, by path.
    pages: Mutex<Vec<(String, Reply)>>,
    models: Mutex<Vec<String>>,
    idle_close: Mutex<Option<Duration>>,
    connections: AtomicU64,
    open: AtomicU64,
    /// Requests that were no proper HTTP: two framing headers, stray bytes, broken chunks.
    complaints: Mutex<Vec<String>>,
}

/// A scripted replica.
pub struct Upstream {
    pub address: SocketAddr,
    state: Arc<State>,
    listening: Mutex<Option<JoinHandle<()>>>,
    serving: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Upstream {
    /// Starts on a free port; unscripted requests get an ordinary answer.
    pub async fn start() -> Upstream {
        Upstream::start_on(ports::free()).await
    }

    pub async fn start_on(address: SocketAddr) -> Upstream {
        let state = Arc::new(State { models: Mutex::new(vec!["m1".to_owned()]), ..State::default() });
        let upstream =
            Upstream { address, state, listening: Mutex::new(None), serving: Arc::new(Mutex::new(Vec::new())) };
        upstream.listen().await;
        upstream
    }

    /// Listens (again, after [`Upstream::stop`]).
    pub async fn listen(&self) {
        let listener = bind(self.address).await;
        let state = Arc::clone(&self.state);
        let serving = Arc::clone(&self.serving);
        *self.listening.lock() = Some(tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { continue };
                let id = state.connections.fetch_add(1, Ordering::SeqCst);
                let state = Arc::clone(&state);
                let task = tokio::spawn(async move {
                    state.open.fetch_add(1, Ordering::SeqCst);
                    let _open = Leaving(&state.open);
                    serve(&state, stream, id).await;
                });
                let mut serving = serving.lock();
                serving.retain(|task| !task.is_finished());
                serving.push(task);
            }
        }));
    }

    /// Refuses new connections and drops the open ones.
    pub fn stop(&self) {
        if let Some(task) = self.listening.lock().take() {
            task.abort();
        }
        for task in self.serving.lock().drain(..) {
            task.abort();
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Every inference request from now on is answered so.
    pub fn plays(&self, reply: Reply) {
        self.replies(move |_| reply.clone());
    }

    pub fn replies(&self, handler: impl Fn(&Seen) -> Reply + Send + Sync + 'static) {
        *self.state.handler.lock() = Some(Arc::new(handler));
    }

    /// The next inference request is answered so, once; several queue up.
    pub fn then(&self, reply: Reply) {
        self.state.next.lock().push_back(reply);
    }

    pub fn health(&self, reply: Option<Reply>) {
        *self.state.health.lock() = reply;
    }

    /// What `GET path` answers.
    pub fn page(&self, path: &str, reply: Reply) {
        let mut pages = self.state.pages.lock();
        pages.retain(|(p, _)| p != path);
        pages.push((path.to_owned(), reply));
    }

    pub fn models(&self, names: &[&str]) {
        *self.state.models.lock() = names.iter().map(|&n| n.to_owned()).collect();
    }

    /// Closes idle kept-alive connections after this long.
    pub fn idle_close(&self, after: Duration) {
        *self.state.idle_close.lock() = Some(after);
    }

    /// Every request, probes and scrapes too.
    pub fn all(&self) -> Vec<Seen> {
        self.state.seen.lock().clone()
    }

    /// The inference requests so far, in order of arrival.
    pub fn seen(&self) -> Vec<Seen> {
        self.state.seen.lock().iter().filter(|s| is_inference(s)).cloned().collect()
    }

    pub fn count(&self) -> usize {
        self.state.seen.lock().iter().filter(|s| is_inference(s)).count()
    }

    /// The one inference request there was.
    pub fn only(&self) -> Seen {
        let seen = self.seen();
        assert_eq!(seen.len(), 1, "exactly one request should have reached the replica");
        seen.into_iter().next().expect("one")
    }

    pub fn forget(&self) {
        self.state.seen.lock().retain(|s| s.played.is_none() && s.left.is_none());
    }

    /// Waits until this many inference requests have come, at most five seconds.
    pub async fn wait_for(&self, count: usize) {
        assert!(
            within(Duration::from_secs(5), async || self.count() >= count).await,
            "{} requests reached the replica, {count} were awaited",
            self.count()
        );
    }

    /// Waits until the balancer has hung up on request `index`; how long after `since` that was.
    pub async fn left_after(&self, index: usize, since: Instant, limit: Duration) -> Option<Duration> {
        let mut left = None;
        within(limit, async || {
            left = self.seen().get(index).and_then(|s| s.left);
            left.is_some()
        })
        .await;
        left.map(|at| at.saturating_duration_since(since))
    }

    pub fn open_connections(&self) -> u64 {
        self.state.open.load(Ordering::SeqCst)
    }

    /// What was not proper HTTP so far.
    pub fn complaints(&self) -> Vec<String> {
        self.state.complaints.lock().clone()
    }
}

struct Leaving<'a>(&'a AtomicU64);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn bind(address: SocketAddr) -> TcpListener {
    for _ in 0..100 {
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        socket.set_reuseaddr(true).expect("reuse of an address");
        if socket.bind(address).is_ok()
            && let Ok(listener) = socket.listen(4096)
        {
            return listener;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("cannot listen on {address}");
}

fn is_inference(seen: &Seen) -> bool {
    seen.method == "POST" && seen.header("x-probe").is_none()
}

enum Step {
    Go,
    Gone,
}

async fn serve(state: &State, mut stream: TcpStream, connection: u64) {
    let _ = stream.set_nodelay(true);
    let mut buf = Vec::new();
    for place in 0.. {
        let idle = state.idle_close.lock().filter(|_| place > 0);
        let read = read_request(state, &mut stream, &mut buf, connection, place);
        let seen = match idle {
            Some(limit) => match tokio::time::timeout(limit, read).await {
                Ok(seen) => seen,
                Err(_) => return,
            },
            None => read.await,
        };
        let Some(seen) = seen else { return };
        let reply = choose(state, &seen);
        let head_only = seen.method == "HEAD";
        let index = {
            let mut all = state.seen.lock();
            all.push(seen);
            all.len() - 1
        };
        if let Step::Gone = play(state, &mut stream, &mut buf, index, reply, head_only).await {
            return;
        }
    }
}

fn choose(state: &State, seen: &Seen) -> Reply {
    let path = seen.target.split('?').next().unwrap_or_default();
    if seen.method == "GET" || seen.method == "HEAD" {
        if let Some((_, reply)) = state.pages.lock().iter().find(|(p, _)| p == path) {
            return reply.clone();
        }
        if path.ends_with("/health") {
            return state.health.lock().clone().unwrap_or_else(|| Reply::whole(200, "text/plain", ""));
        }
        if path.ends_with("/v1/models") {
            let models: Vec<_> = state
                .models
                .lock()
                .iter()
                .map(|name| serde_json::json!({"id": name, "object": "model", "owned_by": "test"}))
                .collect();
            return Reply::json(200, serde_json::json!({"object": "list", "data": models}).to_string());
        }
        return Reply::json(404, r#"{"detail":"Not Found"}"#);
    }
    if let Some(reply) = state.next.lock().pop_front() {
        return reply;
    }
    if let Some(handler) = state.handler.lock().clone() {
        return handler(seen);
    }
    ordinary(seen)
}

/// What an engine would say: a stream where one was asked for, with usage where that was.
pub fn ordinary(seen: &Seen) -> Reply {
    let body: serde_json::Value = serde_json::from_slice(&seen.body).unwrap_or_default();
    if body["stream"] == true {
        let reply = Reply::new(200, "text/event-stream").events(2, Duration::ZERO);
        let reply = if body["stream_options"]["include_usage"] == true {
            reply.send(super::reply::usage_chunk(3, 2))
        } else {
            reply
        };
        reply.send(super::reply::DONE)
    } else {
        Reply::chat(3, 2)
    }
}

async fn play(
    state: &State,
    stream: &mut TcpStream,
    buf: &mut Vec<u8>,
    index: usize,
    reply: Reply,
    head_only: bool,
) -> Step {
    let gone = |state: &State| {
        state.seen.lock()[index].left = Some(Instant::now());
        Step::Gone
    };
    if !reply.before.is_zero() && pause(stream, buf, reply.before).await.is_err() {
        return gone(state);
    }
    if let Some(gate) = &reply.gate {
        tokio::select! {
            () = gate.passed() => {}
            _ = closed(stream, buf) => return gone(state),
        }
    }
    if reply.framing != Framing::Bare {
        let mut head = format!("HTTP/1.1 {} {}\r\n", reply.status, reason(reply.status));
        for (name, value) in &reply.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        match reply.framing {
            Framing::Chunked => head.push_str("transfer-encoding: chunked\r\n"),
            Framing::Length => head.push_str(&format!("content-length: {}\r\n", reply.body().len())),
            Framing::Close | Framing::Bare => {}
        }
        head.push_str("\r\n");
        if stream.write_all(head.as_bytes()).await.is_err() {
            return gone(state);
        }
    }
    if head_only {
        state.seen.lock()[index].played = Some(Instant::now());
        return Step::Go;
    }
    for act in reply.acts {
        let went = match act {
            Act::Send(bytes) if reply.framing == Framing::Chunked => {
                if bytes.is_empty() {
                    continue;
                }
                let mut chunk = format!("{:x}\r\n", bytes.len()).into_bytes();
                chunk.extend_from_slice(&bytes);
                chunk.extend_from_slice(b"\r\n");
                send(state, stream, index, &chunk).await
            }
            Act::Send(bytes) | Act::Raw(bytes) => send(state, stream, index, &bytes).await,
            Act::Pause(length) => pause(stream, buf, length).await,
            Act::Hold(gate) => {
                tokio::select! {
                    () = gate.passed() => Ok(()),
                    gone = closed(stream, buf) => gone,
                }
            }
            Act::Hang => closed(stream, buf).await,
            Act::Fin => {
                if reply.framing == Framing::Chunked {
                    let _ = stream.write_all(b"0\r\n\r\n").await;
                }
                return ended(state, stream, index).await;
            }
            Act::Cut => return ended(state, stream, index).await,
            Act::Rst => {
                // What was sent must be on its way before the reset throws the rest away.
                tokio::time::sleep(Duration::from_millis(30)).await;
                let _ = socket2::SockRef::from(&*stream).set_linger(Some(Duration::ZERO));
                state.seen.lock()[index].played = Some(Instant::now());
                return Step::Gone;
            }
        };
        if went.is_err() {
            return gone(state);
        }
    }
    match reply.framing {
        Framing::Chunked if stream.write_all(b"0\r\n\r\n").await.is_err() => return gone(state),
        Framing::Close => return ended(state, stream, index).await,
        _ => {}
    }
    state.seen.lock()[index].played = Some(Instant::now());
    Step::Go
}

async fn ended(state: &State, stream: &mut TcpStream, index: usize) -> Step {
    let _ = stream.shutdown().await;
    state.seen.lock()[index].played = Some(Instant::now());
    // A close with unread bytes would become a reset: let the other side close first.
    let _ = tokio::time::timeout(Duration::from_millis(500), async {
        let mut rest = [0u8; 1024];
        while matches!(stream.read(&mut rest).await, Ok(n) if n > 0) {}
    })
    .await;
    Step::Gone
}

async fn send(state: &State, stream: &mut TcpStream, index: usize, bytes: &[u8]) -> Result<(), ()> {
    let sent = stream.write_all(bytes).await;
    state.seen.lock()[index].sent.push(Instant::now());
    sent.map_err(|_| ())
}

/// Waits, unless the balancer hangs up first.
async fn pause(stream: &mut TcpStream, buf: &mut Vec<u8>, length: Duration) -> Result<(), ()> {
    tokio::select! {
        () = tokio::time::sleep(length) => Ok(()),
        gone = closed(stream, buf) => gone,
    }
}

/// Ends when the other side has closed. Bytes that come meanwhile are kept.
async fn closed(stream: &mut TcpStream, buf: &mut Vec<u8>) -> Result<(), ()> {
    loop {
        match stream.read_buf(buf).await {
            Ok(0) | Err(_) => return Err(()),
            Ok(_) => {}
        }
    }
}

async fn read_request(
    state: &State,
    stream: &mut TcpStream,
    buf: &mut Vec<u8>,
    connection: u64,
    place: u64,
) -> Option<Seen> {
    let complain = |what: String| state.complaints.lock().push(what);
    let head_end = loop {
        if let Some(at) = find(buf, b"\r\n\r\n") {
            break at + 4;
        }
        if stream.read_buf(buf).await.unwrap_or(0) == 0 {
            if !buf.is_empty() {
                complain(format!("{} stray bytes at the end of a connection", buf.len()));
            }
            return None;
        }
    };
    let text = String::from_utf8_lossy(&buf[..head_end]).into_owned();
    let mut lines = text.split("\r\n");
    let mut request_line = lines.next().unwrap_or_default().split(' ');
    let method = request_line.next().unwrap_or_default().to_owned();
    let target = request_line.next().unwrap_or_default().to_owned();
    if request_line.next() != Some("HTTP/1.1") || !method.bytes().all(|b| b.is_ascii_uppercase()) {
        complain(format!("not a request line: {:?}", text.lines().next()));
        return None;
    }
    let headers: Vec<(String, String)> = lines
        .filter(|line| !line.is_empty())
        .map(|line| {
            let (name, value) = line.split_once(':').unwrap_or((line, ""));
            (name.to_ascii_lowercase(), value.trim().to_owned())
        })
        .collect();
    let lengths: Vec<_> = headers.iter().filter(|(n, _)| n == "content-length").collect();
    let chunked = headers.iter().any(|(n, _)| n == "transfer-encoding");
    if lengths.len() + usize::from(chunked) > 1 {
        complain(format!("more than one framing: {headers:?}"));
    }
    let mut body = Vec::new();
    let mut at = head_end;
    if chunked {
        loop {
            let line_end = loop {
                if let Some(end) = find(&buf[at..], b"\r\n") {
                    break at + end;
                }
                if stream.read_buf(buf).await.unwrap_or(0) == 0 {
                    return None;
                }
            };
            let size = String::from_utf8_lossy(&buf[at..line_end]).into_owned();
            let Ok(size) = usize::from_str_radix(size.split(';').next().unwrap_or_default().trim(), 16) else {
                complain(format!("not a chunk size: {size:?}"));
                return None;
            };
            at = line_end + 2;
            while buf.len() < at + size + 2 {
                if stream.read_buf(buf).await.unwrap_or(0) == 0 {
                    return None;
                }
            }
            body.extend_from_slice(&buf[at..at + size]);
            at += size + 2;
            if size == 0 {
                break;
            }
        }
    } else if let Some((_, length)) = lengths.first() {
        let Ok(length) = length.parse::<usize>() else {
            complain(format!("not a length: {length:?}"));
            return None;
        };
        while buf.len() < at + length {
            if stream.read_buf(buf).await.unwrap_or(0) == 0 {
                return None;
            }
        }
        body.extend_from_slice(&buf[at..at + length]);
        at += length;
    }
    let raw = Bytes::copy_from_slice(&buf[..at]);
    buf.drain(..at);
    Some(Seen {
        connection,
        place,
        method,
        target,
        headers,
        body: body.into(),
        raw,
        at: Instant::now(),
        sent: Vec::new(),
        left: None,
        played: None,
    })
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    memchr::memmem::find(haystack, needle)
}

fn reason(status: u16) -> &'static str {
    http::StatusCode::from_u16(status).ok().and_then(|s| s.canonical_reason()).unwrap_or("Status")
}
