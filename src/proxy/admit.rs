//! `request_filter`, step by step: who asks, what for, how heavy, and where it goes.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header;
use pingora::{Error, Result};
use pingora_proxy::Session;

use crate::balance::quota::Limit;
use crate::balance::{Admission, Ask, Refusal, Reservation};
use crate::config::Config;
use crate::running::epoch::Named;
use crate::running::tenants::TenantState;
use crate::running::{Epoch, ModelEntry, Running};
use crate::units::{Band, Tokens};
use crate::weigh::weigher::WeighHints;
use crate::wire::endpoint::{Route, route};
use crate::wire::headers::{self, Hints, PriorityHint};
use crate::wire::request::{Edits, UsageAsk};
use crate::wire::{ApiError, Endpoint, ErrorCode, ParseLimits, Request, coding};

use super::body::{self, BodyFault};
use super::context::{Ctx, Exchange, RequestBody};
use super::models;

/// Why a request goes no further.
#[derive(Debug)]
pub enum Stop {
    /// To be answered with this.
    Refused(ApiError),
    /// The client left.
    Gone(Box<Error>),
}

impl From<ApiError> for Stop {
    fn from(error: ApiError) -> Self {
        Stop::Refused(error)
    }
}

/// What becomes of a request that was let in.
#[derive(Debug)]
pub enum Next {
    /// To the replica of its reservation.
    Forward,
    /// The balancer answers itself, with status 200.
    Answer(Bytes),
}

/// Takes a request from its header to its reservation.
pub async fn admit(running: &Arc<Running>, session: &mut Session, ctx: &mut Ctx) -> Result<Next, Stop> {
    let epoch = running.epoch();
    ctx.epoch = Some(epoch.clone());
    let method = session.req_header().method.clone();
    let path = session.req_header().uri.path().to_owned();
    let endpoint = match route(&method, &path) {
        Route::Inference(endpoint) => endpoint,
        Route::Models => {
            let tenant = authenticate(&epoch, session)?;
            ctx.tenant = tenant.clone();
            ctx.answered_here = true;
            return models::answer(
                running,
                &epoch,
                tenant.as_deref(),
                crate::wire::endpoint::model_id(&path).as_deref(),
            )
            .map(Next::Answer)
            .map_err(Stop::from);
        }
        Route::MethodNotAllowed(allowed) => {
            return Err(ApiError::new(
                ErrorCode::MethodNotAllowed,
                format!("{method} is not allowed on {path}; use {allowed}."),
            )
            .into());
        }
        Route::Unknown => {
            return Err(ApiError::new(
                ErrorCode::NotFound,
                format!("No such path: {path}. Inference paths such as /v1/chat/completions, and /v1/models, are served here."),
            )
            .into());
        }
    };
    ctx.endpoint = Some(endpoint);
    headers::expects_continue(&session.req_header().headers)?;
    let tenant = authenticate(&epoch, session)?;
    ctx.tenant = tenant.clone();
    if endpoint.multipart() {
        return super::passthrough::admit(running, session, ctx, &epoch, endpoint, tenant).await;
    }
    let body = read_body(session, &epoch.config).await?;
    if let Some(conn) = &ctx.conn {
        conn.request_is_read();
    }
    let begun = running.clock.now();
    let limits = ParseLimits { json_depth: epoch.config.limits.json_depth };
    let request = Request::parse(endpoint, body, &limits)?;
    let entry = resolve_model(&epoch, tenant.as_deref(), request.model.as_deref())?;
    ctx.model = Some(entry.model.clone());
    let window = running.balancer.window(&entry.model.name);
    let engine = running.engine(&entry.model.name);
    if let Some(answer) = epoch.weigher.answer_here(&entry.model.name, &request, engine, window)? {
        ctx.answered_here = true;
        return Ok(Next::Answer(answer));
    }
    let hints = Hints::read(&session.req_header().headers, &request);
    let band = choose_band(&epoch, tenant.as_deref(), hints.priority.as_ref());
    ctx.band = Some(band);
    check_max_tokens(tenant.as_deref(), &request)?;
    let weigh_hints =
        WeighHints { tenant: tenant.as_ref().map(|t| t.spec.name.clone()), task: hints.task.clone(), window, engine };
    let weight =
        race(session, epoch.weigher.weigh(&entry.model.name, &request, &weigh_hints)).await?.map_err(Stop::from)?;
    let weighed = running.clock.now();
    running
        .metrics
        .weigh_seconds
        .with_label_values(&[entry.model.name.as_str()])
        .observe(weighed.since(begun).as_secs_f64());
    let hide_usage = request.stream
        && request.usage_ask == UsageAsk::NotAsked
        && matches!(endpoint, Endpoint::ChatCompletions | Endpoint::Completions);
    let ask = Arc::new(Ask {
        model: entry.model.name.clone(),
        prompt: weight.prompt.tokens,
        longest: weight.prompt.longest,
        must_hold: weight.prompt.must_hold(window),
        sequences: weight.sequences.max(1),
        output: weight.output.clone(),
        max_tokens: request.max_tokens,
        band,
        tenant: tenant.as_ref().map(|t| t.spec.name.clone()),
        session: hints.session.as_deref().map(|s| xxhash_rust::xxh3::xxh3_64(s.as_bytes())),
        prefix: weight.prefix.clone(),
        prefix_block_tokens: weight.prefix_block_tokens,
        stream: request.stream,
        ttft_objective: hints.ttft_objective,
    });
    if let Some(tenant) = &tenant {
        take_quota(running, ctx, tenant, &ask)?;
    }
    let (reservation, waited) = place(running, session, &epoch, &ask).await?;
    let edits = edits(&epoch, &entry, &request, &reservation, band, hide_usage);
    let upstream_body = request.upstream_body(&edits);
    let mut exchange = Exchange::new(ask, weight, RequestBody::Whole(upstream_body), reservation, waited);
    exchange.hide_usage = hide_usage;
    exchange.request = Some(request);
    exchange.edits = edits;
    ctx.exchange = Some(Box::new(exchange));
    epoch.retry_budget.request(running.clock.now());
    let own = running.clock.now().since(begun).saturating_sub(waited);
    running.metrics.overhead_seconds.observe(own.as_secs_f64());
    Ok(Next::Forward)
}

