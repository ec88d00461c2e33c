//! Watches files for changes of what they hold, however the change is made.
//!
//! An editor renames a new file over the old one, or truncates and writes; Kubernetes swaps a symbolic link two
//! directories up (`..data`); a network file system tells nobody. So directories are watched, not files; what counts
//! is whether the *content* is another; and a slow poll stands behind the notifications.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use notify::{RecursiveMode, Watcher};

/// Quiet time after an event before the files are read: a save is several events.
const DEBOUNCE: Duration = Duration::from_millis(150);

/// How much longer a file of no length is given to be written: some editors truncate first.
const TRUNCATED: Duration = Duration::from_millis(500);

/// A poll of the files' metadata, for file systems that do not notify.
const POLL: Duration = Duration::from_secs(2);

enum Tell {
    Event,
    Stop,
}

/// Watches until it is dropped.
#[derive(Debug)]
pub struct Watch {
    stop: Sender<Tell>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.stop.send(Tell::Stop);
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// Calls `changed` whenever one of `paths` holds something else than before, one call at a time, from a thread of its
/// own. A file that is gone or empty counts as changed as well: the callback says why it cannot use it. Where the
/// system gives no notifications, polling alone goes on.
///
/// # Errors
/// The thread cannot be started.
pub fn watch(paths: &[PathBuf], changed: impl Fn() + Send + 'static) -> std::io::Result<Watch> {
    let (tell, told) = mpsc::channel();
    let paths = paths.to_vec();
    let mut seen: Vec<Content> = paths.iter().map(|p| Content::of(p)).collect();
    let mut stamps: Vec<Stamp> = paths.iter().map(|p| Stamp::of(p)).collect();
    let events = tell.clone();
    let thread = std::thread::Builder::new().name("watch".to_owned()).spawn(move || {
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // Reading a file is an event too, and the reads are our own.
            if !matches!(event, Ok(ref e) if e.kind.is_access()) {
                let _ = events.send(Tell::Event);
            }
        })
        .inspect_err(|e| tracing::warn!(error = %e, "no file notifications: polling"))
        .ok();
        let mut watched = BTreeSet::new();
        loop {
            if let Some(watcher) = &mut watcher {
                watch_directories(watcher, &paths, &mut watched);
            }
            match told.recv_timeout(POLL) {
                Ok(Tell::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Ok(Tell::Event) => {
                    if !settle(&told, DEBOUNCE) {
                        return;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    let now: Vec<Stamp> = paths.iter().map(|p| Stamp::of(p)).collect();
                    if now == stamps {
                        continue;
                    }
                }
            }
            let mut now: Vec<Content> = paths.iter().map(|p| Content::of(p)).collect();
            if now != seen && now.contains(&Content::Nothing) {
                if !settle(&told, TRUNCATED) {
                    return;
                }
                now = paths.iter().map(|p| Content::of(p)).collect();
            }
            stamps = paths.iter().map(|p| Stamp::of(p)).collect();
            if now != seen {
                seen = now;
                changed();
            }
        }
    })?;
    Ok(Watch { stop: tell, thread: Some(thread) })
}

/// Waits until no event has come for `quiet`, ten times as long at most; `false` where it is to stop.
fn settle(told: &mpsc::Receiver<Tell>, quiet: Duration) -> bool {
    let end = Instant::now() + quiet * 10;
    while Instant::now() < end {
        match told.recv_timeout(quiet) {
            Ok(Tell::Event) => {}
            Ok(Tell::Stop) | Err(RecvTimeoutError::Disconnected) => return false,
            Err(RecvTimeoutError::Timeout) => return true,
        }
    }
    true
}

/// Watches the directory of each file, and that of each file or directory a link on the way leads to.
fn watch_directories(watcher: &mut impl Watcher, paths: &[PathBuf], watched: &mut BTreeSet<PathBuf>) {
    let mut wanted = BTreeSet::new();
    for path in paths {
        wanted.insert(parent(path));
        if let Ok(real) = path.canonicalize() {
            wanted.insert(parent(&real));
        }
    }
    for gone in watched.difference(&wanted).cloned().collect::<Vec<_>>() {
        let _ = watcher.unwatch(&gone);
        watched.remove(&gone);
    }
    for new in wanted {
        if !watched.contains(&new) && watcher.watch(&new, RecursiveMode::NonRecursive).is_ok() {
            watched.insert(new);
        }
    }
}

fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// What a poll compares: cheap, and another whenever the content may be.
#[derive(Debug, PartialEq)]
struct Stamp(Option<(PathBuf, u64, Option<SystemTime>)>);

impl Stamp {
    fn of(path: &Path) -> Stamp {
        let real = path.canonicalize().ok();
        Stamp(real.and_then(|real| {
            let meta = real.metadata().ok()?;
            Some((real, meta.len(), meta.modified().ok()))
        }))
    }
}

#[derive(Debug, PartialEq)]
enum Content {
    /// Not there, or of no length.
    Nothing,
    Hash(u128),
}

impl Content {
    fn of(path: &Path) -> Content {
        match std::fs::read(path) {
            Ok(bytes) if !bytes.is_empty() => Content::Hash(xxhash_rust::xxh3::xxh3_128(&bytes)),
            _ => Content::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bench {
        dir: tempfile::TempDir,
        told: mpsc::Receiver<String>,
        _watch: Watch,
    }

    fn bench(prepare: impl FnOnce(&Path), file: &str) -> Bench {
        let dir = tempfile::tempdir().unwrap();
        prepare(dir.path());
        let path = dir.path().join(file);
        let (tell, told) = mpsc::channel();
        let watch = watch(std::slice::from_ref(&path.clone()), move || {
            let _ = tell.send(std::fs::read_to_string(&path).unwrap_or_default());
        });
        std::thread::sleep(Duration::from_millis(100));
        Bench { dir, told, _watch: watch.unwrap() }
    }

    impl Bench {
        fn told(&self) -> String {
            self.told.recv_timeout(Duration::from_secs(5)).expect("a change is told within a poll and its debounce")
        }

        fn silent(&self) {
            assert_eq!(self.told.recv_timeout(Duration::from_millis(600)), Err(RecvTimeoutError::Timeout));
        }
    }

    #[test]
    fn a_write_and_a_rename_over_it_are_told_once_each() {
        let b = bench(|d| std::fs::write(d.join("c.yaml"), "1").unwrap(), "c.yaml");
        std::fs::write(b.dir.path().join("c.yaml"), "2").unwrap();
        assert_eq!(b.told(), "2");
        std::fs::write(b.dir.path().join("c.tmp"), "3").unwrap();
        std::fs::rename(b.dir.path().join("c.tmp"), b.dir.path().join("c.yaml")).unwrap();
        assert_eq!(b.told(), "3");
        b.silent();
    }

    #[test]
    fn a_save_that_changes_nothing_is_not_told() {
        let b = bench(|d| std::fs::write(d.join("c.yaml"), "1").unwrap(), "c.yaml");
        std::fs::write(b.dir.path().join("c.yaml"), "1").unwrap();
        std::fs::write(b.dir.path().join("other"), "2").unwrap();
        b.silent();
    }

    #[test]
    fn a_file_truncated_and_then_written_is_told_when_it_is_written() {
        let b = bench(|d| std::fs::write(d.join("c.yaml"), "1").unwrap(), "c.yaml");
        std::fs::write(b.dir.path().join("c.yaml"), "").unwrap();
        std::thread::sleep(Duration::from_millis(300));
        std::fs::write(b.dir.path().join("c.yaml"), "2").unwrap();
        assert_eq!(b.told(), "2");
        std::fs::write(b.dir.path().join("c.yaml"), "").unwrap();
        assert_eq!(b.told(), "", "one that stays empty is told as well");
        std::fs::remove_file(b.dir.path().join("c.yaml")).unwrap();
        std::fs::write(b.dir.path().join("c.yaml"), "4").unwrap();
        assert_eq!(b.told(), "4");
    }

    #[test]
    fn a_config_maps_symlink_swap_is_told() {
        use std::os::unix::fs::symlink;
        let b = bench(
            |d| {
                for (version, text) in [("v1", "1"), ("v2", "2"), ("v3", "3")] {
                    std::fs::create_dir(d.join(version)).unwrap();
                    std::fs::write(d.join(version).join("c.yaml"), text).unwrap();
                }
                symlink("v1", d.join("..data")).unwrap();
                symlink("..data/c.yaml", d.join("c.yaml")).unwrap();
            },
            "c.yaml",
        );
        for (version, text) in [("v2", "2"), ("v3", "3")] {
            symlink(version, b.dir.path().join("..tmp")).unwrap();
            std::fs::rename(b.dir.path().join("..tmp"), b.dir.path().join("..data")).unwrap();
            assert_eq!(b.told(), text);
        }
    }
}
