//! A raw HTTP/1.1 client: it sends exact bytes, times what arrives, and tells how a connection ended.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// No answer of a test takes longer than this.
const PATIENCE: Duration = Duration::from_secs(60);

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// As its framing says it should.
    Clean,
    /// The connection was closed before that.
    Truncated,
    /// The connection was reset before that.
    Reset,
}

/// An answer's head.
#[derive(Clone, Debug)]
pub struct Head {
    pub status: u16,
    /// In order, names in lower case.
    pub headers: Vec<(String, String)>,
    pub at: Instant,
    /// Statuses of 1xx answers that came before.
    pub interim: Vec<u16>,
}

impl Head {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }
}

/// A piece of a body as it came.
#[derive(Clone, Debug)]
pub enum Piece {
    Data(Bytes, Instant),
    End(End, Instant),
}

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub interim: Vec<u16>,
    pub body: Bytes,
    pub end: End,
    pub head_at: Instant,
    pub pieces: Vec<(Bytes, Instant)>,
    pub end_at: Instant,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("no JSON ({e}): {}", self.text()))
    }

    /// The balancer's own count of this request's prompt.
    pub fn prompt_tokens(&self) -> u64 {
        self.header("x-weighbridge-prompt-tokens")
            .unwrap_or_else(|| panic!("no prompt count in {} {:?}: {}", self.status, self.headers, self.text()))
            .parse()
            .expect("a number")
    }

    /// Which replica answered.
    pub fn replica(&self) -> &str {
        self.header("x-weighbridge-replica").unwrap_or_else(|| panic!("no replica in {:?}", self.headers))
    }

    /// Checks that this is the contract's error: status, shape, code, a message.
    #[track_caller]
    pub fn is_error(&self, status: u16, code: &str) -> &Answer {
        assert_eq!(self.status, status, "{code} was awaited: {}", self.text());
        let body = self.json();
        assert_eq!(body["error"]["code"], code, "{body}");
        assert!(body["error"]["message"].as_str().is_some_and(|m| m.len() > 10), "a message says what to do: {body}");
        assert!(body["error"]["type"].is_string(), "{body}");
        assert!(body["error"].as_object().is_some_and(|e| e.contains_key("param")), "{body}");
        assert!(self.header("content-type").is_some_and(|c| c.starts_with("application/json")));
        if status == 429 || status == 503 {
            let seconds: u64 = self.header("retry-after").expect("Retry-After").parse().expect("whole seconds");
            let millis: u64 = self.header("retry-after-ms").expect("retry-after-ms").parse().expect("milliseconds");
            assert!(seconds >= 1 && millis >= 1 && millis <= seconds * 1000, "{seconds} s, {millis} ms");
        }
        self
    }
}

#[derive(Debug)]
enum Body {
    Chunked { left: usize, in_chunk: bool },
    Length(usize),
    UntilClose,
    Nothing,
}

enum Fill {
    Some,
    Eof,
    Reset,
}

/// One connection to the balancer.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    buf: Vec<u8>,
    last: Instant,
    body: Body,
}

impl Client {
    pub async fn connect(to: SocketAddr) -> Client {
        Client::try_connect(to).await.unwrap_or_else(|e| panic!("connecting to {to}: {e}"))
    }

    pub async fn try_connect(to: SocketAddr) -> std::io::Result<Client> {
        let stream = TcpStream::connect(to).await?;
        stream.set_nodelay(true)?;
        Ok(Client { stream, buf: Vec::new(), last: Instant::now(), body: Body::Nothing })
    }

    pub async fn send(&mut self, bytes: &[u8]) {
        self.try_send(bytes).await.unwrap_or_else(|e| panic!("sending: {e}"));
    }

