//! The answer on its way back: header, then chunk after chunk, read beside the untouched bytes.

use std::sync::Arc;

use bytes::Bytes;
use http::HeaderName;
use http::header;
use pingora::http::ResponseHeader;
use pingora::{Error, Result};

use crate::fleet::TrafficEvent;
use crate::running::Running;
use crate::wire::{AnswerKind, AnswerReader, headers};

use super::context::Ctx;
use super::fields::{edit_answer, value};
use super::reply::X_REQUEST_ID;
use super::retry;

const X_REPLICA: HeaderName = HeaderName::from_static("x-weighbridge-replica");
const X_PROMPT_TOKENS: HeaderName = HeaderName::from_static("x-weighbridge-prompt-tokens");
const X_OUTPUT_ESTIMATE: HeaderName = HeaderName::from_static("x-weighbridge-output-estimate");
const X_QUEUE_MS: HeaderName = HeaderName::from_static("x-weighbridge-queue-ms");

/// Fields that are set here, at most: room for them is made once.
const OWN_FIELDS: usize = 11;

/// An error's body is kept this far, for its class.
const ERROR_HEAD_BYTES: usize = 4096;

/// `response_filter`.
pub fn header(running: &Arc<Running>, header: &mut ResponseHeader, ctx: &mut Ctx) -> Result<()> {
    if header.status.is_informational() {
        return Ok(());
    }
    let status = header.status.as_u16();
    ctx.status = status;
    let Some(epoch) = ctx.epoch.clone() else { return Ok(()) };
    let Some(endpoint) = ctx.endpoint else { return Ok(()) };
    let Some(exchange) = &mut ctx.exchange else { return Ok(()) };
    exchange.answer_begins();
    exchange.upstream_status = Some(status);
    let content_type = header.headers.get(header::CONTENT_TYPE).map(|v| v.as_bytes());
    exchange.sse = content_type.is_some_and(is_event_stream);
    let encoding = header
        .headers
        .get(header::CONTENT_ENCODING)
        .and_then(|v| v.to_str().ok())
        .map(|v| v.trim().to_ascii_lowercase())
        .filter(|v| !v.is_empty() && v != "identity");
    if status < 400 {
        exchange.reader = Some(AnswerReader::new(AnswerKind {
            endpoint,
            sse: exchange.sse,
            hide_usage: exchange.hide_usage && exchange.sse && encoding.is_none(),
            encoding,
            event_bytes: usize::try_from(epoch.config.limits.event_bytes).unwrap_or(usize::MAX),
        }));
    }
    let waited = u64::try_from(exchange.queue_wait.as_millis()).unwrap_or(u64::MAX);
    let hides = exchange.sse && exchange.hide_usage;
    let replica = exchange.reservation.as_ref().map(|reservation| reservation.replica());
    if let Some(replica) = replica
        && let Some(signals) = crate::fleet::signals::orca(&header.headers, running.clock.now())
    {
        replica.set_signals(signals);
    }
    edit_answer(header, |headers| {
        headers.reserve(OWN_FIELDS);
        if hides {
            // The answer may become shorter than announced.
            headers.remove(header::CONTENT_LENGTH);
        }
        if let Some(replica) = replica {
            let location = headers.get(header::LOCATION).and_then(|v| v.to_str().ok());
            if let Some(rewritten) = location.and_then(|location| {
                let url = &replica.spec().url;
                headers::relative_location(location, &url.authority(), &url.base_path)
            }) {
                headers.insert(header::LOCATION, value(rewritten)?);
            }
            if epoch.config.answer_headers {
                headers.insert(X_REPLICA, value(replica.id().as_str())?);
                headers.insert(X_PROMPT_TOKENS, exchange.weight.prompt.tokens.0.into());
                headers.insert(X_OUTPUT_ESTIMATE, exchange.weight.output.p50.into());
                headers.insert(X_QUEUE_MS, waited.into());
            }
        }
        headers.insert(X_REQUEST_ID, value(&ctx.request_id)?);
        if let Some(rates) = &ctx.rates {
            for (name, text) in rates.headers() {
                headers.insert(name, value(text)?);
            }
        }
        Ok::<(), Box<Error>>(())
    })?;
    retry::complete_retry_after(header)
}

/// Takes out what belongs to the replica's connection, the fields that its `Connection` names among them. The two that
/// Pingora itself reads, to frame the answer and to keep the connection, it takes out by itself.
pub fn strip_connection_fields(answer: &mut ResponseHeader) {
    for name in headers::hop_by_hop(&answer.headers) {
        if name != header::CONNECTION && name != header::TRANSFER_ENCODING {
            answer.remove_header(&name);
        }
    }
}

fn is_event_stream(content_type: &[u8]) -> bool {
    let kind = content_type.split(|b| *b == b';').next().unwrap_or_default();
    kind.trim_ascii().eq_ignore_ascii_case(b"text/event-stream")
}

/// `response_body_filter`: forwards at once; everything else is done beside it.
pub fn body(running: &Arc<Running>, body: &mut Option<Bytes>, end_of_stream: bool, ctx: &mut Ctx) {
    let Some(epoch) = &ctx.epoch else { return };
    let Some(exchange) = &mut ctx.exchange else { return };
    let chunk = body.take();
    let has_data = chunk.as_ref().is_some_and(|c| !c.is_empty());
    let Some(reader) = &mut exchange.reader else {
        // An error's answer passes as it is.
        if let Some(chunk) = &chunk {
            let room = ERROR_HEAD_BYTES.saturating_sub(exchange.error_head.len());
            exchange.error_head.extend_from_slice(&chunk[..chunk.len().min(room)]);
        }
        if has_data && let Some(conn) = &ctx.conn {
            conn.set_deadline(Some(epoch.config.limits.stream_idle_timeout));
        }
        *body = chunk;
        return;
    };
    let mut forward = match chunk {
        Some(chunk) if has_data => reader.push(chunk),
        _ => Bytes::new(),
    };
    if end_of_stream {
        exchange.ended = true;
        let rest = reader.finish();
        if !rest.is_empty() {
            forward = match forward.is_empty() {
                true => rest,
                false => [forward, rest].concat().into(),
            };
        }
    }
    let progress = reader.progress();
    if has_data {
        let content = if exchange.sse { progress.content_events > 0 || progress.finished } else { true };
        let now = running.clock.now();
        if content && exchange.first_content_at.is_none() {
            exchange.first_content_at = Some(now);
            if let (Some(fleet), Some(reservation)) = (running.fleet(), &exchange.reservation) {
                fleet.report(reservation.replica(), TrafficEvent::Alive);
            }
        }
        if exchange.first_content_at.is_some() {
            if let Some(conn) = &ctx.conn {
                conn.set_deadline(Some(epoch.config.limits.stream_idle_timeout));
            }
            if progress.output_tokens > exchange.output_told {
                exchange.output_told = progress.output_tokens;
                exchange.last_content_at = Some(now);
                if exchange.sse
                    && let Some(reservation) = &mut exchange.reservation
                {
                    reservation.progress(progress.output_tokens);
                }
            }
        }
    }
    *body = Some(forward);
}
