//! When an attempt failed: again elsewhere, or tell the client.
//!
//! Again, on another replica: a connection that was refused or timed out (nothing was sent: as often as
//! `retries.per_request` lets it); a connection that died before a header was forwarded (once, for the engine may have
//! begun); a status of `retries.statuses` before the answer's header. On the same replica, once each: a kept-alive
//! connection that the replica had closed, or a stream that it refused unseen. Where the same replica then refuses the
//! connection, it was not the connection that ended but the process, and that counts as a death.
//! Never: once anything reached the client; after a timeout of the answer or an HTTP/2 error in its place, for the engine
//! lives and may be generating. All within `retries.budget` and `retries.per_request`.

use std::sync::Arc;
use std::time::Duration;

use http::header;
use pingora::http::ResponseHeader;
use pingora::{Error, ErrorSource, ErrorType, Result};
use pingora_proxy::Session;

use crate::balance::Replica;
use crate::fleet::TrafficEvent;
use crate::running::Running;

use super::context::{Ctx, Exchange, RequestBody, SameAgain};

/// The connection could not be made.
pub fn after_connect_failure(running: &Arc<Running>, ctx: &mut Ctx, mut e: Box<Error>) -> Box<Error> {
    report(running, ctx, TrafficEvent::ConnectFailed);
    // The connection before this one ended with the process, which may have begun.
    let died = ctx.exchange.as_ref().is_some_and(|x| x.same_again == Some(SameAgain::ReusedConnection));
    if died && let Some(reservation) = ctx.exchange.as_ref().and_then(|x| x.reservation.as_ref()) {
        count_error(running, reservation.replica(), &TrafficEvent::DiedBeforeHeader);
    }
    let again = if died {
        first_death(ctx.exchange.as_deref_mut()) && move_elsewhere(running, ctx, "died_before_header")
    } else {
        move_elsewhere(running, ctx, "connect")
    };
    e.set_retry(again);
    e
}

/// Notes a death before the header; whether it is this request's first.
fn first_death(exchange: Option<&mut Exchange>) -> bool {
    exchange.is_some_and(|x| !std::mem::replace(&mut x.died_once, true))
}

/// The exchange broke after the connection was made.
pub fn after_error(
    running: &Arc<Running>,
    session: &Session,
    ctx: &mut Ctx,
    mut e: Box<Error>,
    client_reused: bool,
) -> Box<Error> {
    let upstream = *e.esource() == ErrorSource::Upstream;
    let expired = ctx.conn.as_ref().is_some_and(|c| c.expired());
    let forwarded = session.response_written().is_some();
    // `upstream_response_filter` has already moved the reservation.
    if let ErrorType::HTTPStatus(_) = e.etype() {
        e.set_retry(true);
        return e;
    }
    // Ended by the balancer itself; that is nothing against the replica, and the engine may be generating.
    if ctx.exchange.as_ref().is_some_and(|x| x.is_overdue()) {
        e.set_retry(false);
        return e;
    }
    if expired || *e.etype() == ErrorType::ReadTimedout {
        let begun = ctx.exchange.as_ref().is_some_and(|x| x.first_content_at.is_some());
        report(running, ctx, if begun { TrafficEvent::StreamStalled } else { TrafficEvent::FirstByteTimeout });
        e.set_retry(false);
        return e;
    }
    if !upstream {
        e.set_retry(false);
        return e;
    }
    if forwarded {
        report(running, ctx, TrafficEvent::DiedMidStream);
        e.set_retry(false);
        return e;
    }
    let http2 = matches!(e.etype(), ErrorType::H2Error | ErrorType::InvalidH2 | ErrorType::H2Downgrade);
    // Pingora marks what says that nothing was begun: REFUSED_STREAM, and a GOAWAY that leaves the stream out. It marks
    // broken frames, too, but those come from an engine that lives, has the request, and may be generating.
    let untouched = *e.etype() == ErrorType::H2Error && e.retry();
    if http2 && !untouched {
        report(running, ctx, TrafficEvent::DiedBeforeHeader);
        e.set_retry(false);
        return e;
    }
    let again = match &mut ctx.exchange {
        // The replica closed a connection that stood idle, as it took this request: it has not seen it.
        Some(exchange)
            if (client_reused || untouched)
                && exchange.same_again.is_none()
                && matches!(exchange.body, RequestBody::Whole(_)) =>
        {
            let why = if untouched { SameAgain::Untouched } else { SameAgain::ReusedConnection };
            exchange.same_again = Some(why);
            running.metrics.retries.with_label_values(&[exchange.ask.model.as_str(), "reused_connection"]).inc();
            true
        }
        _ => {
            report(running, ctx, TrafficEvent::DiedBeforeHeader);
            // Once: the engine may have begun to generate.
            first_death(ctx.exchange.as_deref_mut()) && move_elsewhere(running, ctx, "died_before_header")
        }
    };
    e.set_retry(again);
    e
}

