//! `serve`: the balancer itself.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

use crate::admin::{self, Admin};
use crate::config;
use crate::fleet::Fleet;
use crate::proxy::connections::Connections;
use crate::proxy::server::{self, ServeOptions, TlsFiles};
use crate::running::{ReloadOutcome, Running};
use crate::units::{Clock, SystemClock};

/// Serve as configured, until a signal.
///
/// SIGHUP reloads the configuration. SIGTERM stops: not ready at once, accepting for shutdown.drain_window, then waiting
/// for running requests up to shutdown.grace. SIGINT stops at once.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The configuration file.
    #[arg(short, long, value_name = "FILE")]
    config: PathBuf,
    /// Take the listeners over from the running process (of the same admin address), which then drains and ends.
    #[arg(long)]
    upgrade: bool,
    /// Worker threads [default: one a core]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// How to log: text or json [default: text on a terminal, json elsewhere]
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<super::logging::Format>,
}

/// The balancer's tick: queues are served on every release too, so this bounds only expiry and decay.
const TICK: Duration = Duration::from_millis(20);
/// How often drains are looked at whose time may be over.
const OVERDUE_EVERY: Duration = Duration::from_millis(200);
/// How often histories are saved.
const SAVE_EVERY: Duration = Duration::from_secs(60);
/// How long an upgrade waits for its tokenizers before it takes the listeners.
const UPGRADE_WARM_UP: Duration = Duration::from_secs(60);

/// Runs the command.
///
/// # Errors
/// A configuration that is not valid, or an address that cannot be bound.
pub fn run(args: Args) -> anyhow::Result<()> {
    let _flush = super::logging::init(args.log_format).context("starting the log")?;
    let config = match config::load(&args.config) {
        Ok(config) => config,
        Err(errors) => {
            eprintln!("{errors}");
            anyhow::bail!("{} is not valid: nothing was started", args.config.display());
        }
    };
    raise_file_limit(config.limits.connections);
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
    let admin_address = config.admin.address;
    let token = match &config.admin.token_file {
        None => None,
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| format!("admin.token_file {}", path.display()))?;
            anyhow::ensure!(!text.trim().is_empty(), "admin.token_file {} is empty", path.display());
            Some(Arc::from(text.trim()))
        }
    };
    let places = Places::of(admin_address.port());
    let running = Running::new(config, args.config.clone(), clock, rand::random())?;
    let ops = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("ops")
        .enable_all()
        .build()
        .context("a runtime for probes and the admin API")?;
    let fleet =
        ops.block_on(async { Fleet::start(&running.epoch().config, running.balancer.clone(), running.clock.clone()) });
    running.set_fleet(fleet);
    let options =
        ServeOptions { upgrade: args.upgrade, threads: args.threads, upgrade_sock: places.upgrade_sock.clone() };
    if args.upgrade {
        wait_until_warm(&running);
        let old = server::ask_to_hand_over(&places.pid_file)?;
        tracing::info!(old, "taking the listeners over");
    }
    let built = server::build(running.clone(), &options)?;
    let tls = built.tls.clone();
    let reload = reload_hook(running.clone(), tls);
    let connections = built.connections.clone();
    let drained = built.connections.clone();
    let admin = Admin {
        running: running.clone(),
        address: admin_address,
        token,
        reload: reload.clone(),
        connections: Arc::new(move || connections.open()),
    };
    let listener = {
        let _in = ops.enter();
        bind_admin(admin_address).with_context(|| format!("admin address {admin_address}"))?
    };
    ops.spawn(async move {
        if let Err(e) = axum::serve(listener, admin::router(admin)).await {
            tracing::error!(error = %e, "the admin API ended");
        }
    });
    ops.spawn(tick(running.clone()));
    ops.spawn(end_overdue(running.clone(), drained));
    ops.spawn(keep_histories(running.clone()));
    ops.spawn(reload_on_hangup(reload.clone()));
    ops.spawn(super::successor::start_when_asked());
    ops.spawn(tell_of_stop());
    ops.spawn(announce(running.clone(), places));
    let _watch = watch_files(&running, &args.config, reload);
    built.run();
    Ok(())
}

/// Reloads configuration and certificates.
fn reload_hook(running: Arc<Running>, tls: TlsFiles) -> Arc<dyn Fn() -> ReloadOutcome + Send + Sync> {
    Arc::new(move || {
        let outcome = running.reload(|config| tls.check(config));
        if !matches!(outcome, ReloadOutcome::Failed { .. }) {
            tls.reload(&running.epoch().config);
        }
        outcome
    })
}

/// Tells systemd of a stop. Not of a hand-over, in which this process goes and the service stays.
async fn tell_of_stop() {
    if let Ok(mut terminate) = signal(SignalKind::terminate())
        && terminate.recv().await.is_some()
    {
        super::notify::stopping();
    }
}

