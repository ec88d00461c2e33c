//! The clients, all on one thread: they share the machine with what is measured.

use std::cell::{Cell, RefCell};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use memchr::memmem;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

/// Bytes of a request's body.
const BODY_BYTES: usize = 1024;
const READ_BUFFER: usize = 16 << 10;

/// Streams that are open, or are being opened. They end when this is dropped.
#[derive(Debug)]
pub struct Clients {
    watches: Vec<Rc<Watch>>,
    tasks: Vec<JoinHandle<()>>,
}

/// What one stream has seen.
#[derive(Debug)]
struct Watch {
    begun: Cell<bool>,
    events: Cell<u64>,
    last: Cell<Instant>,
    longest_gap: Cell<Duration>,
    error: RefCell<Option<String>>,
}

impl Drop for Clients {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Clients {
    /// Begins to open streams at an even pace. Call it inside a `LocalSet`.
    pub fn open(address: SocketAddr, streams: usize, per_second: f64) -> Clients {
        let buffer = Rc::new(RefCell::new(vec![0; READ_BUFFER]));
        let now = Instant::now();
        let watches: Vec<Rc<Watch>> = (0..streams)
            .map(|_| {
                Rc::new(Watch {
                    begun: Cell::new(false),
                    events: Cell::new(0),
                    last: Cell::new(now),
                    longest_gap: Cell::new(Duration::ZERO),
                    error: RefCell::new(None),
                })
            })
            .collect();
        let tasks = watches
            .iter()
            .enumerate()
            .map(|(n, watch)| {
                let (watch, buffer) = (Rc::clone(watch), Rc::clone(&buffer));
                tokio::task::spawn_local(async move {
                    tokio::time::sleep(Duration::from_secs_f64(n as f64 / per_second)).await;
                    let Err(error) = stream(address, n, &buffer, &watch).await;
                    *watch.error.borrow_mut() = Some(format!("{error:#}"));
                })
            })
            .collect();
        Clients { watches, tasks }
    }

    /// Streams that have got an event.
    pub fn begun(&self) -> usize {
        self.watches.iter().filter(|watch| watch.begun.get()).count()
    }

    /// Streams that have ended before their first event.
    pub fn failed(&self) -> usize {
        self.watches.iter().filter(|watch| !watch.begun.get() && watch.error.borrow().is_some()).count()
    }

    /// Events of all streams so far.
    pub fn events(&self) -> u64 {
        self.watches.iter().map(|watch| watch.events.get()).sum()
    }

    /// Gaps count from now on.
    pub fn start_watching(&self) {
        let now = Instant::now();
        for watch in &self.watches {
            watch.longest_gap.set(Duration::ZERO);
            watch.last.set(now);
        }
    }

    /// The longest time between two events of any stream.
    pub fn longest_gap(&self) -> Duration {
        self.watches.iter().map(|watch| watch.longest_gap.get()).max().unwrap_or_default()
    }

    /// One line for each stream that is not well.
    pub fn errors(&self, silent_after: Duration) -> Vec<String> {
        let wrong = |watch: &Rc<Watch>| match &*watch.error.borrow() {
            Some(error) => Some(error.clone()),
            None if !watch.begun.get() => Some("never began".to_owned()),
            None if watch.last.get().elapsed() > silent_after => Some("fell silent".to_owned()),
            None => None,
        };
        self.watches.iter().filter_map(wrong).collect()
    }
}

/// Opens one stream and reads it for ever.
async fn stream(
    address: SocketAddr,
    number: usize,
    buffer: &RefCell<Vec<u8>>,
    watch: &Watch,
) -> Result<std::convert::Infallible> {
    let mut stream = TcpStream::connect(address).await.context("connecting")?;
    stream.write_all(&request(number)).await.context("asking")?;
    let mut headed = false;
    loop {
        stream.readable().await?;
        let mut buffer = buffer.borrow_mut();
        let count = match stream.try_read(&mut buffer) {
            Ok(0) => bail!("ended"),
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error).context("reading"),
        };
        let bytes = &buffer[..count];
        if !headed {
            ensure!(bytes.starts_with(b"HTTP/1.1 200"), "answered {}", String::from_utf8_lossy(bytes));
            headed = true;
        }
        let events = memmem::find_iter(bytes, b"\n\n").count() as u64;
        if events > 0 {
            let now = Instant::now();
            watch.longest_gap.set(watch.longest_gap.get().max(now - watch.last.get()));
            watch.last.set(now);
            watch.begun.set(true);
            watch.events.set(watch.events.get() + events);
        }
    }
}

/// Opens streams until one brings an event.
pub async fn wait_for_event(address: SocketAddr) -> Result<()> {
    let give_up = Instant::now() + Duration::from_secs(30);
    let mut last = Vec::new();
    loop {
        let clients = Clients::open(address, 1, 1.0);
        while clients.begun() + clients.failed() == 0 && Instant::now() < give_up {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        if clients.begun() > 0 {
            return Ok(());
        }
        if Instant::now() >= give_up {
            bail!("{address} sent no event within 30 s: {last:?}");
        }
        last = clients.errors(Duration::MAX);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// A 1 KB chat request whose text no other stream shares.
fn request(number: usize) -> Vec<u8> {
    let head = format!(
        r#"{{"model":"bench","stream":true,"max_tokens":256,"messages":[{{"role":"user","content":"Stream {number}. "#
    );
    let tail = r#""}]}"#;
    let mut body = head;
    let mut at = number;
    while body.len() + tail.len() < BODY_BYTES {
        const WORDS: [&str; 7] = ["balance ", "token ", "replica ", "weight ", "queue ", "answer ", "step "];
        body.push_str(WORDS[at % WORDS.len()]);
        at = at.wrapping_mul(31).wrapping_add(7);
    }
    body.push_str(tail);
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// One read of the admin API.
pub async fn get_json(address: SocketAddr, path: &str) -> Result<Value> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    let body = memmem::find(&answer, b"\r\n\r\n").context("an answer without a header's end")? + 4;
    serde_json::from_slice(&answer[body..]).with_context(|| format!("{path} of the admin API"))
}
