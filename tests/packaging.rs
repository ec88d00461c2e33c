//! What `make install` and the Debian package put on a machine, checked by systemd's own tools.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// `systemd-analyze security` gives 0 (safe) to 10 (exposed); the unit stands at 1.4.
const EXPOSURE_MAX_TENTHS: u32 = 15;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// A directory with everything `scripts/install.sh` installs.
fn installed(prefix: &str) -> TempDir {
    let dest = tempfile::tempdir().expect("temporary directory");
    let output = Command::new(root().join("scripts/install.sh"))
        .arg(env!("CARGO_BIN_EXE_weighbridge"))
        .env("DESTDIR", dest.path())
        .env("PREFIX", prefix)
        .env_remove("SYSCONFDIR")
        .output()
        .expect("install.sh");
    assert!(output.status.success(), "{}", said(&output));
    dest
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn run(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"))
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).permissions().mode() & 0o777
}

#[test]
fn an_installation_has_every_part_and_the_configuration_is_not_for_everyone() {
    let dest = installed("/usr");
    for (path, expected) in [
        ("usr/bin/weighbridge", 0o755),
        ("usr/bin/weighbridge-upgrade", 0o755),
        ("usr/lib/systemd/system/weighbridge.service", 0o644),
        ("usr/lib/sysusers.d/weighbridge.conf", 0o644),
        ("usr/lib/tmpfiles.d/weighbridge.conf", 0o644),
        ("usr/share/doc/weighbridge/README.md", 0o644),
        ("usr/share/doc/weighbridge/operations.md", 0o644),
        ("usr/share/doc/weighbridge/weighbridge.example.yaml", 0o644),
        ("etc/weighbridge/weighbridge.yaml", 0o640),
    ] {
        assert_eq!(mode(&dest.path().join(path)), expected, "{path}");
    }
}

#[test]
fn a_second_installation_leaves_the_configuration_alone() {
    let dest = installed("/usr");
    let config = dest.path().join("etc/weighbridge/weighbridge.yaml");
    fs::write(&config, "mine").expect("write");
    let again = Command::new(root().join("scripts/install.sh"))
        .arg(env!("CARGO_BIN_EXE_weighbridge"))
        .env("DESTDIR", dest.path())
        .env("PREFIX", "/usr")
        .output()
        .expect("install.sh");
    assert!(again.status.success(), "{}", said(&again));
    assert_eq!(fs::read_to_string(&config).expect("read"), "mine");
}

#[test]
fn systemd_finds_nothing_wrong_with_the_installed_unit() {
    for prefix in ["/usr", "/usr/local"] {
        let dest = installed(prefix);
        // `verify` looks for every command under the root; /bin/kill is the system's.
        fs::create_dir_all(dest.path().join("bin")).expect("bin");
        fs::copy("/bin/kill", dest.path().join("bin/kill")).expect("kill");
        let unit = format!("{prefix}/lib/systemd/system/weighbridge.service");
        let root = format!("--root={}", dest.path().display());
        let output = run("systemd-analyze", &["verify", &root, "--man=no", "--recursive-errors=no", &unit]);
        assert!(output.status.success() && said(&output).is_empty(), "{}", said(&output));
    }
}

#[test]
fn the_unit_leaves_the_service_hardly_anything_to_attack_the_machine_with() {
    let unit = root().join("systemd/weighbridge.service");
    let threshold = format!("--threshold={EXPOSURE_MAX_TENTHS}");
    let output =
        run("systemd-analyze", &["security", "--offline=true", "--no-pager", &threshold, unit.to_str().expect("path")]);
    assert!(output.status.success(), "{}", said(&output));
}

#[test]
fn sysusers_makes_a_user_without_a_shell() {
    let dest = installed("/usr");
    let root = format!("--root={}", dest.path().display());
    let output = run("systemd-sysusers", &[&root, "--dry-run", "weighbridge.conf"]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("Creating user 'weighbridge'"), "{}", said(&output));
    let rule = fs::read_to_string(dest.path().join("usr/lib/sysusers.d/weighbridge.conf")).expect("rule");
    assert!(rule.trim_end().ends_with(" /usr/sbin/nologin"), "{rule}");
}

#[test]
fn tmpfiles_locks_the_configuration_and_the_keys_beside_it() {
    let dest = installed("/usr");
    // Whoever runs the tests may not give files to another user: the rule is tried with that user in the place of both.
    let rule = dest.path().join("usr/lib/tmpfiles.d/weighbridge.conf");
    let text = fs::read_to_string(&rule).expect("rule");
    assert_eq!(text.matches(" root weighbridge ").count(), 2, "{text}");
    let id = |what| String::from_utf8_lossy(&run("id", &[what]).stdout).trim().to_owned();
    fs::write(&rule, text.replace(" root weighbridge ", &format!(" {} {} ", id("-u"), id("-g")))).expect("write");

    let config = dest.path().join("etc/weighbridge");
    fs::write(config.join("key"), "secret").expect("write");
    for (path, open) in [(config.clone(), 0o755), (config.join("key"), 0o644)] {
        fs::set_permissions(path, fs::Permissions::from_mode(open)).expect("chmod");
    }
    let root = format!("--root={}", dest.path().display());
    let output = run("systemd-tmpfiles", &[&root, "--create", "weighbridge.conf"]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!((mode(&config), mode(&config.join("key"))), (0o750, 0o640));
}

#[test]
fn the_stop_timeout_of_the_unit_is_above_the_default_grace() {
    let unit = fs::read_to_string(root().join("systemd/weighbridge.service")).expect("unit");
    let seconds: u64 = unit
        .lines()
        .find_map(|line| line.strip_prefix("TimeoutStopSec=")?.strip_suffix('s')?.parse().ok())
        .expect("TimeoutStopSec in seconds");
    let shutdown = weighbridge::config::Shutdown::default();
    assert!(seconds > (shutdown.drain_window + shutdown.grace).as_secs());
}

#[test]
fn the_debian_package_and_make_install_install_the_same_files() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).expect("Cargo.toml");
    let assets = manifest.split("assets = [").nth(1).and_then(|rest| rest.split("\n]").next()).expect("assets");
    let mut packaged: BTreeSet<String> = assets
        .lines()
        .filter_map(|line| {
            let mut quoted = line.split('"').skip(1).step_by(2);
            let (source, target) = (quoted.next()?, quoted.next()?);
            let name = Path::new(source).file_name()?.to_str()?;
            Some(if target.ends_with('/') { format!("{target}{name}") } else { target.to_owned() })
        })
        .filter(|path| !path.contains('*'))
        .collect();
    // cargo-deb finds unit and sysusers by itself, and docs by a pattern.
    packaged.insert("usr/lib/systemd/system/weighbridge.service".to_owned());
    packaged.insert("usr/lib/sysusers.d/weighbridge.conf".to_owned());

    let dest = installed("/usr");
    let listing = run("find", &[dest.path().to_str().expect("path"), "-type", "f", "-printf", "%P\n"]);
    let by_make: BTreeSet<String> = String::from_utf8_lossy(&listing.stdout)
        .lines()
        .filter(|path| !path.starts_with("usr/share/doc/weighbridge/") || packaged.contains(*path))
        .map(str::to_owned)
        .collect();
    assert_eq!(packaged, by_make);
}
