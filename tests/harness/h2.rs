//! HTTP/2 on both sides: a client that chooses its frames, and a replica that misbehaves at will.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{Reason, RecvStream, SendStream};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::ports;

/// How a request's last DATA frame ends the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    OnLastData,
    OnEmptyData,
}

/// One HTTP/2 connection.
pub struct H2Client {
    send: SendRequest<Bytes>,
    task: JoinHandle<()>,
}

impl Drop for H2Client {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// An answer over HTTP/2.
#[derive(Debug)]
pub struct H2Answer {
    pub status: u16,
    pub headers: http::HeaderMap,
    pub body: Bytes,
    /// Why the stream was reset, where it was.
    pub reset: Option<Reason>,
    pub end_at: Instant,
}

/// A request that is on its way.
pub struct H2Pending {
    pub response: ResponseFuture,
    pub body: SendStream<Bytes>,
}

impl H2Client {
    /// Without TLS, by prior knowledge.
    pub async fn connect(to: SocketAddr) -> H2Client {
        let stream = TcpStream::connect(to).await.expect("a connection");
        stream.set_nodelay(true).expect("nodelay");
        H2Client::over(stream).await
    }

    pub async fn over(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> H2Client {
        let (send, connection) = h2::client::handshake(stream).await.expect("an h2 handshake");
        let task = tokio::spawn(async move {
            let _ = connection.await;
        });
        H2Client { send, task }
    }

    /// Sends a chat request and leaves its answer to come.
    pub async fn ask(&mut self, body: &[u8], ending: Ending) -> H2Pending {
        self.ask_with(&[], body, ending).await
    }

    pub async fn ask_with(&mut self, headers: &[(&str, &str)], body: &[u8], ending: Ending) -> H2Pending {
        let mut request =
            http::Request::post("http://lb.test/v1/chat/completions").header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(()).expect("a request");
        let mut send = self.send.clone().ready().await.expect("the connection is open");
        let (response, mut stream) = send.send_request(request, false).expect("a stream");
        let mut rest = Bytes::copy_from_slice(body);
        while !rest.is_empty() {
            stream.reserve_capacity(rest.len().min(16_000));
            let room = std::future::poll_fn(|cx| stream.poll_capacity(cx)).await.expect("room").expect("room");
            let frame = rest.split_to(room.min(rest.len()));
            let last = rest.is_empty() && ending == Ending::OnLastData;
            stream.send_data(frame, last).expect("a DATA frame");
        }
        if body.is_empty() || ending == Ending::OnEmptyData {
            stream.send_data(Bytes::new(), true).expect("an empty DATA frame");
        }
        H2Pending { response, body: stream }
    }

    pub async fn chat(&mut self, body: &[u8], ending: Ending) -> H2Answer {
        self.ask(body, ending).await.answer().await
    }
}

impl H2Pending {
    /// Reads the whole answer.
    pub async fn answer(self) -> H2Answer {
        let _body = self.body;
        let response = match tokio::time::timeout(Duration::from_secs(20), self.response).await.expect("an answer") {
            Ok(response) => response,
            Err(error) => {
                return H2Answer {
                    status: 0,
                    headers: http::HeaderMap::new(),
                    body: Bytes::new(),
                    reset: error.reason(),
                    end_at: Instant::now(),
                };
            }
        };
        let (head, mut stream) = response.into_parts();
        let (body, reset) = read_all(&mut stream).await;
        H2Answer { status: head.status.as_u16(), headers: head.headers, body, reset, end_at: Instant::now() }
    }

    /// Takes the request back.
    pub fn cancel(mut self) {
        self.body.send_reset(Reason::CANCEL);
    }
}

async fn read_all(stream: &mut RecvStream) -> (Bytes, Option<Reason>) {
    let mut body = Vec::new();
    while let Some(data) = stream.data().await {
        match data {
            Ok(data) => {
                let _ = stream.flow_control().release_capacity(data.len());
                body.extend_from_slice(&data);
            }
            Err(error) => return (body.into(), Some(error.reason().unwrap_or(Reason::INTERNAL_ERROR))),
        }
    }
    (body.into(), None)
}

/// How an HTTP/2 replica treats a request that it has read to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// Answers with a whole chat completion.
    Answer,
    /// Answers with a stream of two events and usage.
    Stream,
    /// Sends GOAWAY with PROTOCOL_ERROR in place of an answer.
    GoAway,
    /// Resets the stream in place of an answer.
    Reset(Reason),
    /// Says nothing.
    Hang,
}

/// A replica that speaks HTTP/2 without TLS (and HTTP/1.1 for nothing but probes, by its preface).
pub struct H2Upstream {
    pub address: SocketAddr,
    pub manner: Arc<Mutex<Manner>>,
    requests: Arc<AtomicUsize>,
    bodies: Arc<Mutex<Vec<Bytes>>>,
    resets: Arc<Mutex<Vec<(Instant, Reason)>>>,
    task: JoinHandle<()>,
}

impl Drop for H2Upstream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl H2Upstream {
    pub async fn start(manner: Manner) -> H2Upstream {
        let address = ports::free();
        let listener = TcpListener::bind(address).await.expect("a listener");
        let manner = Arc::new(Mutex::new(manner));
        let requests = Arc::new(AtomicUsize::new(0));
        let bodies = Arc::new(Mutex::new(Vec::new()));
        let resets = Arc::new(Mutex::new(Vec::new()));
        let shared = (Arc::clone(&manner), Arc::clone(&requests), Arc::clone(&bodies), Arc::clone(&resets));
        let task = tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { continue };
                let (manner, requests, bodies, resets) = shared.clone();
                tokio::spawn(serve(stream, manner, requests, bodies, resets));
            }
        });
        H2Upstream { address, manner, requests, bodies, resets, task }
    }

    pub fn url(&self) -> String {
        format!("h2c://{}", self.address)
    }

    /// Inference requests whose body was read to its end.
    pub fn count(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }

    pub fn bodies(&self) -> Vec<Bytes> {
        self.bodies.lock().clone()
    }

    /// Streams that the balancer reset, with the reason.
    pub fn resets(&self) -> Vec<(Instant, Reason)> {
        self.resets.lock().clone()
    }
}