/// Runs `work` while watching the client; a client that leaves ends it.
pub async fn race<F: Future>(session: &mut Session, work: F) -> Result<F::Output, Stop> {
    tokio::select! {
        biased;
        out = work => Ok(out),
        left = session.as_downstream_mut().read_body_or_idle(true) => Err(match left {
            Err(e) => Stop::Gone(e.into_down()),
            Ok(_) => Stop::Gone(Error::explain(pingora::ErrorType::ConnectionClosed, "the client ended its request").into_down()),
        }),
    }
}

/// The tenant whose key the request carries; `None` where the balancer is open.
pub fn authenticate(epoch: &Epoch, session: &Session) -> Result<Option<Arc<TenantState>>, ApiError> {
    if epoch.tenants.open() {
        return Ok(None);
    }
    let headers = &session.req_header().headers;
    let Some(key) = headers::api_key(headers) else {
        return Err(ApiError::new(
            ErrorCode::InvalidApiKey,
            "This balancer needs an API key: send it as `Authorization: Bearer KEY` (or `x-api-key: KEY`).",
        ));
    };
    match std::str::from_utf8(key).ok().and_then(|key| epoch.tenants.find(key)) {
        Some(tenant) => Ok(Some(tenant.clone())),
        None => Err(ApiError::new(ErrorCode::InvalidApiKey, "The API key is not known here; check it for a typo.")),
    }
}

async fn read_body(session: &mut Session, config: &Config) -> Result<Bytes, Stop> {
    let limit = config.limits.body_bytes;
    let encoding = session
        .req_header()
        .headers
        .get(header::CONTENT_ENCODING)
        .map(|v| String::from_utf8_lossy(v.as_bytes()).into_owned());
    // Refused before it is read, where the coding is one that nobody here can decode.
    if let Some(encoding) = &encoding {
        coding::check_encoding(encoding)?;
    }
    let body = body::read(session, limit, config.limits.body_timeout).await.map_err(body_fault)?;
    match encoding {
        Some(encoding) => Ok(coding::decode_request_body(&encoding, body, limit)?),
        None => Ok(body),
    }
}

/// A body's fault in the contract's words.
pub fn body_fault(fault: BodyFault) -> Stop {
    match fault {
        BodyFault::TooLarge { limit, declared } => {
            let found = declared.map_or_else(|| "more".to_owned(), |n| format!("{n} bytes"));
            Stop::Refused(ApiError::new(
                ErrorCode::RequestTooLarge,
                format!("The request's body is too large: {found}, where limits.body_bytes allows {limit} bytes."),
            ))
        }
        BodyFault::Timeout(within) => Stop::Refused(ApiError::new(
            ErrorCode::RequestTimeout,
            format!(
                "The request's body did not arrive whole within limits.body_timeout ({}).",
                humantime::format_duration(within)
            ),
        )),
        BodyFault::Broken(e) => Stop::Gone(e.into_down()),
    }
}

