//! What goes to a replica: the peer, and the request's header.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use http::header::{self, HeaderValue};
use parking_lot::Mutex;
use pingora::http::RequestHeader;
use pingora::protocols::ALPN;
use pingora::protocols::TcpKeepalive;
use pingora::protocols::tls::CaType;
use pingora::upstreams::peer::{HttpPeer, HttpUpstreamRequestPolicy};
use pingora::utils::tls::CertKey;
use pingora::{Error, ErrorType, Result};
use pingora_proxy::Session;

use crate::balance::Replica;
use crate::config::{Limits, ReplicaSpec};
use crate::wire::headers;

use super::context::{Ctx, Exchange, RequestBody};
use super::fields::{edit_request, value};
use super::reply::X_REQUEST_ID;

/// A replica that is up accepts at once; one that does not is down, and another is tried.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// With a TLS handshake.
const TOTAL_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Below the 5 s after which uvicorn and llama-server close an idle connection (seen on both).
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// For the whole body on its way to a replica.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);
/// Above the limits that this balancer watches itself, so that the right one speaks first.
const READ_TIMEOUT_SLACK: Duration = Duration::from_secs(2);
/// Fields that are set here, at most: room for them is made once.
const OWN_FIELDS: usize = 10;
/// Concurrent streams on one HTTP/2 connection to a replica.
const H2_STREAMS_MAX: usize = 100;

/// What a replica's TLS needs, read once for each spec.
#[derive(Default)]
pub struct TlsMaterial {
    read: Mutex<HashMap<String, Material>>,
}

#[derive(Clone)]
struct Material {
    spec: Arc<ReplicaSpec>,
    ca: Option<Arc<CaType>>,
    client: Option<Arc<CertKey>>,
    key: Option<HeaderValue>,
}

impl std::fmt::Debug for TlsMaterial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsMaterial").finish_non_exhaustive()
    }
}

impl TlsMaterial {
    /// Forgets everything, so that files are read again: after a reload.
    pub fn forget(&self) {
        self.read.lock().clear();
    }

