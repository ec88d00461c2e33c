//! An HTTP client for one replica: its address, TLS, Host and key, for probes, scrapes and warm-up requests.

use std::net::SocketAddr;
use std::time::Duration;

use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};

use crate::config::{ReplicaSpec, ReplicaTls};

/// Longest wait for a connection; a server that is there accepts in milliseconds.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Engines behind uvicorn close an idle connection after 5 s; ours go before.
const IDLE: Duration = Duration::from_secs(4);
/// Connections kept to one replica.
const KEPT: usize = 8;

/// Most bytes read of any answer: metrics of a large vLLM are some 100 KB.
const BODY_MAX: usize = 4 << 20;

/// Why a request of our own brought no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    Timeout,
    /// What the transport says.
    Broken(String),
}

/// An answer, read whole.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
}

/// A client for one replica at one resolved address.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    /// The same with connections kept, for what a request waits for.
    kept: reqwest::Client,
    base: String,
}

impl Client {
    /// Builds the client. Every probe opens a connection of its own, so that a server that no longer accepts is
    /// noticed; redirects are not followed, proxies of the environment are not used.
    ///
    /// # Errors
    /// A TLS or key file that cannot be read or used, by name.
    pub fn new(spec: &ReplicaSpec, address: SocketAddr) -> Result<Client, String> {
        let build = |idle: usize| {
            let builder = builder(spec, address)?.pool_max_idle_per_host(idle).pool_idle_timeout(IDLE);
            builder.build().map_err(|e| format!("cannot build its client: {e}"))
        };
        Ok(Client { http: build(0)?, kept: build(KEPT)?, base: spec.url.http_base() })
    }

    /// GETs a path below the replica's base.
    ///
    /// # Errors
    /// No answer in time, or none at all.
    pub async fn get(&self, path: &str, timeout: Duration) -> Result<Answer, Failure> {
        finish(self.http.get(format!("{}{path}", self.base)), timeout).await
    }

    /// POSTs JSON.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn post(&self, path: &str, body: &serde_json::Value, timeout: Duration) -> Result<Answer, Failure> {
        finish(self.http.post(format!("{}{path}", self.base)).json(body), timeout).await
    }

    /// POSTs a body that is JSON, on a kept connection where there is one.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn ask(&self, path: &str, body: bytes::Bytes, timeout: Duration) -> Result<Answer, Failure> {
        let request = self.kept.post(format!("{}{path}", self.base)).header(CONTENT_TYPE, "application/json");
        finish(request.body(body), timeout).await
    }
}

fn builder(spec: &ReplicaSpec, address: SocketAddr) -> Result<reqwest::ClientBuilder, String> {
    let mut builder = reqwest::Client::builder()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT)
        .user_agent(concat!("weighbridge/", env!("CARGO_PKG_VERSION")))
        .resolve(&spec.url.host, address);
    if spec.url.h2c {
        builder = builder.http2_prior_knowledge();
    }
    if let Some(tls) = &spec.tls {
        builder = with_tls(builder, tls)?;
    }
    if let Some(file) = &spec.api_key_file {
        let key = std::fs::read_to_string(file).map_err(|e| format!("cannot read {}: {e}", file.display()))?;
        let mut value = HeaderValue::from_str(&format!("Bearer {}", key.trim()))
            .map_err(|_| format!("{} holds no key", file.display()))?;
        value.set_sensitive(true);
        builder = builder.default_headers(HeaderMap::from_iter([(AUTHORIZATION, value)]));
    }
    Ok(builder)
}

/// Trusts the authority and shows the certificate of `tls`.
pub(super) fn with_tls(
    mut builder: reqwest::ClientBuilder,
    tls: &ReplicaTls,
) -> Result<reqwest::ClientBuilder, String> {
    let read = |path: &std::path::Path| std::fs::read(path).map_err(|e| format!("cannot read {}: {e}", path.display()));
    if let Some(ca) = &tls.ca {
        let certs = reqwest::Certificate::from_pem_bundle(&read(ca)?);
        let certs = certs.map_err(|e| format!("{}: {e}", ca.display()))?;
        builder = certs.into_iter().fold(builder.tls_built_in_root_certs(false), |b, c| b.add_root_certificate(c));
    }
    if let (Some(cert), Some(key)) = (&tls.cert, &tls.key) {
        let mut pem = read(key)?;
        pem.extend(read(cert)?);
        let identity = reqwest::Identity::from_pem(&pem).map_err(|e| format!("{}: {e}", cert.display()))?;
        builder = builder.identity(identity);
    }
    Ok(builder)
}

async fn finish(request: reqwest::RequestBuilder, timeout: Duration) -> Result<Answer, Failure> {
    let answer = async {
        let mut response = request.send().await?;
        let status = response.status().as_u16();
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await? {
            if body.len() + chunk.len() > BODY_MAX {
                break;
            }
            body.extend_from_slice(&chunk);
        }
        Ok::<Answer, reqwest::Error>(Answer { status, body })
    };
    match tokio::time::timeout(timeout, answer).await {
        Err(_) => Err(Failure::Timeout),
        Ok(Ok(answer)) => Ok(answer),
        // A connection that is neither taken nor refused is as late as an answer that does not come.
        Ok(Err(e)) if e.is_timeout() => Err(Failure::Timeout),
        Ok(Err(e)) => Err(Failure::Broken(innermost(&e))),
    }
}

/// The cause at the bottom of an error: `connection refused` says more than `error sending request`.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}