/// The model that a request names, if its tenant may use it.
pub fn resolve_model(epoch: &Epoch, tenant: Option<&TenantState>, name: Option<&str>) -> Result<ModelEntry, ApiError> {
    let entry = match name {
        Some(name) => epoch.model(name).cloned(),
        None => match epoch.only_model() {
            Some(entry) => Some(entry),
            None => {
                return Err(ApiError::new(
                    ErrorCode::InvalidRequest,
                    "The request names no model; GET /v1/models lists those that are served here.",
                )
                .param("model"));
            }
        },
    };
    let allowed = |entry: &ModelEntry| {
        tenant.is_none_or(|t| t.spec.models.is_empty() || t.spec.models.contains(&entry.model.name))
    };
    match entry {
        Some(entry) if allowed(&entry) => Ok(entry),
        Some(entry) => Err(ApiError::new(
            ErrorCode::NotAllowed,
            format!("This API key may not use the model {}; GET /v1/models lists those it may.", entry.model.name),
        )
        .param("model")),
        None => Err(ApiError::new(
            ErrorCode::ModelNotFound,
            format!(
                "The model `{}` is not served here; GET /v1/models lists those that are.",
                shortened(name.unwrap_or_default())
            ),
        )
        .param("model")),
    }
}

/// The band: what the client asks for, within what its tenant may.
pub fn choose_band(epoch: &Epoch, tenant: Option<&TenantState>, hint: Option<&PriorityHint>) -> Band {
    let default = epoch.default_band();
    let all: Vec<Band>;
    let allowed: &[Band] = match tenant {
        None => {
            all = (0..epoch.config.bands.len()).filter_map(|i| u8::try_from(i).ok().map(Band)).collect();
            &all
        }
        Some(tenant) if tenant.spec.bands.is_empty() => {
            all = vec![default];
            &all
        }
        Some(tenant) => &tenant.spec.bands,
    };
    let of_tenant = if allowed.contains(&default) { default } else { allowed.first().copied().unwrap_or(default) };
    match hint {
        None => of_tenant,
        Some(PriorityHint::Band(text)) => {
            epoch.band_by_name(text).filter(|band| allowed.contains(band)).unwrap_or(of_tenant)
        }
        // vLLM's convention: lower is sooner.
        Some(PriorityHint::Level(n)) if *n <= 0 => allowed.iter().copied().min().unwrap_or(of_tenant),
        Some(PriorityHint::Level(_)) => allowed.iter().copied().max().unwrap_or(of_tenant),
    }
}

/// A client's text in an error: enough to find it by.
fn shortened(text: &str) -> String {
    const CHARS_MAX: usize = 100;
    match text.char_indices().nth(CHARS_MAX) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

fn check_max_tokens(tenant: Option<&TenantState>, request: &Request) -> Result<(), ApiError> {
    match (tenant.and_then(|t| t.spec.max_tokens), request.max_tokens) {
        (Some(limit), Some(asked)) if asked > limit => Err(ApiError::new(
            ErrorCode::InvalidRequest,
            format!("max_tokens is {asked}, and this API key may ask for {limit} at most."),
        )
        .param("max_tokens")),
        _ => Ok(()),
    }
}

/// Takes a tenant's share for this request: its estimate now, its actual use at the end.
pub fn take_quota(running: &Running, ctx: &mut Ctx, tenant: &Arc<TenantState>, ask: &Ask) -> Result<(), ApiError> {
    let estimate = ask.prompt.0.saturating_add(ask.output.p50.saturating_mul(u64::from(ask.sequences)));
    match running.quotas.take(&tenant.spec.name, estimate, running.clock.now()) {
        Ok(hold) => {
            ctx.rates = Some(hold.rates());
            ctx.quota = Some(hold);
            Ok(())
        }
        Err(exceeded) => {
            ctx.rates = Some(exceeded.rates);
            running
                .metrics
                .rate_limited
                .with_label_values(&[tenant.spec.name.as_str(), limit_label(exceeded.limit)])
                .inc();
            Err(ApiError::new(
                ErrorCode::RateLimitExceeded,
                format!(
                    "This API key's limit of {} {} is reached; try again in {:.1} s.",
                    exceeded.allowed,
                    exceeded.limit,
                    exceeded.retry_after.as_secs_f64()
                ),
            )
            .retry_after(exceeded.retry_after))
        }
    }
}

fn limit_label(limit: Limit) -> &'static str {
    match limit {
        Limit::Requests => "requests",
        Limit::Tokens => "tokens",
        Limit::Concurrent => "concurrent",
    }
}

