//! The yardstick: Pingora with one fixed upstream and no hook but the one it demands.

use anyhow::{Context, Result};
use async_trait::async_trait;
use pingora::prelude::HttpPeer;
use pingora::proxy::{ProxyHttp, Session, http_proxy_service};
use pingora::server::Server;
use pingora::server::configuration::ServerConf;

struct Bare {
    upstream: HttpPeer,
}

#[async_trait]
impl ProxyHttp for Bare {
    type CTX = ();

    fn new_ctx(&self) {}

    async fn upstream_peer(&self, _: &mut Session, (): &mut ()) -> pingora::Result<Box<HttpPeer>> {
        Ok(Box::new(self.upstream.clone()))
    }
}

/// Serves on `listen` with one thread until killed.
pub fn run(listen: &str, upstream: &str) -> Result<()> {
    let upstream: std::net::SocketAddr = upstream.parse().context("upstream address")?;
    let conf = ServerConf { threads: 1, ..ServerConf::default() };
    let mut server = Server::new_with_opt_and_conf(None, conf);
    server.bootstrap();
    let bare = Bare { upstream: HttpPeer::new(upstream, false, String::new()) };
    let mut service = http_proxy_service(&server.configuration, bare);
    service.add_tcp(listen);
    server.add_service(service);
    server.run_forever()
}
