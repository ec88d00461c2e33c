//! The edge: accepted connections, before Pingora sees a request.
//!
//! Pingora 0.9 has no deadline for a whole header, none for an idle connection and no count of connections. So the
//! edge counts connections, reads each HTTP/1 header itself within its limits, refuses unclear framing, and only
//! then hands header and connection to Pingora's proxy. HTTP/2 connections (TLS, or h2c where the YAML asks for it)
//! are handed on whole; Pingora's HTTP/2 limits apply there.

use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::BytesMut;
use http::Version;
use pingora::apps::{HttpPersistentSettings, HttpServerApp, ServerApp};
use pingora::protocols::http::ServerSession;
use pingora::protocols::{ALPN, Stream};
use pingora::server::ShutdownWatch;
use pingora_proxy::HttpProxy;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Duration, Instant, timeout, timeout_at};

use crate::config::Limits;
use crate::running::Running;
use crate::wire::headers::{self, Framing};
use crate::wire::{ApiError, ErrorCode};

use super::connections::Connections;
use super::shell::Shell;
use super::stream::{ConnState, EdgeStream};

/// Header fields that a request has at most, nearly always.
const FEW_FIELDS: usize = 32;

const H2_PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// How long the first request of a connection is waited for where the service goes down: connections are accepted up to
/// that moment, and a client's request comes a moment after them.
pub(super) const ABOUT_TO_ASK: Duration = Duration::from_millis(500);

/// How long, and for how many bytes, a refused client is still read, so that it sees its answer and not a reset.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES_MAX: usize = 1 << 20;

/// The accepting application of one service.
pub struct Edge {
    proxy: Arc<HttpProxy<Shell>>,
    running: Arc<Running>,
    connections: Arc<Connections>,
    h2c: bool,
}

impl Edge {
    pub fn new(proxy: HttpProxy<Shell>, running: Arc<Running>, connections: Arc<Connections>, h2c: bool) -> Self {
        Edge { proxy: Arc::new(proxy), running, connections, h2c }
    }

    async fn http1(&self, stream: Stream, peer: Option<IpAddr>, shutdown: &ShutdownWatch) {
        let state = ConnState::new();
        let _endable = self.connections.endable(&state);
        let mut stream: Stream = Box::new(EdgeStream::new(stream, state.clone()));
        let mut settings: Option<HttpPersistentSettings> = None;
        // Until its first request is answered.
        let mut newcomer = Some(self.running.newcomer());
        loop {
            let epoch = self.running.epoch();
            let limits = &epoch.config.limits;
            state.await_request();
            let header = match self.read_header(&mut stream, limits, newcomer.is_some(), shutdown).await {
                Ok(Some(header)) => header,
                Ok(None) => return,
                Err(error) => {
                    self.running.metrics.refused_at_edge(&error);
                    tracing::debug!(client = ?peer, error = %error, "refused at the edge");
                    refuse(&mut stream, &error).await;
                    return;
                }
            };
            let body_bytes = header.body_bytes;
            let mut prefix = header.bytes;
            if let Some(body) = body_bytes {
                // What was read past this request belongs to the next one.
                let whole = header.end.saturating_add(usize::try_from(body).unwrap_or(usize::MAX));
                if prefix.len() > whole {
                    let next = prefix.split_off(whole);
                    let Ok(mut edge) = stream.into_any().downcast::<EdgeStream>() else { return };
                    edge.hold(&next);
                    stream = edge;
                }
            }
            let here = (prefix.len() - header.end) as u64;
            state.begin_request(body_bytes.map(|n| n - here.min(n)));
            let mut session = ServerSession::new_http1(stream);
            match settings.take() {
                Some(settings) => settings.apply_to_session(&mut session),
                None => {
                    session.set_keepalive(Some(limits.keepalive.as_secs().max(1)));
                    session.set_keepalive_reuses_remaining(Some(limits.requests_per_connection.saturating_sub(1)));
                }
            }
            if *shutdown.borrow() || self.running.draining() {
                session.set_keepalive(None);
            }
            session.set_pipelined_prefix(prefix);
            let Some(reused) = self.proxy.process_new_http(session, shutdown).await else { return };
            newcomer = None;
            let (next_stream, next_settings) = reused.consume();
            stream = next_stream;
            settings = next_settings;
        }
    }