/// The replica answered; statuses that mean "not here, not now" are tried elsewhere before anything reaches the client.
///
/// # Errors
/// The error that makes Pingora try again, where the reservation was moved to another replica.
pub fn after_status(running: &Arc<Running>, ctx: &mut Ctx, header: &ResponseHeader) -> Result<()> {
    let status = header.status.as_u16();
    if header.status.is_informational() {
        return Ok(());
    }
    let Some(epoch) = ctx.epoch.clone() else { return Ok(()) };
    let retry_after = retry_after(header);
    if status >= 400
        && let Some(exchange) = &mut ctx.exchange
    {
        exchange.error_retry_after = retry_after;
    }
    if !epoch.config.retries.statuses.contains(&status) {
        return Ok(());
    }
    report(running, ctx, TrafficEvent::Status { status, retry_after, body_is_client_fault: false });
    if let Some(exchange) = &mut ctx.exchange {
        exchange.status_reported = true;
    }
    if move_elsewhere(running, ctx, "status") {
        let mut e = Error::explain(ErrorType::HTTPStatus(status), "tried on another replica");
        e.as_up();
        e.set_retry(true);
        return Err(e);
    }
    Ok(())
}

/// A replica's own `Retry-After`, where it gives seconds.
fn retry_after(header: &ResponseHeader) -> Option<Duration> {
    let seconds: u64 = header.headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds.min(RETRY_AFTER_MAX_SECS)))
}

/// Longest `Retry-After` that is believed, in seconds.
const RETRY_AFTER_MAX_SECS: u64 = 600;

/// Gives the reservation back and takes one elsewhere. Returns whether there is one.
fn move_elsewhere(running: &Arc<Running>, ctx: &mut Ctx, cause: &'static str) -> bool {
    let Some(epoch) = ctx.epoch.clone() else { return false };
    let Some(exchange) = &mut ctx.exchange else { return false };
    let Some(failed) = exchange.reservation.as_ref().map(|r| r.replica().id().clone()) else { return false };
    if !matches!(exchange.body, RequestBody::Whole(_))
        || exchange.tried.len() >= epoch.config.retries.per_request as usize
        || exchange.header_forwarded
        || !epoch.retry_budget.retry(running.clock.now())
    {
        return false;
    }
    exchange.tried.push(failed);
    // Booked on one replica at a time: given back before it is taken elsewhere.
    let held = exchange.reservation.take();
    let same = held.as_ref().map(|r| r.replica().clone());
    drop(held);
    match running.balancer.place(&exchange.ask, &exchange.tried) {
        Ok(reservation) if !exchange.tried.contains(reservation.replica().id()) => {
            exchange.replica = Some(reservation.replica().id().clone());
            exchange.reservation = Some(reservation);
            exchange.same_again = None;
            exchange.refit();
            running.metrics.retries.with_label_values(&[exchange.ask.model.as_str(), cause]).inc();
            true
        }
        _ => {
            exchange.lost_on = same;
            false
        }
    }
}

/// Tells the replica's keeper what traffic saw.
pub fn report(running: &Arc<Running>, ctx: &Ctx, event: TrafficEvent) {
    let Some(exchange) = &ctx.exchange else { return };
    let replica: Option<Arc<Replica>> =
        exchange.reservation.as_ref().map(|r| r.replica().clone()).or_else(|| exchange.lost_on.clone());
    let (Some(replica), Some(fleet)) = (replica, running.fleet()) else { return };
    count_error(running, &replica, &event);
    fleet.report(&replica, event);
}

/// Counts what went wrong at a replica.
pub fn count_error(running: &Running, replica: &Replica, event: &TrafficEvent) {
    if let Some(kind) = kind(event) {
        running.metrics.upstream_errors.with_label_values(&[replica.id().as_str(), kind]).inc();
    }
}

/// The kind of an error as a label.
fn kind(event: &TrafficEvent) -> Option<&'static str> {
    match event {
        TrafficEvent::ConnectFailed => Some("connect"),
        TrafficEvent::DiedBeforeHeader => Some("died_before_header"),
        TrafficEvent::DiedMidStream => Some("died_mid_stream"),
        TrafficEvent::FirstByteTimeout => Some("first_byte_timeout"),
        TrafficEvent::StreamStalled => Some("stream_stalled"),
        TrafficEvent::StreamError => Some("stream_error"),
        TrafficEvent::Status { status: 429 | 503 | 529, .. } => Some("overloaded"),
        TrafficEvent::Status { body_is_client_fault: true, .. } => None,
        TrafficEvent::Status { status, .. } if *status >= 500 => Some("status_5xx"),
        TrafficEvent::Status { .. } | TrafficEvent::Alive | TrafficEvent::Completed => None,
    }
}

/// How long a request that was refused by a replica may be worth asking again, where the replica did not say.
pub const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(1);

/// An overloaded engine's answer carries no `Retry-After`: say one.
pub fn complete_retry_after(header: &mut ResponseHeader) -> Result<()> {
    let status = header.status.as_u16();
    if matches!(status, 429 | 503) && !header.headers.contains_key(header::RETRY_AFTER) {
        header.insert_header(header::RETRY_AFTER, DEFAULT_RETRY_AFTER.as_secs())?;
    }
    Ok(())
}
