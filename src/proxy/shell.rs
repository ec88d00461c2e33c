//! `ProxyHttp`: Pingora's phases, each a call into a pure room.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::upstreams::peer::HttpPeer;
use pingora::{Error, ErrorSource, ErrorType, Result};
use pingora_proxy::{FailToProxy, ProxyHttp, Session};

use crate::balance::Outcome;
use crate::running::Running;
use crate::wire::headers::RequestIds;
use crate::wire::{ApiError, ErrorCode};

use super::admit::{self, Next, Stop};
use super::context::{Ctx, RequestBody};
use super::stream::EdgeStream;
use super::upstream::{self, TlsMaterial};
use super::{answer, finish, reply, retry};

/// The proxy application.
#[derive(Debug)]
pub struct Shell {
    pub(super) running: Arc<Running>,
    tls: Arc<TlsMaterial>,
}

impl Shell {
    pub fn new(running: Arc<Running>, tls: Arc<TlsMaterial>) -> Self {
        Shell { running, tls }
    }
}

/// The error that Pingora is told where the balancer knows better: `fail_to_proxy` says the rest.
pub(super) fn internal(what: &'static str) -> Box<Error> {
    Error::explain(ErrorType::InternalError, what)
}

#[async_trait]
impl ProxyHttp for Shell {
    type CTX = Ctx;

    fn new_ctx(&self) -> Ctx {
        Ctx::new(&self.running)
    }

    async fn early_request_filter(&self, session: &mut Session, ctx: &mut Ctx) -> Result<()> {
        let epoch = self.running.epoch();
        let limits = &epoch.config.limits;
        ctx.client = session.client_addr().and_then(|a| a.as_inet().map(|a| a.ip()));
        ctx.conn = session
            .as_downstream()
            .stream()
            .and_then(|stream| (**stream).as_any().downcast_ref::<EdgeStream>().map(|edge| edge.state().clone()));
        let ids = RequestIds::new(&session.req_header().headers, rand::random());
        ctx.request_id = ids.downstream();
        ctx.ids = Some(ids);
        let downstream = session.as_downstream_mut();
        // A reader that takes nothing for this long is cut; Pingora's default is to wait for ever.
        downstream.set_write_timeout(Some(limits.slow_reader_timeout));
        downstream.set_total_drain_timeout(Some(Duration::from_secs(2)));
        if self.running.draining() {
            downstream.set_keepalive(None);
        }
        Ok(())
    }

    async fn request_filter(&self, session: &mut Session, ctx: &mut Ctx) -> Result<bool> {
        match admit::admit(&self.running, session, ctx).await {
            Ok(Next::Forward) => Ok(false),
            Ok(Next::Answer(body)) => {
                ctx.outcome = Some(Outcome::Completed);
                reply::json(session, ctx, 200, body).await?;
                Ok(true)
            }
            Err(Stop::Refused(error)) => {
                ctx.outcome = Some(Outcome::Refused);
                ctx.error = Some(error.clone());
                reply::error(session, ctx, &error).await?;
                Ok(true)
            }
            Err(Stop::Gone(error)) => {
                ctx.outcome = Some(Outcome::ClientGone);
                Err(error)
            }
        }
    }

    async fn upstream_peer(&self, _session: &mut Session, ctx: &mut Ctx) -> Result<Box<HttpPeer>> {
        let epoch = ctx.epoch.clone().ok_or_else(|| internal("a request without an epoch"))?;
        let exchange = ctx.exchange.as_mut().ok_or_else(|| internal("a request without an exchange"))?;
        exchange.attempts += 1;
        let reservation =
            exchange.reservation.as_ref().ok_or_else(|| internal("a request goes out without a reservation"))?;
        exchange.replica = Some(reservation.replica().id().clone());
        if let Some(conn) = &ctx.conn {
            conn.served_by(reservation.replica().id());
        }
        let address = self.running.fleet().and_then(|fleet| fleet.address_of(reservation.replica()));
        upstream::peer(reservation.replica(), address, &epoch.config.limits, &self.tls, ctx.conn.is_some())
    }

    async fn upstream_request_filter(
        &self,
        session: &mut Session,
        header: &mut RequestHeader,
        ctx: &mut Ctx,
    ) -> Result<()> {
        let mut exchange = ctx.exchange.take().ok_or_else(|| internal("a request without an exchange"))?;
        let written = upstream::request_header(session, header, ctx, &mut exchange, &self.tls);
        exchange.sent_at = Some(self.running.clock.now());
        exchange.body_sent = false;
        exchange.error_head.clear();
        if let Some(reservation) = &mut exchange.reservation {
            reservation.sent();
        }
        ctx.exchange = Some(exchange);
        if let (Some(conn), Some(epoch)) = (&ctx.conn, &ctx.epoch) {
            conn.set_deadline(Some(epoch.config.limits.first_byte_timeout));
        }
        written
    }

    async fn request_body_filter(
        &self,
        _session: &mut Session,
        body: &mut Option<Bytes>,
        end_of_stream: bool,
        ctx: &mut Ctx,
    ) -> Result<()> {
        let Some(exchange) = &mut ctx.exchange else { return Ok(()) };
        // `None` would end the body; an empty piece in the middle is swallowed.
        match &exchange.body {
            RequestBody::Whole(whole) if end_of_stream => {
                *body = Some(whole.clone());
                exchange.body_sent = true;
            }
            RequestBody::Whole(_) | RequestBody::Spent => *body = Some(Bytes::new()),
            RequestBody::Streamed => {}
        }
        Ok(())
    }

    fn fail_to_connect(&self, _session: &mut Session, _peer: &HttpPeer, ctx: &mut Ctx, e: Box<Error>) -> Box<Error> {
        retry::after_connect_failure(&self.running, ctx, e)
    }

