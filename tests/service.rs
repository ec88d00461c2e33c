//! The unit's own command lines, run as systemd runs them: under a notify socket, a runtime directory and a watchdog.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Longest any step may take on a machine that is busy with other tests.
const PATIENCE: Duration = Duration::from_secs(60);

/// A child that does not outlive its handle.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// An installed service, its notify socket, and a simulated replica behind it.
struct Service {
    files: TempDir,
    listen: u16,
    admin: u16,
    notify: UnixDatagram,
    _replica: Process,
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").expect("bind").local_addr().expect("address").port()
}

fn replica() -> (Process, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_weighbridge"))
        .args(["sim-replica", "--listen", "127.0.0.1:0", "--speed", "50"])
        .stdout(Stdio::piped())
        .stdin(Stdio::null())
        .spawn()
        .expect("sim-replica");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("stdout")).read_line(&mut line).expect("line");
    let url = line.split(' ').find(|word| word.starts_with("http://")).expect("address").trim().to_owned();
    (Process(child), url)
}

impl Service {
    /// Installs the service with a configuration of its own; nothing runs yet.
    fn installed() -> Service {
        let files = tempfile::tempdir().expect("temporary directory");
        let installed = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/install.sh"))
            .arg(env!("CARGO_BIN_EXE_weighbridge"))
            .env("DESTDIR", files.path())
            .env("PREFIX", "/usr")
            .output()
            .expect("install.sh");
        assert!(installed.status.success());
        let (process, url) = replica();
        let notify = UnixDatagram::bind(files.path().join("notify")).expect("notify socket");
        notify.set_read_timeout(Some(Duration::from_millis(100))).expect("timeout");
        fs::create_dir(files.path().join("run")).expect("runtime directory");
        let service = Service { listen: free_port(), admin: free_port(), files, notify, _replica: process };
        service.configure(&format!(
            "listen:\n  - {{address: \"127.0.0.1:{}\"}}\nadmin: {{address: \"127.0.0.1:{}\"}}\n\
             shutdown: {{drain_window: 200ms, grace: 20s}}\n\
             models:\n  - {{name: sim, tokenizer: approximate}}\n\
             replicas:\n  - {{id: a, url: \"{url}\", model: sim}}\n",
            service.listen, service.admin
        ));
        service
    }

    fn path(&self, path: &str) -> PathBuf {
        self.files.path().join(path)
    }

    fn config(&self) -> PathBuf {
        self.path("etc/weighbridge/weighbridge.yaml")
    }

    fn configure(&self, yaml: &str) {
        fs::write(self.config(), yaml).expect("configuration");
    }

    /// The unit's lines of this key, with this installation's paths.
    fn lines(&self, key: &str) -> Vec<Vec<String>> {
        let unit = fs::read_to_string(self.path("usr/lib/systemd/system/weighbridge.service")).expect("unit");
        let prefix = format!("{key}=");
        unit.lines()
            .filter_map(|line| line.strip_prefix(&prefix))
            .map(|line| {
                line.split_whitespace()
                    .map(|word| match word {
                        "/usr/bin/weighbridge" => self.path("usr/bin/weighbridge").to_string_lossy().into_owned(),
                        "/etc/weighbridge/weighbridge.yaml" => self.config().to_string_lossy().into_owned(),
                        other => other.to_owned(),
                    })
                    .collect()
            })
            .collect()
    }

