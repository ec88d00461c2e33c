//! The clients: as cheap as can be, since they share the machine with what is measured.

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use memchr::memmem;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::LocalSet;

use crate::process::Proxy;
use crate::upstream::content_length;

/// Bytes of a request's body.
const BODY_BYTES: usize = 1024;

/// Connections that send one request after another for a while.
#[derive(Clone, Debug)]
pub struct Requests {
    pub address: SocketAddr,
    pub connections: usize,
    /// Requests a second over all connections; `None`: each as soon as the last is answered.
    pub rate: Option<f64>,
    pub span: Duration,
}

/// Streams that run beside each other for a while.
#[derive(Clone, Debug)]
pub struct Streams {
    pub address: SocketAddr,
    pub streams: usize,
    pub span: Duration,
}

/// Waits until a chat request is answered.
pub async fn wait_for_answer(address: SocketAddr) -> Result<()> {
    let give_up = Instant::now() + Duration::from_secs(30);
    let mut last = None;
    while Instant::now() < give_up {
        match ask_once(address).await {
            Ok(()) => return Ok(()),
            Err(error) => last = Some(error),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Err(last.context("no attempt")?.context(format!("{address} answered no request within 30 s")))
}

async fn ask_once(address: SocketAddr) -> Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(&request(&mut SmallRng::seed_from_u64(0), false)).await?;
    read_answer(&mut stream, &mut Vec::new()).await
}

/// Microseconds of the proxy's CPU per request.
pub async fn cpu_per_request(load: &Requests, proxy: &Proxy) -> Result<f64> {
    let done = Rc::new(Cell::new(0_u64));
    let until = Instant::now() + load.span;
    let before = proxy.cpu()?;
    let clients = LocalSet::new();
    let mut handles = Vec::new();
    for seed in 0..load.connections {
        let (address, done) = (load.address, Rc::clone(&done));
        let pause = load.rate.map(|rate| Duration::from_secs_f64(load.connections as f64 / rate));
        // Staggered, so that a connection's turn comes between those of others.
        let mut turn = Instant::now() + pause.unwrap_or_default().mul_f64(seed as f64 / load.connections as f64);
        handles.push(clients.spawn_local(async move {
            // Another seed each round, so that no round finds its prompts counted already.
            let mut rng = SmallRng::seed_from_u64(rand::random::<u64>() ^ seed as u64);
            let mut stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let mut pending = Vec::with_capacity(4 << 10);
            while Instant::now() < until {
                if let Some(pause) = pause {
                    tokio::time::sleep_until(turn.into()).await;
                    turn += pause;
                }
                stream.write_all(&request(&mut rng, false)).await?;
                read_answer(&mut stream, &mut pending).await?;
                done.set(done.get() + 1);
            }
            anyhow::Ok(())
        }));
    }
    clients.await;
    for handle in handles {
        handle.await??;
    }
    Ok((proxy.cpu()? - before).as_secs_f64() * 1e6 / done.get() as f64)
}

/// Microseconds of the proxy's CPU per event, once all streams are running.
pub async fn cpu_per_event(load: &Streams, proxy: &Proxy) -> Result<f64> {
    let events = Rc::new(Cell::new(0_u64));
    let started = Rc::new(Cell::new(0_usize));
    let clients = LocalSet::new();
    let mut handles = Vec::new();
    for seed in 0..load.streams {
        let (address, streams) = (load.address, load.streams);
        let (events, started) = (Rc::clone(&events), Rc::clone(&started));
        handles.push(clients.spawn_local(async move {
            // Staggered over a second, so that events do not come in volleys.
            tokio::time::sleep(Duration::from_secs_f64(seed as f64 / streams as f64)).await;
            let mut rng = SmallRng::seed_from_u64(rand::random::<u64>() ^ seed as u64);
            let mut stream = TcpStream::connect(address).await?;
            stream.write_all(&request(&mut rng, true)).await?;
            let mut buffer = vec![0; 16 << 10];
            let mut first = true;
            loop {
                let count = stream.read(&mut buffer).await?;
                if count == 0 {
                    bail!("a stream ended before its client left");
                }
                let seen = memmem::find_iter(&buffer[..count], b"\n\n").count() as u64;
                if first && seen > 0 {
                    first = false;
                    started.set(started.get() + 1);
                }
                events.set(events.get() + seen);
            }
            #[expect(unreachable_code, reason = "names the task's type")]
            anyhow::Ok(())
        }));
    }
    let measured = async {
        let give_up = Instant::now() + Duration::from_secs(30);
        while started.get() < load.streams {
            if Instant::now() > give_up {
                bail!("{} of {} streams started within 30 s", started.get(), load.streams);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let (cpu, count) = (proxy.cpu()?, events.get());
        tokio::time::sleep(load.span).await;
        Ok((proxy.cpu()? - cpu).as_secs_f64() * 1e6 / (events.get() - count) as f64)
    };
    let result = clients.run_until(measured).await;
    for handle in handles {
        handle.abort();
        match clients.run_until(handle).await {
            Err(aborted) if aborted.is_cancelled() => {}
            Err(panicked) => return Err(panicked.into()),
            Ok(ended) => ended?,
        }
    }
    // The proxies notice that the streams are gone before the next round begins.
    tokio::time::sleep(Duration::from_millis(300)).await;
    result
}

/// Words of prose; with a name of its own in every twentieth, no two texts are the same.
const WORDS: &str = "the lorry rolled onto a weighbridge little after six in the morning its tarpaulin still wet from \
crossing nobody in the office looked up they had seen a hundred like it and the kettle was about to boil what makes a \
queue fair some would say that whoever came first should be served computers that many people share at once have \
borrowed both ideas keep several give each its share let none wait for ever heavy rain is expected across northern \
valleys tonight with gusts near the ridge travellers should allow extra time ferries between the islands may be \
cancelled at short notice quarterly revenue grew driven mainly by subscription renewals while segment operating margin \
declined slightly because of restructuring charges";

/// A 1 KB chat request, header and body, whose text no other request shares.
fn request(rng: &mut SmallRng, stream: bool) -> Vec<u8> {
    let words: Vec<&str> = WORDS.split_whitespace().collect();
    let head = format!(
        r#"{{"model":"bench","stream":{stream},"max_tokens":256,"messages":[{{"role":"system","content":"You are a helpful assistant."}},{{"role":"user","content":""#
    );
    let tail = r#""}]}"#;
    let mut body = String::with_capacity(BODY_BYTES + 16);
    body.push_str(&head);
    while body.len() + tail.len() < BODY_BYTES - 20 {
        let word = words[rng.random_range(0..words.len())];
        body.push_str(word);
        if rng.random_ratio(1, 20) {
            body.push_str(&format!("_{:x}", rng.random::<u16>()));
        }
        body.push_str(if rng.random_ratio(1, 10) { ", " } else { " " });
    }
    while body.len() + tail.len() < BODY_BYTES {
        body.push('.');
    }
    body.push_str(tail);
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nuser-agent: passthrough\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// Reads one answer to its end, leaving what follows in `pending`.
async fn read_answer(stream: &mut TcpStream, pending: &mut Vec<u8>) -> Result<()> {
    loop {
        if let Some(end) = memmem::find(pending, b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&pending[..end]).into_owned();
            if !head.starts_with("HTTP/1.1 200") {
                bail!("answered {:?}", String::from_utf8_lossy(pending));
            }
            let body = end + 4;
            let total = if head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
                memmem::find(&pending[body..], b"\r\n0\r\n\r\n").map(|at| body + at + 7)
            } else {
                Some(body + content_length(&head))
            };
            if let Some(total) = total.filter(|total| pending.len() >= *total) {
                pending.drain(..total);
                return Ok(());
            }
        }
        if stream.read_buf(pending).await? == 0 {
            bail!("closed in the middle of an answer");
        }
    }
}
