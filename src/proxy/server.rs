//! Builds Pingora's server around the shell: listeners, lifecycle, the signals.
//!
//! Pingora closes its listeners as soon as it is told to stop, then sleeps out its whole grace period and drops what
//! still runs. So the stop is steered here: on SIGTERM the balancer is not ready at once but accepts for the drain
//! window; then the listeners close, and the process ends as soon as the last request has, at the latest after the
//! grace period. SIGQUIT hands the listeners to a new process and drains in the same way.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use async_trait::async_trait;
use pingora::listeners::{L4BufferSettings, ListenerConfig, TcpSocketOptions};
use pingora::protocols::TcpKeepalive;
use pingora::server::configuration::{Opt, ServerConf};
use pingora::server::{ExecutionPhase, RunArgs, Server, ShutdownSignal, ShutdownSignalWatch};
use pingora::services::listening::Service;
use pingora_proxy::HttpProxy;
use tokio::signal::unix::{SignalKind, signal};

use crate::config::{Config, Limits, Listen};
use crate::running::Running;

use super::connections::Connections;
use super::edge::{ABOUT_TO_ASK, Edge};
use super::shell::Shell;
use super::tls::ListenerTls;
use super::upstream::TlsMaterial;

/// Attempts that Pingora makes at most; the balancer's own `retries` are below it.
const PINGORA_ATTEMPTS_MAX: usize = 16;
/// Idle connections kept to replicas, in all.
const UPSTREAM_POOL: usize = 4096;
/// Read and write buffers of a client's connection: a stream's events are small, and there are thousands of streams.
const L4_READ_BUFFER: usize = 8192;
const L4_WRITE_BUFFER: usize = 1460;

/// How `serve` was asked to run.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Take the listeners over from the running process.
    pub upgrade: bool,
    /// Worker threads; as many as there are cores by default.
    pub threads: Option<usize>,
    /// Where the listeners are handed over.
    pub upgrade_sock: PathBuf,
}

/// What a reload must touch beside [`Running`].
#[derive(Debug, Clone)]
pub struct TlsFiles {
    listeners: Arc<Vec<(std::net::SocketAddr, Arc<ListenerTls>)>>,
    replicas: Arc<TlsMaterial>,
}

impl TlsFiles {
    /// What is wrong with the listeners' certificates of a configuration that is to be taken.
    pub fn check(&self, config: &Config) -> Vec<String> {
        let specs = config.listen.iter().filter_map(|l| l.tls.as_ref());
        specs.filter_map(|spec| ListenerTls::load(spec).err()).map(|e| format!("{e:#}")).collect()
    }

    /// Reads every certificate again. A file that cannot be read is logged, and what was loaded stays.
    pub fn reload(&self, config: &Config) {
        self.replicas.forget();
        for (address, tls) in self.listeners.iter() {
            let Some(spec) = config.listen.iter().find(|l| l.address == *address).and_then(|l| l.tls.as_ref()) else {
                continue;
            };
            if let Err(e) = tls.reload(spec) {
                tracing::error!(listen = %address, error = format!("{e:#}"), "certificates not reloaded, the old ones stay");
            }
        }
    }
}

/// A server that is ready to run.
pub struct Built {
    server: Server,
    running: Arc<Running>,
    pub tls: TlsFiles,
    pub connections: Arc<Connections>,
}

impl std::fmt::Debug for Built {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Built").finish_non_exhaustive()
    }
}

/// Builds the server: takes listeners over where asked to, binds nothing yet otherwise.
///
/// # Errors
/// Certificates that cannot be read.
pub fn build(running: Arc<Running>, options: &ServeOptions) -> anyhow::Result<Built> {
    let epoch = running.epoch();
    let config = &epoch.config;
    let threads =
        options.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
    let conf = ServerConf {
        threads,
        work_stealing: true,
        grace_period_seconds: Some(config.shutdown.grace.as_secs().max(1)),
        graceful_shutdown_timeout_seconds: Some(1),
        upgrade_sock: options.upgrade_sock.to_string_lossy().into_owned(),
        max_retries: PINGORA_ATTEMPTS_MAX,
        upstream_keepalive_pool_size: UPSTREAM_POOL,
        ..ServerConf::default()
    };
    let opt = Opt { upgrade: options.upgrade, ..Opt::default() };
    let tls_material = Arc::new(TlsMaterial::default());
    let mut listener_tls = Vec::new();
    for listen in &config.listen {
        if let Some(spec) = &listen.tls {
            listener_tls.push((listen.address, ListenerTls::load(spec)?));
        }
    }
    let mut server = Server::new_with_opt_and_conf(opt, conf);
    server.bootstrap();
    let connections = Arc::new(Connections::default());
    // h2c has to look at a connection's first bytes, so its listeners are a service of their own.
    for h2c in [false, true] {
        let listeners: Vec<&Listen> = config.listen.iter().filter(|l| l.h2c == h2c).collect();
        if listeners.is_empty() {
            continue;
        }
        let mut proxy = HttpProxy::new(Shell::new(running.clone(), tls_material.clone()), server.configuration.clone());
        proxy.h2_options = Some(h2_options(&config.limits));
        let mut server_options = pingora::apps::HttpServerOptions::default();
        server_options.h2c = h2c;
        server_options.keepalive_request_limit = Some(config.limits.requests_per_connection);
        server_options.h2_idle_timeout = Some(config.limits.keepalive);
        proxy.server_options = Some(server_options);
        proxy.handle_init_modules();
        let edge = Edge::new(proxy, running.clone(), connections.clone(), h2c);
        let name = if h2c { "edge (h2c)" } else { "edge" };
        let mut service = Service::new(name.to_owned(), edge);
        for listen in listeners {
            let mut options = TcpSocketOptions::default();
            options.tcp_keepalive = Some(TcpKeepalive {
                idle: Duration::from_secs(60),
                interval: Duration::from_secs(10),
                count: 3,
                #[cfg(target_os = "linux")]
                user_timeout: Duration::ZERO,
            });
            let mut endpoint = ListenerConfig::tcp(listen.address.to_string())
                .tcp_socket_options(options)
                .l4_buffer(L4BufferSettings::new(L4_READ_BUFFER, L4_WRITE_BUFFER));
            if let Some((_, tls)) = listener_tls.iter().find(|(address, _)| *address == listen.address) {
                endpoint = endpoint.tls(tls.settings()?);
            }
            service.add_listener(endpoint);
        }
        server.add_service(service);
    }
    let tls = TlsFiles { listeners: Arc::new(listener_tls), replicas: tls_material };
    Ok(Built { server, running, tls, connections })
}