    pub async fn try_send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes).await
    }

    /// Sends a POST with its length.
    pub async fn post(&mut self, path: &str, body: &[u8]) {
        self.post_with(path, &[], body).await;
    }

    pub async fn post_with(&mut self, path: &str, headers: &[(&str, &str)], body: &[u8]) {
        self.send(&request("POST", path, headers, Some(body))).await;
    }

    /// Reads the next answer's head, 1xx answers apart.
    pub async fn head(&mut self) -> Head {
        self.try_head().await.unwrap_or_else(|end| panic!("no answer: {end:?}, {} bytes", self.buf.len()))
    }

    pub async fn try_head(&mut self) -> Result<Head, End> {
        let mut interim = Vec::new();
        loop {
            let end = loop {
                if let Some(at) = memchr::memmem::find(&self.buf, b"\r\n\r\n") {
                    break at + 4;
                }
                match self.fill().await {
                    Fill::Some => {}
                    Fill::Eof => return Err(End::Truncated),
                    Fill::Reset => return Err(End::Reset),
                }
            };
            let text = String::from_utf8_lossy(&self.buf[..end]).into_owned();
            self.buf.drain(..end);
            let mut lines = text.split("\r\n");
            let status_line = lines.next().unwrap_or_default();
            let status: u16 = status_line
                .strip_prefix("HTTP/1.1 ")
                .or_else(|| status_line.strip_prefix("HTTP/1.0 "))
                .and_then(|rest| rest.get(..3))
                .and_then(|code| code.parse().ok())
                .unwrap_or_else(|| panic!("no status line: {status_line:?}"));
            let headers: Vec<(String, String)> = lines
                .filter_map(|line| line.split_once(':'))
                .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
                .collect();
            if (100..200).contains(&status) && status != 101 {
                interim.push(status);
                continue;
            }
            let get = |name: &str| headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str());
            self.body = if status == 204 || status == 304 {
                Body::Nothing
            } else if get("transfer-encoding").is_some_and(|v| v.eq_ignore_ascii_case("chunked")) {
                assert!(get("content-length").is_none(), "two framings in an answer: {headers:?}");
                Body::Chunked { left: 0, in_chunk: false }
            } else if let Some(length) = get("content-length") {
                Body::Length(length.parse().expect("a length"))
            } else {
                Body::UntilClose
            };
            return Ok(Head { status, headers, at: self.last, interim });
        }
    }

    /// The next piece of the body.
    pub async fn piece(&mut self) -> Piece {
        loop {
            if let Some(piece) = self.take_piece() {
                return piece;
            }
            let end = match self.fill().await {
                Fill::Some => continue,
                Fill::Eof if matches!(self.body, Body::UntilClose) => End::Clean,
                Fill::Eof => End::Truncated,
                Fill::Reset => End::Reset,
            };
            return Piece::End(end, self.last);
        }
    }

    /// The next piece, which must be data.
    pub async fn data(&mut self) -> Bytes {
        match self.piece().await {
            Piece::Data(data, _) => data,
            Piece::End(end, _) => panic!("the body ended: {end:?}"),
        }
    }

    fn take_piece(&mut self) -> Option<Piece> {
        match &mut self.body {
            Body::Nothing => Some(Piece::End(End::Clean, self.last)),
            Body::Length(0) => Some(Piece::End(End::Clean, self.last)),
            Body::Length(left) => {
                let n = self.buf.len().min(*left);
                (n > 0).then(|| {
                    *left -= n;
                    Piece::Data(self.buf.drain(..n).collect::<Vec<_>>().into(), self.last)
                })
            }
            Body::UntilClose => {
                (!self.buf.is_empty()).then(|| Piece::Data(std::mem::take(&mut self.buf).into(), self.last))
            }
            Body::Chunked { left, in_chunk } => {
                if !*in_chunk {
                    let end = memchr::memmem::find(&self.buf, b"\r\n")?;
                    let size = std::str::from_utf8(&self.buf[..end]).expect("a chunk size");
                    let size = usize::from_str_radix(size.trim(), 16)
                        .unwrap_or_else(|e| panic!("not a chunk size ({e}): {size:?}"));
                    if size == 0 {
                        if self.buf.len() < end + 4 {
                            return None;
                        }
                        self.buf.drain(..end + 4);
                        self.body = Body::Nothing;
                        return Some(Piece::End(End::Clean, self.last));
                    }
                    self.buf.drain(..end + 2);
                    *left = size;
                    *in_chunk = true;
                }
                if *left > 0 {
                    let n = self.buf.len().min(*left);
                    if n == 0 {
                        return None;
                    }
                    *left -= n;
                    let data: Vec<u8> = self.buf.drain(..n).collect();
                    self.close_chunk();
                    return Some(Piece::Data(data.into(), self.last));
                }
                if self.close_chunk() { self.take_piece() } else { None }
            }
        }
    }

    /// Takes the line end after a chunk's data where it is there.
    fn close_chunk(&mut self) -> bool {
        let Body::Chunked { left: 0, in_chunk } = &mut self.body else { return false };
        if *in_chunk && self.buf.len() >= 2 {
            assert_eq!(&self.buf[..2], b"\r\n", "a chunk ends with a line end");
            self.buf.drain(..2);
            *in_chunk = false;
        }
        !*in_chunk
    }

    /// Reads a whole answer.
    pub async fn answer(&mut self) -> Answer {
        let head = self.head().await;
        self.rest(head).await
    }

    pub async fn try_answer(&mut self) -> Result<Answer, End> {
        let head = self.try_head().await?;
        Ok(self.rest(head).await)
    }

    /// Reads the rest of an answer whose head was read.
    pub async fn rest(&mut self, head: Head) -> Answer {
        let mut pieces = Vec::new();
        let mut body = Vec::new();
        loop {
            match self.piece().await {
                Piece::Data(data, at) => {
                    body.extend_from_slice(&data);
                    pieces.push((data, at));
                }
                Piece::End(end, end_at) => {
                    return Answer {
                        status: head.status,
                        headers: head.headers,
                        interim: head.interim,
                        body: body.into(),
                        end,
                        head_at: head.at,
                        pieces,
                        end_at,
                    };
                }
            }
        }
    }

    /// Whether the other side closes within `limit`, sending nothing more.
    pub async fn closes_within(&mut self, limit: Duration) -> bool {
        let before = self.buf.len();
        matches!(tokio::time::timeout(limit, self.fill()).await, Ok(Fill::Eof | Fill::Reset))
            && self.buf.len() == before
    }

    /// Whether nothing at all arrives for this long.
    pub async fn is_silent_for(&mut self, limit: Duration) -> bool {
        self.buf.is_empty() && tokio::time::timeout(limit, self.fill()).await.is_err()
    }

    /// Reads exactly these many raw bytes.
    pub async fn read_exact(&mut self, into: &mut [u8]) {
        while self.buf.len() < into.len() {
            match self.fill().await {
                Fill::Some => {}
                Fill::Eof | Fill::Reset => panic!("closed after {} bytes", self.buf.len()),
            }
        }
        let bytes: Vec<u8> = self.buf.drain(..into.len()).collect();
        into.copy_from_slice(&bytes);
    }

    /// Goes away with a reset.
    pub fn reset(self) {
        let _ = socket2::SockRef::from(&self.stream).set_linger(Some(Duration::ZERO));
    }

    pub fn local_addr(&self) -> SocketAddr {
        self.stream.local_addr().expect("an address")
    }

    /// A small receive buffer, for a reader that does not read.
    pub fn narrow(&self) {
        let _ = socket2::SockRef::from(&self.stream).set_recv_buffer_size(4096);
    }

    async fn fill(&mut self) -> Fill {
        let read = tokio::time::timeout(PATIENCE, self.stream.read_buf(&mut self.buf)).await;
        self.last = Instant::now();
        match read {
            Ok(Ok(0)) => Fill::Eof,
            Ok(Ok(_)) => Fill::Some,
            Ok(Err(_)) => Fill::Reset,
            Err(_) => panic!("nothing arrived for {PATIENCE:?}"),
        }
    }
}