    fn start(&self) -> Process {
        let [line] = self.lines("ExecStart").try_into().expect("one ExecStart");
        let log = fs::File::create(self.path("log")).expect("log");
        let child = Command::new(&line[0])
            .args(&line[1..])
            .env("NOTIFY_SOCKET", self.path("notify"))
            .env("RUNTIME_DIRECTORY", self.path("run"))
            .env("WATCHDOG_USEC", "1000000")
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("log"))
            .stderr(log)
            .spawn()
            .expect("ExecStart");
        Process(child)
    }

    /// Runs the unit's `ExecReload` lines one after another, as systemd does, up to the first that fails.
    fn reload(&self, main: u32) -> bool {
        self.lines("ExecReload").iter().all(|line| {
            let words = line.iter().map(|word| word.replace("$MAINPID", &main.to_string()));
            let words: Vec<String> = words.collect();
            Command::new(&words[0]).args(&words[1..]).output().expect("ExecReload").status.success()
        })
    }

    /// Waits until systemd would have been told all of these, in this order.
    fn told(&self, expected: &[&str]) {
        let give_up = Instant::now() + PATIENCE;
        let mut all = Vec::new();
        let mut left = expected.iter();
        let mut next = left.next();
        while let Some(wanted) = next {
            let mut buffer = [0; 1024];
            if let Ok(count) = self.notify.recv(&mut buffer) {
                for line in String::from_utf8_lossy(&buffer[..count]).lines() {
                    all.push(line.to_owned());
                    if next.is_some_and(|wanted| wanted == &line) {
                        next = left.next();
                    }
                }
            }
            assert!(Instant::now() < give_up, "systemd was not told {wanted}; told: {all:?}\n{}", self.log());
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    fn ask(&self) -> Result<(), String> {
        let url = format!("http://127.0.0.1:{}/v1/chat/completions", self.listen);
        let body = r#"{"model":"sim","max_tokens":5,"messages":[{"role":"user","content":"Hello"}]}"#;
        let output = Command::new("curl")
            .args(["-s", "-o", "/dev/null", "-w", "%{http_code}", "--max-time", "20", "-H"])
            .args(["content-type: application/json", "-d", body, &url])
            .output()
            .expect("curl");
        match String::from_utf8_lossy(&output.stdout).as_ref() {
            "200" => Ok(()),
            other => Err(format!("{other}, curl exit {:?}", output.status.code())),
        }
    }
}

fn ends(mut process: Process) -> ExitStatus {
    let give_up = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = process.0.try_wait().expect("wait") {
            return status;
        }
        assert!(Instant::now() < give_up, "the process did not end");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn send(signal: &str, pid: u32) {
    assert!(Command::new("/bin/kill").args([signal, &pid.to_string()]).status().expect("kill").success());
}

#[test]
fn the_unit_starts_it_pings_the_watchdog_and_stops_it() {
    let service = Service::installed();
    let process = service.start();
    let pid = process.0.id();
    service.told(&[&format!("MAINPID={pid}"), "READY=1", "WATCHDOG=1", "WATCHDOG=1"]);
    service.ask().expect("an answer");
    send("-TERM", pid);
    service.told(&["STOPPING=1"]);
    assert!(ends(process).success(), "{}", service.log());
}

#[test]
fn the_unit_reloads_a_good_configuration_and_fails_visibly_on_a_bad_one() {
    let service = Service::installed();
    let process = service.start();
    let pid = process.0.id();
    service.told(&["READY=1"]);
    let good = fs::read_to_string(service.config()).expect("configuration");

    service.configure(&good.replace("id: a", "id: b"));
    assert!(service.reload(pid), "{}", service.log());
    service.told(&["RELOADING=1", "READY=1"]);
    service.ask().expect("an answer");

    service.configure(&good.replace("model: sim", "modell: sim"));
    assert!(!service.reload(pid), "a bad configuration passed ExecReload");
    service.ask().expect("an answer");
}

#[test]
fn the_upgrade_command_hands_over_without_a_failed_request() {
    let service = Arc::new(Service::installed());
    let process = service.start();
    let old = process.0.id();
    service.told(&[&format!("MAINPID={old}"), "READY=1"]);

    let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let client = std::thread::spawn({
        let (service, stop, answered) = (Arc::clone(&service), Arc::clone(&stop), Arc::clone(&answered));
        move || {
            let mut failed = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                match service.ask() {
                    Ok(()) => _ = answered.fetch_add(1, Ordering::Relaxed),
                    Err(why) => failed.push(why),
                }
            }
            failed
        }
    });

    let pid_file = service.path(&format!("run/weighbridge-{}.pid", service.admin));
    let output = Command::new(service.path("usr/bin/weighbridge-upgrade"))
        .arg("--pid-file")
        .args([&pid_file, &service.config()])
        .env("WEIGHBRIDGE_BINARY", service.path("usr/bin/weighbridge"))
        .output()
        .expect("weighbridge-upgrade");
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}\n{}", service.log());
    let new: u32 = fs::read_to_string(&pid_file).expect("pid file").trim().parse().expect("pid");
    assert_ne!(new, old);
    service.told(&[&format!("MAINPID={new}"), "READY=1", "WATCHDOG=1"]);
    let ended = ends(process);

    let before = answered.load(Ordering::Relaxed);
    let give_up = Instant::now() + PATIENCE;
    while answered.load(Ordering::Relaxed) < before + 5 && Instant::now() < give_up {
        std::thread::sleep(Duration::from_millis(20));
    }
    stop.store(true, Ordering::Relaxed);
    let failed = client.join().expect("client");
    send("-TERM", new);
    assert!(ended.success(), "the old process ended with {ended}\n{}", service.log());
    assert!(failed.is_empty(), "{} requests failed: {failed:?}\n{}", failed.len(), service.log());
    assert!(answered.load(Ordering::Relaxed) >= before + 5, "the new process answers\n{}", service.log());
    // It is not this test's child: it ends by itself once it has drained.
    while Path::new(&format!("/proc/{new}")).exists() && Instant::now() < give_up + PATIENCE {
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn an_upgrade_to_a_binary_that_does_not_start_leaves_the_old_process_serving() {
    let service = Service::installed();
    let process = service.start();
    let pid = process.0.id();
    service.told(&["READY=1"]);
    // Replaced as a package manager does it: another file under the same name.
    let binary = service.path("usr/bin/weighbridge");
    let broken = service.path("broken");
    fs::write(&broken, "#!/bin/sh\nexit 1\n").expect("write");
    Command::new("chmod").arg("+x").arg(&broken).status().expect("chmod");
    fs::rename(&broken, &binary).expect("replace");
    send("-USR2", pid);
    let give_up = Instant::now() + PATIENCE;
    while !service.log().contains("the successor ended") {
        assert!(Instant::now() < give_up, "{}", service.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    service.ask().expect("an answer");
}
