//! Reads a request's whole body and leaves Pingora able to send another in its place.
//!
//! Pingora forwards a body that was read in `request_filter` only where its own retry buffer still holds it, and that
//! buffer is a constant 64 KiB; past it the request would hang. So the body is kept here, Pingora is left with a
//! small placeholder that it can hold, and `request_body_filter` puts the real body in its place, on every attempt:
//!
//! - `content-length` known: only the last 64 KiB are let into the retry buffer;
//! - otherwise on HTTP/1, and where the body came with the header: the session is built anew over the same
//!   connection with a one-byte body ([`reseat`]);
//! - otherwise on HTTP/2: the session is wrapped in one that claims a one-byte body ([`Placeholder`]).

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header;
use pingora::protocols::http::ServerSession;
use pingora::protocols::http::v1::client::http_req_header_to_wire;
use pingora::protocols::http::v1::server::HttpSession as H1;
use pingora::{Error, ErrorType, Result};
use pingora_proxy::Session;
use tokio::time::{Instant, timeout_at};

use super::placeholder::Placeholder;

/// Pingora's `BODY_BUF_LIMIT`.
const RETRY_BUFFER_BYTES: u64 = 64 * 1024;
/// How long, and how much, an unwanted body is read after its answer, so that the client sees the answer.
const LINGER: Duration = Duration::from_secs(2);

/// Why a body was not read whole.
#[derive(Debug)]
pub enum BodyFault {
    /// Larger than the limit.
    TooLarge { limit: u64, declared: Option<u64> },
    /// Not whole in time.
    Timeout(Duration),
    /// The client left, or broke its own framing.
    Broken(Box<Error>),
}

/// What the client declared, from a `content-length` that Pingora has checked.
pub fn declared_length(session: &Session) -> Option<u64> {
    let value = session.req_header().headers.get(header::CONTENT_LENGTH)?;
    value.to_str().ok()?.trim().parse().ok()
}

/// Reads the whole body. A client that asked for `100-continue` is answered first.
pub async fn read(session: &mut Session, limit: u64, within: Duration) -> Result<Bytes, BodyFault> {
    let declared = declared_length(session);
    if declared.is_some_and(|n| n > limit) {
        return Err(BodyFault::TooLarge { limit, declared });
    }
    if session.as_downstream_mut().is_body_empty() {
        return Ok(Bytes::new());
    }
    if session.req_header().headers.contains_key(header::EXPECT) {
        session.as_downstream_mut().write_continue_response().await.map_err(BodyFault::Broken)?;
    }
    let deadline = Instant::now() + within;
    let mut first = Bytes::new();
    let mut rest: Option<BytesMut> = None;
    let mut got = 0u64;
    loop {
        if declared.is_none_or(|n| n.saturating_sub(got) <= RETRY_BUFFER_BYTES) {
            session.as_downstream_mut().enable_retry_buffering();
        }
        let chunk = match timeout_at(deadline, session.as_downstream_mut().read_request_body()).await {
            Err(_) => return Err(BodyFault::Timeout(within)),
            Ok(Err(e)) if *e.etype() == ErrorType::ReadTimedout => return Err(BodyFault::Timeout(within)),
            Ok(Err(e)) => return Err(BodyFault::Broken(e)),
            Ok(Ok(None)) => break,
            Ok(Ok(Some(chunk))) => chunk,
        };
        got += chunk.len() as u64;
        if got > limit {
            return Err(BodyFault::TooLarge { limit, declared: None });
        }
        match &mut rest {
            Some(rest) => rest.extend_from_slice(&chunk),
            None if first.is_empty() => first = chunk,
            None => {
                let whole = usize::try_from(declared.unwrap_or(0).min(limit)).unwrap_or(0);
                let mut joined = BytesMut::with_capacity(whole.max(first.len() + chunk.len()));
                joined.extend_from_slice(&first);
                joined.extend_from_slice(&chunk);
                rest = Some(joined);
            }
        }
    }
    let body = rest.map_or(first, BytesMut::freeze);
    if !body.is_empty() && session.as_downstream().get_retry_buffer().is_none() {
        leave_placeholder(session).await.map_err(BodyFault::Broken)?;
    }
    Ok(body)
}

async fn leave_placeholder(session: &mut Session) -> Result<()> {
    // A session cannot be taken out of its box without another in its place; this one is never used.
    let inert = ServerSession::new_custom(Box::new(()));
    let session_was = std::mem::replace(&mut *session.downstream_session, inert);
    *session.downstream_session = match session_was {
        ServerSession::H1(h1) => ServerSession::H1(reseat(h1).await?),
        other => ServerSession::new_custom(Box::new(Placeholder::new(other))),
    };
    Ok(())
}

/// The same connection and header, with a one-byte body still to be read.
async fn reseat(session: H1) -> Result<H1> {
    let mut header = session.req_header().clone();
    header.remove_header(&header::TRANSFER_ENCODING);
    header.insert_header(header::CONTENT_LENGTH, "1")?;
    let mut wire = http_req_header_to_wire(&header)
        .ok_or_else(|| Error::explain(ErrorType::InternalError, "a header that was parsed cannot be written"))?;
    wire.extend_from_slice(b"x");
    let keepalive = session.get_keepalive_timeout();
    let will_keepalive = session.will_keepalive();
    let reuses = session.get_keepalive_reuses_remaining();
    let read_timeout = session.get_read_timeout();
    let write_timeout = session.get_write_timeout();
    let drain_timeout = session.get_total_drain_timeout();
    let mut fresh = H1::new(session.into_inner());
    fresh.set_pipelined_prefix(wire);
    fresh.read_request().await?;
    fresh.set_server_keepalive(if will_keepalive { keepalive.or(Some(0)) } else { None });
    fresh.set_keepalive_reuses_remaining(reuses);
    fresh.set_read_timeout(read_timeout);
    fresh.set_write_timeout(write_timeout);
    fresh.set_total_drain_timeout(drain_timeout);
    Ok(fresh)
}

/// Reads on, bounded, after an answer that came before the end of the body. Returns whether the body is at its end,
/// so that the connection can be used again.
pub async fn drain(session: &mut Session) -> bool {
    let downstream = session.as_downstream_mut();
    downstream.set_total_drain_timeout(Some(LINGER));
    downstream.drain_request_body().await.is_ok()
}