fn h2_options(limits: &Limits) -> pingora::protocols::http::v2::server::H2Options {
    let mut options = pingora::protocols::http::v2::server::H2Options::default();
    // Prompts are megabytes: the default windows of 64 KiB would cost a round trip for each.
    options.initial_window_size(1 << 20).initial_connection_window_size(4 << 20).max_concurrent_streams(256);
    // The default lets one client's header grow to 16 MiB.
    options.max_header_list_size(u32::try_from(limits.header_bytes).unwrap_or(u32::MAX));
    options
}

impl Built {
    /// Runs until a signal ends it; returns only where Pingora does.
    pub fn run(self) {
        let mut phases = self.server.watch_execution_phase();
        let running = self.running.clone();
        let grace = running.epoch().config.shutdown.grace;
        let watch = std::thread::Builder::new().name("lifecycle".to_owned()).spawn(move || {
            while let Ok(phase) = phases.blocking_recv() {
                match phase {
                    ExecutionPhase::GracefulUpgradeTransferringFds
                    | ExecutionPhase::GracefulUpgradeCloseTimeout
                    | ExecutionPhase::GracefulTerminate => running.start_draining(),
                    ExecutionPhase::ShutdownGracePeriod => end_when_idle(&running, grace),
                    _ => {}
                }
            }
        });
        if let Err(e) = watch {
            tracing::error!(error = %e, "the lifecycle thread did not start: a stop will take the whole grace period");
        }
        let signals = Signals { running: self.running.clone() };
        self.server.run(RunArgs { shutdown_signal: Box::new(signals) });
    }
}

/// Waits for the last request, and for a moment for those who have just connected, and ends the process.
fn end_when_idle(running: &Arc<Running>, grace: Duration) -> ! {
    let begun = Instant::now();
    loop {
        // First, since the last connections are still on their way from the listener.
        std::thread::sleep(Duration::from_millis(20));
        let expected = running.newcomers() > 0 && begun.elapsed() < ABOUT_TO_ASK;
        if !expected && (running.in_flight() == 0 || begun.elapsed() >= grace) {
            break;
        }
    }
    match running.in_flight() {
        0 => tracing::info!("the last request has ended: exiting"),
        left => tracing::warn!(left, "the grace period is over: requests are cut"),
    }
    running.on_exit();
    std::process::exit(0);
}

/// SIGTERM with a drain window, SIGINT at once, SIGQUIT to hand over.
struct Signals {
    running: Arc<Running>,
}

#[async_trait]
impl ShutdownSignalWatch for Signals {
    async fn recv(&self) -> ShutdownSignal {
        let streams = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()), signal(SignalKind::quit()));
        let (Ok(mut terminate), Ok(mut interrupt), Ok(mut quit)) = streams else {
            tracing::error!("signals cannot be watched: only SIGKILL ends this process");
            return std::future::pending().await;
        };
        tokio::select! {
            _ = interrupt.recv() => {
                self.running.on_exit();
                ShutdownSignal::FastShutdown
            }
            _ = quit.recv() => ShutdownSignal::GracefulUpgrade,
            _ = terminate.recv() => {
                self.running.start_draining();
                let window = self.running.epoch().config.shutdown.drain_window;
                tokio::select! {
                    _ = tokio::time::sleep(window) => ShutdownSignal::GracefulTerminate,
                    // A second signal means now.
                    _ = interrupt.recv() => {
                        self.running.on_exit();
                        ShutdownSignal::FastShutdown
                    }
                    _ = terminate.recv() => ShutdownSignal::GracefulTerminate,
                }
            }
        }
    }
}

/// Asks the running process to hand its listeners over: SIGQUIT to the process in the pid file.
///
/// # Errors
/// No pid file, or no such process.
pub fn ask_to_hand_over(pid_file: &Path) -> anyhow::Result<u32> {
    let text = std::fs::read_to_string(pid_file)
        .with_context(|| format!("--upgrade: no running process is named in {}", pid_file.display()))?;
    let pid: i32 = text.trim().parse().with_context(|| format!("{} holds no process id", pid_file.display()))?;
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    anyhow::ensure!(
        name.trim().starts_with("weighbridge"),
        "--upgrade: process {pid} of {} is `{}`, not weighbridge",
        pid_file.display(),
        name.trim()
    );
    let told = std::process::Command::new("kill")
        .args(["-QUIT", &pid.to_string()])
        .status()
        .with_context(|| format!("--upgrade: process {pid} could not be told: no `kill` command"))?;
    anyhow::ensure!(told.success(), "--upgrade: process {pid} could not be told (kill: {told})");
    Ok(pid.unsigned_abs())
}