async fn serve(
    stream: TcpStream,
    manner: Arc<Mutex<Manner>>,
    requests: Arc<AtomicUsize>,
    bodies: Arc<Mutex<Vec<Bytes>>>,
    resets: Arc<Mutex<Vec<(Instant, Reason)>>>,
) {
    let mut head = [0u8; 4];
    if stream.peek(&mut head).await.is_ok() && &head == b"GET " {
        return serve_probes(stream).await;
    }
    let Ok(mut connection) = h2::server::handshake(stream).await else { return };
    let (away, mut go_away) = tokio::sync::mpsc::channel::<()>(1);
    loop {
        let accepted = tokio::select! {
            accepted = connection.accept() => accepted,
            _ = go_away.recv() => {
                connection.abrupt_shutdown(Reason::PROTOCOL_ERROR);
                let _ = std::future::poll_fn(|cx| connection.poll_closed(cx)).await;
                return;
            }
        };
        let Some(Ok((request, mut respond))) = accepted else { return };
        let manner = *manner.lock();
        let (requests, bodies, resets, away) =
            (Arc::clone(&requests), Arc::clone(&bodies), Arc::clone(&resets), away.clone());
        tokio::spawn(async move {
            let probe = request.method() == http::Method::GET;
            let path = request.uri().path().to_owned();
            let (body, _) = read_all(&mut request.into_body()).await;
            if probe {
                let text = if path.ends_with("/v1/models") {
                    Bytes::from_static(br#"{"object":"list","data":[{"id":"m1","object":"model"}]}"#)
                } else {
                    Bytes::new()
                };
                let status = if path.ends_with("/health") || path.ends_with("/v1/models") { 200 } else { 404 };
                reply(&mut respond, status, "application/json", &[text]);
                return;
            }
            requests.fetch_add(1, Ordering::SeqCst);
            bodies.lock().push(body);
            match manner {
                Manner::Answer => {
                    reply(&mut respond, 200, "application/json", &[super::reply::Reply::chat(3, 2).body()])
                }
                Manner::Stream => reply(
                    &mut respond,
                    200,
                    "text/event-stream",
                    &[
                        super::reply::content_chunk("a"),
                        super::reply::content_chunk("b"),
                        super::reply::usage_chunk(3, 2),
                        Bytes::from_static(super::reply::DONE),
                    ],
                ),
                Manner::GoAway => {
                    let _ = away.send(()).await;
                }
                Manner::Reset(reason) => respond.send_reset(reason),
                Manner::Hang => {
                    if let Ok(reason) = std::future::poll_fn(|cx| respond.poll_reset(cx)).await {
                        resets.lock().push((Instant::now(), reason));
                    } else {
                        resets.lock().push((Instant::now(), Reason::NO_ERROR));
                    }
                }
            }
        });
    }
}

fn reply(respond: &mut h2::server::SendResponse<Bytes>, status: u16, content_type: &str, parts: &[Bytes]) {
    let head = http::Response::builder().status(status).header("content-type", content_type).body(()).expect("a head");
    let Ok(mut stream) = respond.send_response(head, false) else { return };
    for part in parts {
        let _ = stream.send_data(part.clone(), false);
    }
    let _ = stream.send_data(Bytes::new(), true);
}

/// Probes may come over HTTP/1.1.
async fn serve_probes(mut stream: TcpStream) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut buf = vec![0u8; 4096];
    while matches!(stream.read(&mut buf).await, Ok(n) if n > 0) {
        let body = r#"{"object":"list","data":[{"id":"m1","object":"model"}]}"#;
        let answer = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        if stream.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}