/// The bytes of a request with a length.
pub fn request(method: &str, path: &str, headers: &[(&str, &str)], body: Option<&[u8]>) -> Vec<u8> {
    let mut out = format!("{method} {path} HTTP/1.1\r\n");
    if !headers.iter().any(|(n, _)| n.eq_ignore_ascii_case("host")) {
        out.push_str("host: lb.test\r\n");
    }
    if body.is_some() && !headers.iter().any(|(n, _)| n.eq_ignore_ascii_case("content-type")) {
        out.push_str("content-type: application/json\r\n");
    }
    for (name, value) in headers {
        out.push_str(&format!("{name}: {value}\r\n"));
    }
    if let Some(body) = body {
        out.push_str(&format!("content-length: {}\r\n", body.len()));
    }
    out.push_str("\r\n");
    let mut out = out.into_bytes();
    out.extend_from_slice(body.unwrap_or_default());
    out
}

/// One POST on a connection of its own.
pub async fn post(to: SocketAddr, path: &str, body: &[u8]) -> Answer {
    let mut client = Client::connect(to).await;
    client.post(path, body).await;
    client.answer().await
}

/// One POST with headers on a connection of its own.
pub async fn post_with(to: SocketAddr, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
    let mut client = Client::connect(to).await;
    client.post_with(path, headers, body).await;
    client.answer().await
}

/// One GET on a connection of its own.
pub async fn get(to: SocketAddr, path: &str) -> Answer {
    let host = to.to_string();
    let mut client = Client::connect(to).await;
    client.send(&request("GET", path, &[("host", &host), ("connection", "close")], None)).await;
    client.answer().await
}