/// A place on a replica, waited for in the band's queue where need be. Returns how long that took.
pub async fn place(
    running: &Arc<Running>,
    session: &mut Session,
    epoch: &Epoch,
    ask: &Arc<Ask>,
) -> Result<(Reservation, Duration), Stop> {
    let begun = running.clock.now();
    let (tell, told) = tokio::sync::oneshot::channel();
    let waiter = Box::new(move |placed: Result<Reservation, Refusal>| {
        // A client that left takes its receiver along; the reservation is then dropped here, and released.
        let _ = tell.send(placed);
    });
    let admission = running.balancer.admit(ask.clone(), waiter);
    running.metrics.select_seconds.observe(running.clock.now().since(begun).as_secs_f64());
    match admission {
        Admission::Placed(reservation) => Ok((reservation, Duration::ZERO)),
        Admission::Refused(refusal) => Err(Stop::Refused(refused(&refusal, ask))),
        Admission::Waiting(ticket) => {
            let outcome = race(session, told).await;
            drop(ticket);
            let waited = running.clock.now().since(begun);
            running
                .metrics
                .queue_wait
                .with_label_values(&[ask.model.as_str(), &epoch.band(ask.band).name])
                .observe(waited.as_secs_f64());
            match outcome? {
                Ok(Ok(reservation)) => Ok((reservation, waited)),
                Ok(Err(refusal)) => Err(Stop::Refused(refused(&refusal, ask))),
                // The balancer let the waiter go without a word: it is going down.
                Err(_) => Err(Stop::Refused(
                    ApiError::new(ErrorCode::NoReplica, "The balancer is shutting down; ask again.")
                        .retry_after(Duration::from_secs(1)),
                )),
            }
        }
    }
}

/// A refusal in the contract's words.
pub fn refused(refusal: &Refusal, ask: &Ask) -> ApiError {
    match refusal {
        Refusal::ContextLength { prompt, window } => ApiError::new(
            ErrorCode::ContextLengthExceeded,
            format!(
                "The prompt has {}{prompt} tokens, and the largest context window of {} is {window} tokens. Shorten the prompt.",
                if ask.must_hold > ask.longest { "about " } else { "" },
                ask.model
            ),
        )
        .param("messages"),
        Refusal::NoCapacity { retry_after } => {
            ApiError::new(ErrorCode::NoCapacity, "All replicas at token capacity").retry_after(*retry_after)
        }
        Refusal::Displaced { retry_after } => ApiError::new(
            ErrorCode::NoCapacity,
            "All replicas at token capacity; a request of higher priority took this one's place in the queue",
        )
        .retry_after(*retry_after),
        Refusal::NoReplica { retry_after } => {
            ApiError::new(ErrorCode::NoReplica, format!("No replica of {} is available now", ask.model))
                .retry_after(*retry_after)
        }
        Refusal::QueueTimeout { waited, retry_after } => ApiError::new(
            ErrorCode::QueueTimeout,
            format!("No place came free within {:.1} s in the queue", waited.as_secs_f64()),
        )
        .retry_after(*retry_after),
    }
}

fn edits(
    epoch: &Epoch,
    entry: &ModelEntry,
    request: &Request,
    reservation: &Reservation,
    band: Band,
    hide_usage: bool,
) -> Edits {
    let schedules = reservation.replica().spec().priority_scheduling;
    // A tenant's own wish never reaches an engine that would trust it; without tenants it is the client's affair.
    let guarded = !epoch.tenants.open();
    let alias = match entry.named {
        Named::Alias => true,
        Named::Name => request.model.is_none() && request.raw("model").is_some(),
        Named::Adapter => false,
    };
    Edits {
        include_usage: hide_usage,
        set_priority: schedules.then(|| i64::from(band.0)),
        remove_priority: !schedules && guarded && request.priority.is_some(),
        remove_task_type: request.task_type.is_some(),
        model: alias.then(|| entry.model.name.as_str().to_owned()),
    }
}

/// An ask for a request whose tokens nobody can count beforehand.
pub fn unweighed(entry: &ModelEntry, band: Band, tenant: Option<&TenantState>, weight: &crate::weigh::Weight) -> Ask {
    Ask {
        model: entry.model.name.clone(),
        prompt: weight.prompt.tokens,
        longest: Tokens(1),
        must_hold: Tokens(1),
        sequences: 1,
        output: weight.output.clone(),
        max_tokens: None,
        band,
        tenant: tenant.map(|t| t.spec.name.clone()),
        session: None,
        prefix: weight.prefix.clone(),
        prefix_block_tokens: weight.prefix_block_tokens,
        stream: false,
        ttft_objective: None,
    }
}
