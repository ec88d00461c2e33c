//! Uploads that need no counting (`multipart/form-data`): passed through as they come, never buffered whole.
//!
//! Only the beginning is read, to find the `model` field. Pingora's retry buffer holds what was read and sends it
//! first; a form whose beginning does not name the model goes to the only model there is, or is refused with the way out.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header;
use pingora_proxy::Session;
use tokio::time::{Instant, timeout_at};

use crate::running::tenants::TenantState;
use crate::running::{Epoch, Running};
use crate::units::Tokens;
use crate::weigh::weigher::WeighHints;
use crate::wire::request::form_field;
use crate::wire::{ApiError, Endpoint, ErrorCode, Request};

use super::admit::{self, Next, Stop};
use super::body::{self, BodyFault};
use super::context::{Ctx, Exchange, RequestBody};

/// As far as the `model` field is looked for: less than Pingora's retry buffer, which must hold what was read.
const LOOK_BYTES: usize = 48 * 1024;

/// Whisper turns 30 s of audio into 1,500 positions; speech at 16 kHz and 16 bits is 960,000 bytes of that.
const BYTES_A_TOKEN: u64 = 640;
/// The longest file that engines take is cut into windows of this order.
const UPLOAD_TOKENS_MAX: u64 = 32_768;

/// Takes an upload to its reservation.
pub async fn admit(
    running: &Arc<Running>,
    session: &mut Session,
    ctx: &mut Ctx,
    epoch: &Arc<Epoch>,
    endpoint: Endpoint,
    tenant: Option<Arc<TenantState>>,
) -> Result<Next, Stop> {
    let header_model =
        session.req_header().headers.get("x-weighbridge-model").and_then(|v| v.to_str().ok()).map(str::to_owned);
    let named = match header_model {
        Some(model) => Some(model),
        None => find_model(session, epoch.config.limits.body_timeout).await?,
    };
    if named.is_none() && epoch.only_model().is_none() {
        return Err(ApiError::new(
            ErrorCode::InvalidRequest,
            "The form's first 48 KiB do not name the model: put the `model` field before the file, or send the header x-weighbridge-model.",
        )
        .param("model")
        .into());
    }
    let entry = admit::resolve_model(epoch, tenant.as_deref(), named.as_deref())?;
    ctx.model = Some(entry.model.clone());
    let band = admit::choose_band(epoch, tenant.as_deref(), None);
    ctx.band = Some(band);
    let declared = body::declared_length(session);
    let request = Request::opaque(endpoint, Bytes::new(), named);
    let mut weight = epoch.weigher.weigh(&entry.model.name, &request, &WeighHints::default()).await?;
    weight.prompt.tokens = Tokens((declared.unwrap_or(0) / BYTES_A_TOKEN).clamp(1, UPLOAD_TOKENS_MAX));
    let ask = Arc::new(admit::unweighed(&entry, band, tenant.as_deref(), &weight));
    if let Some(tenant) = &tenant {
        admit::take_quota(running, ctx, tenant, &ask)?;
    }
    let (reservation, waited) = match running.balancer.place(&ask, &[]) {
        // A client that is still sending cannot wait in a queue: nobody would read what it sends.
        Ok(reservation) => (reservation, Duration::ZERO),
        Err(refusal) => return Err(admit::refused(&refusal, &ask).into()),
    };
    ctx.exchange = Some(Box::new(Exchange::new(ask, weight, RequestBody::Streamed, reservation, waited)));
    Ok(Next::Forward)
}

/// Reads the beginning of a form until it names its model.
async fn find_model(session: &mut Session, within: Duration) -> Result<Option<String>, Stop> {
    let content_type = session
        .req_header()
        .headers
        .get(header::CONTENT_TYPE)
        .map(|v| String::from_utf8_lossy(v.as_bytes()).into_owned());
    let Some(content_type) = content_type else { return Ok(None) };
    if session.req_header().headers.contains_key(header::EXPECT) {
        session.as_downstream_mut().write_continue_response().await.map_err(|e| Stop::Gone(e.into_down()))?;
    }
    let deadline = Instant::now() + within;
    let downstream = session.as_downstream_mut();
    downstream.enable_retry_buffering();
    let mut seen = BytesMut::new();
    while seen.len() < LOOK_BYTES && !downstream.retry_buffer_truncated() {
        let chunk = match timeout_at(deadline, downstream.read_request_body()).await {
            Err(_) => return Err(admit::body_fault(BodyFault::Timeout(within))),
            Ok(Err(e)) => return Err(Stop::Gone(e.into_down())),
            Ok(Ok(None)) => break,
            Ok(Ok(Some(chunk))) => chunk,
        };
        seen.extend_from_slice(&chunk);
        if let Some(span) = form_field(&content_type, &seen, "model")? {
            return Ok(Some(String::from_utf8_lossy(&seen[span]).into_owned()));
        }
    }
    Ok(None)
}