    /// Reads one header. `Ok(None)`: the client left, idled too long, or the service is going down.
    async fn read_header(
        &self,
        stream: &mut Stream,
        limits: &Limits,
        first: bool,
        shutdown: &ShutdownWatch,
    ) -> Result<Option<Header>, ApiError> {
        let mut bytes = BytesMut::with_capacity(2048);
        let idle = if first { limits.header_timeout } else { limits.keepalive };
        let mut shutdown = shutdown.clone();
        // Waiting for the first byte: a client may idle here, and a service that goes down need not wait for it. But one
        // that has just connected is about to ask.
        let down = async {
            let _ = shutdown.wait_for(|down| *down).await;
            if first {
                tokio::time::sleep(ABOUT_TO_ASK).await;
            }
        };
        let got = tokio::select! {
            biased;
            got = timeout(idle, stream.read_buf(&mut bytes)) => got,
            () = down => return Ok(None),
        };
        match got {
            Err(_) | Ok(Err(_)) | Ok(Ok(0)) => return Ok(None),
            Ok(Ok(_)) => {}
        }
        let deadline = Instant::now() + limits.header_timeout;
        let header_bytes = usize::try_from(limits.header_bytes).unwrap_or(usize::MAX);
        let mut scanned = 0;
        loop {
            // Empty lines before a request line are to be skipped (RFC 9112, 2.2).
            let blank = bytes.iter().take_while(|b| matches!(b, b'\r' | b'\n')).count();
            if blank > 0 {
                let _ = bytes.split_to(blank);
                scanned = 0;
            }
            if let Some(end) = header_end(&bytes, scanned) {
                if end > header_bytes {
                    return Err(too_large(header_bytes));
                }
                return Header::check(bytes, end, limits).map(Some);
            }
            if bytes.len() > header_bytes {
                return Err(too_large(header_bytes));
            }
            scanned = bytes.len().saturating_sub(3);
            match timeout_at(deadline, stream.read_buf(&mut bytes)).await {
                Err(_) => {
                    return Err(ApiError::new(
                        ErrorCode::RequestTimeout,
                        format!(
                            "The request's header did not end within limits.header_timeout ({}).",
                            humantime::format_duration(limits.header_timeout)
                        ),
                    ));
                }
                Ok(Err(_)) | Ok(Ok(0)) => return Ok(None),
                Ok(Ok(_)) => {}
            }
        }
    }
}

fn too_large(header_bytes: usize) -> ApiError {
    ApiError::new(
        ErrorCode::HeaderTooLarge,
        format!("The request's header is larger than limits.header_bytes ({header_bytes} bytes)."),
    )
}

/// The end of the header (one past its empty line), searched from `from`.
fn header_end(bytes: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    while let Some(found) = memchr::memchr(b'\n', &bytes[at..]) {
        let newline = at + found;
        match &bytes[newline + 1..] {
            [b'\n', ..] => return Some(newline + 2),
            [b'\r', b'\n', ..] => return Some(newline + 3),
            _ => at = newline + 1,
        }
    }
    None
}

/// A header read whole, with what follows it in the buffer.
#[derive(Debug)]
struct Header {
    bytes: BytesMut,
    /// One past the header's empty line.
    end: usize,
    /// `None`: chunked.
    body_bytes: Option<u64>,
}

impl Header {
    fn check(bytes: BytesMut, end: usize, limits: &Limits) -> Result<Header, ApiError> {
        // Room for as many as usual stands on the stack and is not cleared first; more are looked for in a second go.
        let mut few = [const { MaybeUninit::uninit() }; FEW_FIELDS];
        let mut many = Vec::new();
        let mut request = httparse::Request::new(&mut []);
        let room = few.len().min(limits.header_count + 1);
        let mut parsed = request.parse_with_uninit_headers(&bytes[..end], &mut few[..room]);
        if parsed == Err(httparse::Error::TooManyHeaders) && limits.header_count >= FEW_FIELDS {
            many.resize(limits.header_count + 1, httparse::EMPTY_HEADER);
            request = httparse::Request::new(&mut many);
            parsed = request.parse(&bytes[..end]);
        }
        match parsed {
            Ok(_) => {}
            Err(httparse::Error::TooManyHeaders) => {
                return Err(ApiError::new(
                    ErrorCode::HeaderTooLarge,
                    format!("The request has more header fields than limits.header_count ({}).", limits.header_count),
                ));
            }
            Err(e) => {
                return Err(ApiError::new(
                    ErrorCode::InvalidRequest,
                    format!("The request's header is not well-formed HTTP/1.1: {e}."),
                ));
            }
        }
        if request.headers.len() > limits.header_count {
            return Err(ApiError::new(
                ErrorCode::HeaderTooLarge,
                format!("The request has more header fields than limits.header_count ({}).", limits.header_count),
            ));
        }
        let pairs = request.headers.iter().map(|h| (h.name.as_bytes(), h.value));
        let version = if request.version == Some(0) { Version::HTTP_10 } else { Version::HTTP_11 };
        let body_bytes = match headers::framing(version, pairs)? {
            Framing::None => Some(0),
            Framing::Length(n) => Some(n),
            Framing::Chunked => None,
        };
        Ok(Header { bytes, end, body_bytes })
    }
}

