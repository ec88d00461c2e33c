//! The processes of a comparison: started here, ended on drop, their CPU time read from the kernel.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

/// A proxy that is measured.
#[derive(Debug)]
pub struct Proxy {
    pub name: &'static str,
    pub address: SocketAddr,
    /// Where its books are read (by the streams benchmark); the yardstick has none.
    #[allow(dead_code, reason = "not every benchmark reads books")]
    pub admin: Option<SocketAddr>,
    process: Process,
    /// Holds its configuration while it runs.
    _files: Option<TempDir>,
}

impl Proxy {
    /// The process's id.
    pub fn pid(&self) -> u32 {
        self.process.0.id()
    }

    /// User and system time of all its threads so far.
    pub fn cpu(&self) -> Result<Duration> {
        let path = format!("/proc/{}/stat", self.pid());
        let stat = fs::read_to_string(&path).with_context(|| format!("{} has died", self.name))?;
        // The command's name may hold spaces; fields are counted from its closing bracket. utime and stime are the
        // 14th and 15th of proc(5), in ticks that Linux fixes at 100 a second for every program.
        let (_, fields) = stat.rsplit_once(')').context("proc stat")?;
        let ticks = fields.split_whitespace().skip(11).take(2).map(str::parse::<u64>).sum::<Result<u64, _>>()?;
        Ok(Duration::from_millis(ticks * 10))
    }
}

/// A child that does not outlive its handle.
#[derive(Debug)]
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// The model server behind both proxies.
#[derive(Debug)]
pub struct Upstream {
    address: SocketAddr,
    _process: Process,
}

/// Starts the model server.
pub fn upstream(events_per_second: f64) -> Result<Upstream> {
    let address = free_address()?;
    let process = start(
        Command::new(std::env::current_exe()?)
            .arg("upstream")
            .arg(address.to_string())
            .arg(events_per_second.to_string()),
    )?;
    Ok(Upstream { address, _process: process })
}

/// Starts the yardstick.
pub fn bare(upstream: &Upstream) -> Result<Proxy> {
    let address = free_address()?;
    let process = start(
        Command::new(std::env::current_exe()?).arg("bare").arg(address.to_string()).arg(upstream.address.to_string()),
    )?;
    Ok(Proxy { name: "bare", address, admin: None, process, _files: None })
}

/// What a replica holds.
#[derive(Clone, Copy, Debug)]
pub struct Holds {
    pub tokens: u64,
    pub sequences: u64,
}

/// Starts the real binary, as a user would run it: everything at its default but the number of threads.
pub fn weighbridge(
    upstream: &Upstream,
    tokenizer: &str,
    binary: &Path,
    threads: usize,
    Holds { tokens, sequences }: Holds,
) -> Result<Proxy> {
    // A path as the configuration takes it, from wherever the files are; its one name besides stays as it is.
    let tokenizer = match tokenizer {
        "approximate" => tokenizer.into(),
        path => fs::canonicalize(path).with_context(|| format!("tokenizer directory {path}"))?,
    };
    let (address, admin) = (free_address()?, free_address()?);
    let files = tempfile::tempdir()?;
    let config = files.path().join("weighbridge.yaml");
    fs::write(
        &config,
        format!(
            "listen:\n  - {{address: \"{address}\"}}\n\
             admin: {{address: \"{admin}\"}}\n\
             models:\n  - {{name: bench, tokenizer: \"{}\"}}\n\
             replicas:\n  - {{id: bench-0, url: \"http://{}\", model: bench, engine: vllm, tokens_per_sec: 100000, \
             max_context_tokens: 32768, token_capacity: {tokens}, max_sequences: {sequences}}}\n",
            tokenizer.display(),
            upstream.address,
        ),
    )?;
    let process = start(
        Command::new(binary).arg("serve").arg("--config").arg(&config).args(["--threads", &threads.to_string()]),
    )?;
    Ok(Proxy { name: "weighbridge", address, admin: Some(admin), process, _files: Some(files) })
}

fn start(command: &mut Command) -> Result<Process> {
    let log = match std::env::var_os("PASSTHROUGH_LOG") {
        Some(path) => Stdio::from(fs::File::options().create(true).append(true).open(path)?),
        None => Stdio::null(),
    };
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn();
    Ok(Process(child.with_context(|| format!("starting {command:?}"))?))
}

/// An address that is free now; nothing else on loopback is likely to take it in the moment until it is bound.
fn free_address() -> Result<SocketAddr> {
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    if address.port() == 0 {
        bail!("no free port");
    }
    Ok(address)
}