async fn reload_on_hangup(reload: Arc<dyn Fn() -> ReloadOutcome + Send + Sync>) {
    let Ok(mut hangup) = signal(SignalKind::hangup()) else {
        tracing::error!("SIGHUP cannot be watched: reload by the admin API");
        return;
    };
    while hangup.recv().await.is_some() {
        let reload = reload.clone();
        super::notify::reloading();
        if let Err(e) = tokio::task::spawn_blocking(move || reload()).await {
            tracing::error!(error = %e, "the reload broke off");
        }
        super::notify::ready();
    }
}

fn watch_files(
    running: &Arc<Running>,
    path: &Path,
    reload: Arc<dyn Fn() -> ReloadOutcome + Send + Sync>,
) -> Option<config::watch::Watch> {
    let mut paths = vec![path.to_owned()];
    paths.extend(running.epoch().config.replicas_file.clone());
    match config::watch::watch(&paths, move || {
        reload();
    }) {
        Ok(watch) => Some(watch),
        Err(e) => {
            tracing::warn!(error = %e, "files are not watched: reload by SIGHUP or the admin API");
            None
        }
    }
}

async fn tick(running: Arc<Running>) {
    let mut interval = tokio::time::interval(TICK);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        running.balancer.tick();
    }
}

/// Ends what still runs on replicas whose drain is over.
async fn end_overdue(running: Arc<Running>, connections: Arc<Connections>) {
    let mut interval = tokio::time::interval(OVERDUE_EVERY);
    loop {
        interval.tick().await;
        let Some(fleet) = running.fleet() else { continue };
        for replica in fleet.overdue() {
            let ended = connections.end(&replica);
            if ended > 0 {
                tracing::warn!(%replica, ended, "its drain is over: what still runs there is ended");
            }
        }
    }
}

/// Saves the histories every so often: a process that is killed loses no more than that.
async fn keep_histories(running: Arc<Running>) {
    loop {
        tokio::time::sleep(SAVE_EVERY).await;
        let running = running.clone();
        if let Err(e) = tokio::task::spawn_blocking(move || running.save_histories()).await {
            tracing::error!(error = %e, "saving histories broke off");
        }
    }
}

/// Says that the service is up, once it is, and that it lives, from then on.
async fn announce(running: Arc<Running>, places: Places) {
    let addresses: Vec<_> = running.epoch().config.listen.iter().map(|l| l.address).collect();
    for mut address in addresses {
        if address.ip().is_unspecified() {
            address.set_ip(match address {
                std::net::SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
                std::net::SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
            });
        }
        while tokio::net::TcpStream::connect(address).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        tracing::info!(listen = %address, "listening");
    }
    running.set_listening();
    if let Err(e) = std::fs::write(&places.pid_file, format!("{}\n", std::process::id())) {
        tracing::warn!(file = %places.pid_file.display(), error = %e, "no pid file: --upgrade will not find this process");
    }
    while let Err(why) = running.ready() {
        if running.draining() {
            return;
        }
        tracing::debug!(why, "not ready yet");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    tracing::info!("ready");
    super::notify::ready();
    let leaving = running.clone();
    super::notify::watchdog(move || leaving.draining()).await;
}

fn wait_until_warm(running: &Arc<Running>) {
    let begun = std::time::Instant::now();
    while begun.elapsed() < UPGRADE_WARM_UP {
        let probed = running.fleet().is_some_and(|f| f.ready());
        if running.epoch().weigher.ready() && probed {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    tracing::warn!("tokenizers or replicas are not ready after a minute: taking over all the same");
}

fn bind_admin(address: std::net::SocketAddr) -> std::io::Result<tokio::net::TcpListener> {
    let socket = match address {
        std::net::SocketAddr::V4(_) => tokio::net::TcpSocket::new_v4()?,
        std::net::SocketAddr::V6(_) => tokio::net::TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    // Old and new process both listen while an upgrade is under way.
    socket.set_reuseport(true)?;
    socket.bind(address)?;
    socket.listen(1024)
}

/// Streams need two descriptors each: the soft limit is raised to the hard one.
fn raise_file_limit(connections: usize) {
    let wanted = connections as u64 * 2 + 256;
    match rlimit::increase_nofile_limit(u64::MAX) {
        Ok(limit) if limit < wanted => tracing::warn!(
            limit,
            wanted,
            "fewer file descriptors than limits.connections needs (two for each): raise LimitNOFILE or lower the limit"
        ),
        Ok(_) => {}
        Err(e) => tracing::warn!(error = %e, "the file descriptor limit could not be raised"),
    }
}

/// Where a process is found by its successor.
#[derive(Clone, Debug)]
struct Places {
    pid_file: PathBuf,
    upgrade_sock: PathBuf,
}

impl Places {
    /// Under systemd's runtime directory where there is one; told apart by the admin port.
    fn of(port: u16) -> Places {
        let base = std::env::var_os("RUNTIME_DIRECTORY").map_or_else(std::env::temp_dir, |dirs| {
            PathBuf::from(dirs.to_string_lossy().split(':').next().unwrap_or("/tmp"))
        });
        Places {
            pid_file: base.join(format!("weighbridge-{port}.pid")),
            upgrade_sock: base.join(format!("weighbridge-{port}.sock")),
        }
    }
}
