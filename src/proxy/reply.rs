//! Answers that the balancer gives itself.

use bytes::Bytes;
use http::header::{self, HeaderName, HeaderValue};
use pingora::Result;
use pingora::http::ResponseHeader;
use pingora_proxy::Session;

use crate::wire::endpoint::{Route, route};
use crate::wire::{ApiError, ErrorCode};

use super::body;
use super::context::Ctx;

/// `x-request-id`.
pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const RETRY_AFTER_MS: &str = "retry-after-ms";

/// A body this small that is still unread is read before an error goes out, so that the connection can be kept.
const DRAIN_FIRST_BYTES: u64 = 64 * 1024;

/// Answers with JSON.
pub async fn json(session: &mut Session, ctx: &mut Ctx, status: u16, body: Bytes) -> Result<()> {
    let header = head(ctx, status, body.len())?;
    send(session, ctx, header, body).await
}

fn head(ctx: &Ctx, status: u16, length: usize) -> Result<ResponseHeader> {
    let mut header = ResponseHeader::build(status, Some(6))?;
    header.insert_header(header::CONTENT_TYPE, "application/json")?;
    header.insert_header(header::CONTENT_LENGTH, length)?;
    if let Ok(id) = HeaderValue::from_str(&ctx.request_id)
        && !id.is_empty()
    {
        header.insert_header(X_REQUEST_ID, id)?;
    }
    Ok(header)
}

async fn send(session: &mut Session, ctx: &mut Ctx, header: ResponseHeader, body: Bytes) -> Result<()> {
    ctx.status = header.status.as_u16();
    let bodyless = session.req_header().method == http::Method::HEAD;
    session.write_response_header(Box::new(header), bodyless).await?;
    if !bodyless {
        session.write_response_body(Some(body), true).await?;
    }
    Ok(())
}

/// Answers with an error of the contract. An unread body is read on for a bounded while: before the answer where it is
/// small (the connection stays usable), after it otherwise (the client sees the answer and not a reset).
pub async fn error(session: &mut Session, ctx: &mut Ctx, error: &ApiError) -> Result<()> {
    let unread = !session.as_downstream_mut().is_body_done();
    let waits_for_continue = session.req_header().headers.contains_key(header::EXPECT);
    let small = body::declared_length(session).is_some_and(|n| n <= DRAIN_FIRST_BYTES);
    let stalled = error.code == ErrorCode::RequestTimeout;
    if unread && small && !waits_for_continue && !stalled {
        if !body::drain(session).await {
            session.set_keepalive(None);
        }
    } else if unread {
        session.set_keepalive(None);
    }
    let body = error.body_for(ctx.endpoint);
    let mut header = head(ctx, error.status(), body.len())?;
    if error.code == ErrorCode::MethodNotAllowed
        && let Route::MethodNotAllowed(allowed) = route(&session.req_header().method, session.req_header().uri.path())
    {
        header.insert_header(header::ALLOW, allowed)?;
    }
    if let (Some(seconds), Some(millis)) = (error.retry_after_seconds(), error.retry_after_ms()) {
        header.insert_header(header::RETRY_AFTER, seconds)?;
        header.insert_header(RETRY_AFTER_MS, millis)?;
    }
    if let Some(rates) = &ctx.rates {
        for (name, value) in rates.headers() {
            header.insert_header(name, value)?;
        }
    }
    send(session, ctx, header, body).await?;
    if unread && !small && !waits_for_continue && !stalled {
        body::drain(session).await;
    }
    Ok(())
}