    fn error_while_proxy(
        &self,
        _peer: &HttpPeer,
        session: &mut Session,
        e: Box<Error>,
        ctx: &mut Ctx,
        client_reused: bool,
    ) -> Box<Error> {
        retry::after_error(&self.running, session, ctx, e, client_reused)
    }

    async fn upstream_response_filter(
        &self,
        _session: &mut Session,
        header: &mut ResponseHeader,
        ctx: &mut Ctx,
    ) -> Result<()> {
        retry::after_status(&self.running, ctx, header)?;
        answer::strip_connection_fields(header);
        Ok(())
    }

    async fn response_filter(&self, _session: &mut Session, header: &mut ResponseHeader, ctx: &mut Ctx) -> Result<()> {
        answer::header(&self.running, header, ctx)
    }

    fn response_body_filter(
        &self,
        _session: &mut Session,
        body: &mut Option<Bytes>,
        end_of_stream: bool,
        ctx: &mut Ctx,
    ) -> Result<Option<Duration>> {
        if ctx.exchange.as_ref().is_some_and(|x| x.is_overdue()) && !end_of_stream {
            return Err(internal("its replica is taken out"));
        }
        answer::body(&self.running, body, end_of_stream, ctx);
        Ok(None)
    }

    async fn fail_to_proxy(&self, session: &mut Session, e: &Error, ctx: &mut Ctx) -> FailToProxy {
        let error = failure(session, e, ctx);
        let Some(error) = error else {
            ctx.outcome.get_or_insert(Outcome::ClientGone);
            return FailToProxy { error_code: 0, can_reuse_downstream: false };
        };
        ctx.outcome.get_or_insert(Outcome::UpstreamError);
        let status = error.status();
        if session.response_written().is_none() {
            session.set_keepalive(None);
            if let Err(e) = reply::error(session, ctx, &error).await {
                tracing::debug!(request_id = ctx.request_id, error = %e, "the client did not take its error");
            }
        } else if ctx.exchange.as_ref().is_some_and(|x| x.reader.is_some() && x.sse) {
            // The answer began: say why it ends, and leave it visibly broken (no clean end).
            let event = ctx.endpoint.map_or_else(|| error.event(), |e| error.event_for(e));
            if let Err(e) = session.write_response_body(Some(event), false).await {
                tracing::debug!(request_id = ctx.request_id, error = %e, "the client did not take its error event");
            }
        }
        ctx.error = Some(error);
        FailToProxy { error_code: status, can_reuse_downstream: false }
    }

    async fn logging(&self, _session: &mut Session, _e: Option<&Error>, ctx: &mut Ctx) {
        finish::settle(&self.running, _session, ctx);
    }

    fn suppress_error_log(&self, _session: &Session, _ctx: &Ctx, _error: &Error) -> bool {
        // The access log has it, in the balancer's own words.
        true
    }

    fn suppress_proxy_warn_log(&self, _: &Session, _: &Ctx, _: &Error, _: pingora_proxy::ProxyWarnLogContext) -> bool {
        // Its text may quote what a replica sent; retries are counted by cause instead.
        true
    }

    fn request_summary(&self, _session: &Session, ctx: &Ctx) -> String {
        // Pingora's own would print the request line; paths are harmless, but nothing of a client's text is needed.
        format!("request {}", ctx.request_id)
    }
}

/// What the client is told of a failure; `None` where it left.
fn failure(session: &Session, e: &Error, ctx: &Ctx) -> Option<ApiError> {
    let limits = ctx.epoch.as_ref().map(|epoch| &epoch.config.limits);
    let begun = ctx.exchange.as_ref().is_some_and(|x| x.first_content_at.is_some());
    let timeout = |begun: bool| {
        let (code, key, span) = if begun {
            (ErrorCode::StreamIdleTimeout, "limits.stream_idle_timeout", limits.map(|l| l.stream_idle_timeout))
        } else {
            (ErrorCode::FirstByteTimeout, "limits.first_byte_timeout", limits.map(|l| l.first_byte_timeout))
        };
        let span = span.map_or_else(String::new, |d| format!(" ({})", humantime::format_duration(d)));
        let what = if begun { "sent nothing more" } else { "sent no data" };
        ApiError::new(code, format!("The replica {what} within {key}{span}."))
    };
    let expired = ctx.conn.as_ref().is_some_and(|c| c.expired());
    let left = *e.esource() == ErrorSource::Downstream && !expired;
    if !left && ctx.exchange.as_ref().is_some_and(|x| x.is_overdue()) {
        let message = "The replica is taken out of service, and the time for what still ran there is over.";
        return Some(ApiError::new(ErrorCode::UpstreamError, message));
    }
    if expired {
        return Some(timeout(begun));
    }
    if let Some(error) = &ctx.error {
        return Some(error.clone());
    }
    match (e.esource(), e.etype()) {
        (ErrorSource::Downstream, _) => None,
        (_, ErrorType::ReadTimedout) => Some(timeout(begun)),
        (ErrorSource::Upstream, ErrorType::ConnectTimedout | ErrorType::ConnectRefused | ErrorType::ConnectError) => {
            Some(ApiError::new(
                ErrorCode::UpstreamError,
                "The replica could not be reached, and no other could take the request.",
            ))
        }
        (ErrorSource::Upstream, _) if session.response_written().is_some() => {
            Some(ApiError::new(ErrorCode::UpstreamError, "The replica broke off in the middle of its answer."))
        }
        (ErrorSource::Upstream, _) => {
            Some(ApiError::new(ErrorCode::UpstreamError, "The replica broke off before its answer began."))
        }
        (_, _) => Some(ApiError::new(ErrorCode::UpstreamError, "The request could not be forwarded.")),
    }
}