    fn of(&self, spec: &Arc<ReplicaSpec>) -> Result<Material> {
        let mut read = self.read.lock();
        if let Some(known) = read.get(spec.id.as_str())
            && (Arc::ptr_eq(&known.spec, spec) || *known.spec == **spec)
        {
            return Ok(known.clone());
        }
        let tls = spec.tls.clone().unwrap_or_default();
        let pem = |path: &std::path::Path| {
            std::fs::read(path).map_err(|e| {
                Error::explain(
                    ErrorType::InvalidCert,
                    format!("replica {}: {} cannot be read: {e}", spec.id, path.display()),
                )
            })
        };
        let ca = match &tls.ca {
            None => None,
            Some(path) => Some(super::tls::ca(&pem(path)?, path)?),
        };
        let client = match (&tls.cert, &tls.key) {
            (Some(cert), Some(key)) => Some(super::tls::client_pair(&pem(cert)?, &pem(key)?, cert)?),
            _ => None,
        };
        let key = match &spec.api_key_file {
            None => None,
            Some(path) => {
                let text = String::from_utf8(pem(path)?).unwrap_or_default();
                let mut value = HeaderValue::from_str(&format!("Bearer {}", text.trim())).map_err(|_| {
                    Error::explain(
                        ErrorType::InternalError,
                        format!("replica {}: {} holds no key that a header can carry", spec.id, path.display()),
                    )
                })?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        let material = Material { spec: spec.clone(), ca, client, key };
        // Bounded by the replicas that exist; those that went are dropped with the next reload.
        read.insert(spec.id.as_str().to_owned(), material.clone());
        Ok(material)
    }
}

/// The peer of a replica. `watched`: the client's connection has a deadline of its own
/// ([`super::stream::ConnState::set_deadline`]). Pingora is given one for each read only where there is none: it keeps a
/// timer for every ten milliseconds of the next ten minutes in which a read might time out, on each thread.
pub fn peer(
    replica: &Replica,
    address: Option<std::net::SocketAddr>,
    limits: &Limits,
    tls: &TlsMaterial,
    watched: bool,
) -> Result<Box<HttpPeer>> {
    let spec = replica.spec();
    let address = address.ok_or_else(|| {
        Error::explain(ErrorType::ConnectError, format!("replica {}: {} has no address yet", spec.id, spec.url.host))
    })?;
    let mut peer = HttpPeer::new(address, spec.url.https, spec.url.host.clone());
    let options = &mut peer.options;
    options.connection_timeout = Some(CONNECT_TIMEOUT);
    options.total_connection_timeout = Some(TOTAL_CONNECT_TIMEOUT);
    options.idle_timeout = Some(IDLE_TIMEOUT);
    options.write_timeout = Some(WRITE_TIMEOUT);
    if !watched {
        options.read_timeout = Some(limits.first_byte_timeout.max(limits.stream_idle_timeout) + READ_TIMEOUT_SLACK);
    }
    options.max_h2_streams = H2_STREAMS_MAX;
    options.http_upstream_request_policy = HttpUpstreamRequestPolicy::deny_upgrades();
    options.tcp_keepalive = Some(TcpKeepalive {
        idle: Duration::from_secs(30),
        interval: Duration::from_secs(10),
        count: 3,
        #[cfg(target_os = "linux")]
        user_timeout: Duration::ZERO,
    });
    options.alpn = match (spec.url.https, spec.url.h2c) {
        (true, _) => ALPN::H2H1,
        (false, true) => ALPN::H2,
        (false, false) => ALPN::H1,
    };
    if spec.url.https {
        let material = tls.of(&spec)?;
        peer.options.ca = material.ca;
        peer.client_cert_key = material.client;
    }
    // Connections are never shared between replicas, even where two have the same address.
    peer.group_key = xxhash_rust::xxh3::xxh3_64(spec.id.as_str().as_bytes());
    Ok(Box::new(peer))
}

/// Writes the request's header as the replica is to see it.
pub fn request_header(
    session: &Session,
    header: &mut RequestHeader,
    ctx: &mut Ctx,
    exchange: &mut Exchange,
    tls: &TlsMaterial,
) -> Result<()> {
    let Some(reservation) = &exchange.reservation else {
        return Err(Error::explain(ErrorType::InternalError, "a request goes out without a reservation"));
    };
    let spec = reservation.replica().spec();
    // Unique for each attempt: engines key their requests by it.
    let ids = ctx.ids.as_ref().ok_or_else(|| Error::explain(ErrorType::InternalError, "a request without an id"))?;
    let attempt_id = ids.upstream(exchange.attempts);
    let guarded = ctx.epoch.as_ref().is_some_and(|e| !e.tenants.open());
    let own_key = if spec.api_key_file.is_some() { tls.of(&spec)?.key } else { None };
    let body_bytes = match &exchange.body {
        RequestBody::Whole(body) => Some(body.len()),
        RequestBody::Streamed | RequestBody::Spent => None,
    };
    edit_request(header, |headers| {
        headers.reserve(OWN_FIELDS);
        if let Some(bytes) = body_bytes {
            headers.remove(header::TRANSFER_ENCODING);
            headers.remove(header::CONTENT_ENCODING);
            headers.insert(header::CONTENT_LENGTH, HeaderValue::from(bytes));
        }
        // Usage must be readable: an engine's own compression is asked away.
        headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        for name in headers::not_forwarded(headers, guarded || own_key.is_some()) {
            headers.remove(&name);
        }
        if !spec.preserve_host {
            headers.insert(header::HOST, value(spec.url.authority())?);
        }
        if let Some(key) = own_key {
            headers.insert(header::AUTHORIZATION, key);
        }
        forwarded(session, headers, ctx);
        headers.insert(X_REQUEST_ID, value(&attempt_id)?);
        Ok::<(), Box<Error>>(())
    })?;
    exchange.upstream_request_id = Some(attempt_id);
    if !spec.url.base_path.is_empty() {
        let path = header.uri.path_and_query().map_or("/", |p| p.as_str());
        let path = format!("{}{path}", spec.url.base_path);
        let uri = path.parse::<http::Uri>().map_err(|e| {
            Error::explain(ErrorType::InternalError, format!("replica {}: base path makes no URI: {e}", spec.id))
        })?;
        header.set_uri(uri);
    }
    Ok(())
}

/// Says who the client is, as this balancer saw it.
fn forwarded(session: &Session, headers: &mut HeaderMap, ctx: &Ctx) {
    let Some(address) = ctx.client else { return };
    let request = session.req_header();
    let host = request
        .headers
        .get(header::HOST)
        .and_then(|h| h.to_str().ok())
        .or_else(|| request.uri.authority().map(|a| a.as_str()));
    let https = session.digest().is_some_and(|d| d.ssl_digest.is_some());
    headers::set_forwarded(headers, &headers::ClientSide { address, host, https });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::balance::{Balancer, Settings};
    use crate::config::{self, Balance, BandSpec, Regions};
    use crate::units::ManualClock;

    #[test]
    fn only_an_answer_that_nobody_else_watches_has_a_timer_of_pingoras_for_each_read() {
        let text = "listen: [{address: 127.0.0.1:1}]\nmodels: [{name: m, tokenizer: approximate}]\n\
                    replicas: [{id: a, url: 'http://127.0.0.1:9', model: m}]";
        let config = config::parse(text, std::path::Path::new("")).unwrap();
        let settings =
            Settings { balance: Balance::default(), bands: vec![BandSpec::default()], regions: Regions::default() };
        let balancer = Balancer::new(settings.clone(), ManualClock::new(), 1);
        balancer.apply(settings, &config.replicas);
        let replica = balancer.replicas()[0].clone();
        let timeout = |watched| {
            let address = Some("127.0.0.1:9".parse().unwrap());
            let peer = peer(&replica, address, &config.limits, &TlsMaterial::default(), watched).unwrap();
            peer.options.read_timeout
        };
        assert_eq!(timeout(true), None);
        assert_eq!(timeout(false), Some(config.limits.first_byte_timeout + READ_TIMEOUT_SLACK));
    }
}