/// Answers without Pingora and closes, reading on for a moment so that the answer is not lost to a reset.
async fn refuse(stream: &mut Stream, error: &ApiError) {
    let body = error.body();
    let status = error.status();
    let reason = http::StatusCode::from_u16(status).ok().and_then(|s| s.canonical_reason()).unwrap_or("Error");
    let head = format!(
        "HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    let _ = timeout(LINGER, async {
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(&body).await?;
        stream.flush().await?;
        AsyncWriteExt::shutdown(stream).await?;
        let mut seen = 0;
        let mut sink = [0u8; 4096];
        while seen < LINGER_BYTES_MAX {
            match stream.read(&mut sink).await? {
                0 => break,
                n => seen += n,
            }
        }
        std::io::Result::Ok(())
    })
    .await;
}

#[async_trait]
impl ServerApp for Edge {
    async fn process_new(self: &Arc<Self>, mut stream: Stream, shutdown: &ShutdownWatch) -> Option<Stream> {
        let peer =
            stream.get_socket_digest().and_then(|digest| digest.peer_addr().and_then(|a| a.as_inet().map(|a| a.ip())));
        let epoch = self.running.epoch();
        let limits = &epoch.config.limits;
        let Some(_open) = self.connections.enter(peer, limits.connections, limits.connections_per_address) else {
            self.running.metrics.connections_refused.inc();
            let error = ApiError::new(ErrorCode::NoCapacity, "Too many open connections; try again shortly.")
                .retry_after(Duration::from_secs(1));
            let mut stream: Stream = Box::new(EdgeStream::new(stream, ConnState::new()));
            refuse(&mut stream, &error).await;
            return None;
        };
        let tls = stream.get_ssl_digest().is_some();
        let mut h2 = matches!(stream.selected_alpn_proto(), Some(ALPN::H2));
        if self.h2c && !tls {
            let mut preface = [0u8; H2_PREFACE.len()];
            match timeout(limits.header_timeout, stream.try_peek(&mut preface)).await {
                Ok(Ok(true)) => h2 = preface == *H2_PREFACE,
                Ok(Ok(false)) => {}
                Ok(Err(_)) | Err(_) => return None,
            }
        }
        if h2 {
            self.proxy.process_new(stream, shutdown).await;
        } else {
            self.http1(stream, peer, shutdown).await;
        }
        None
    }

    async fn cleanup(&self) {
        self.proxy.http_cleanup().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_ends_at_its_empty_line_wherever_the_search_begins() {
        let text = b"GET / HTTP/1.1\r\nhost: a\r\n\r\nbody";
        let end = text.len() - 4;
        for from in 0..end - 3 {
            assert_eq!(header_end(text, from), Some(end), "from {from}");
        }
        assert_eq!(header_end(b"GET / HTTP/1.1\nhost: a\n\nbody", 0), Some(24));
        assert_eq!(header_end(b"GET / HTTP/1.1\r\nhost: a\r\n", 0), None);
    }

    #[test]
    fn more_fields_than_the_limit_are_refused() {
        for limit in [1, 2, FEW_FIELDS - 1, FEW_FIELDS, FEW_FIELDS + 1, 3 * FEW_FIELDS] {
            let limits = Limits { header_count: limit, ..Limits::default() };
            let check = |fields: usize| {
                let fields: String = (0..fields).map(|i| format!("a{i}: {i}\r\n")).collect();
                let text = format!("GET / HTTP/1.1\r\n{fields}\r\n");
                Header::check(BytesMut::from(text.as_str()), text.len(), &limits).map(|_| ()).map_err(|e| e.code)
            };
            assert_eq!(check(limit), Ok(()), "{limit}");
            assert_eq!(check(limit + 1), Err(ErrorCode::HeaderTooLarge), "{limit}");
        }
    }
}
