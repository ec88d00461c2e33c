//! Where log lines go: into memory, and from there to standard output many at a time, by a thread of its own.
//!
//! A write and two wake-ups for each line cost as much as placing the request that it tells of. So a line waits for up
//! to [`BATCH`], or until [`FLUSH_BYTES`] of others have come. A reader that stalls cannot hold up traffic: past
//! [`HELD_BYTES_MAX`] lines are dropped and counted.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tracing_subscriber::fmt::MakeWriter;

/// How long a line may wait for others.
const BATCH: Duration = Duration::from_millis(20);
/// Bytes that are written without waiting any longer.
const FLUSH_BYTES: usize = 64 << 10;
/// Bytes that wait for a reader that does not read; what comes after them is dropped.
const HELD_BYTES_MAX: usize = 8 << 20;

/// The process's log, where it is made of JSON lines.
static JSON_LINES: OnceLock<Lines> = OnceLock::new();

/// A log that lines are added to. Cheap to clone; safe from any thread.
#[derive(Clone, Debug)]
pub struct Lines(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    held: Mutex<Vec<u8>>,
    /// The writer waits here: for a first line, then for the batch to fill.
    more: Condvar,
    dropped: AtomicU64,
    closing: AtomicBool,
}

/// Writes out what is held when it is dropped.
#[derive(Debug)]
pub struct Flush {
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
}

impl Lines {
    /// Starts a log that writes to `out`.
    ///
    /// # Errors
    /// A thread that cannot be started.
    pub fn start(out: impl Write + Send + 'static) -> io::Result<(Lines, Flush)> {
        let shared = Arc::new(Shared {
            held: Mutex::new(Vec::with_capacity(FLUSH_BYTES)),
            more: Condvar::new(),
            dropped: AtomicU64::new(0),
            closing: AtomicBool::new(false),
        });
        let of_writer = Arc::clone(&shared);
        let writer = std::thread::Builder::new().name("log".to_owned()).spawn(move || of_writer.write_to(out))?;
        Ok((Lines(Arc::clone(&shared)), Flush { shared, writer: Some(writer) }))
    }

    /// Adds whole lines, their ends included.
    pub fn add(&self, lines: &[u8]) {
        let mut held = self.0.held.lock();
        if held.len() + lines.len() > HELD_BYTES_MAX {
            self.0.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let (before, after) = (held.len(), held.len() + lines.len());
        held.extend_from_slice(lines);
        drop(held);
        if before == 0 || (before < FLUSH_BYTES && after >= FLUSH_BYTES) {
            self.0.more.notify_one();
        }
    }

    /// Makes this the log that [`json_lines`] gives; a second one is ignored.
    pub fn is_json(&self) {
        let _ = JSON_LINES.set(self.clone());
    }
}

/// The process's log, where it is made of JSON lines.
pub fn json_lines() -> Option<&'static Lines> {
    JSON_LINES.get()
}

impl Shared {
    fn write_to(&self, mut out: impl Write) {
        let mut lines = Vec::with_capacity(FLUSH_BYTES);
        loop {
            let mut held = self.held.lock();
            while held.is_empty() {
                if self.closing.load(Ordering::Acquire) {
                    return;
                }
                self.more.wait(&mut held);
            }
            if held.len() < FLUSH_BYTES && !self.closing.load(Ordering::Acquire) {
                self.more.wait_for(&mut held, BATCH);
            }
            std::mem::swap(&mut *held, &mut lines);
            drop(held);
            // Nobody can be told that the log cannot be written, and traffic goes on without it.
            let _ = out.write_all(&lines).and_then(|()| out.flush());
            lines.clear();
            // One burst does not hold its memory for ever.
            lines.shrink_to(FLUSH_BYTES);
            let dropped = self.dropped.swap(0, Ordering::Relaxed);
            if dropped > 0 {
                tracing::warn!(dropped, "log lines were dropped: whoever reads the log is too slow");
            }
        }
    }
}

impl Drop for Flush {
    fn drop(&mut self) {
        {
            let _held = self.shared.held.lock();
            self.shared.closing.store(true, Ordering::Release);
        }
        self.shared.more.notify_one();
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

/// One event's line, added when it is complete.
#[derive(Debug)]
pub struct Line<'a> {
    lines: &'a Lines,
    text: Vec<u8>,
}

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line<'_> {
    fn drop(&mut self) {
        if !self.text.is_empty() {
            self.lines.add(&self.text);
        }
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line { lines: self, text: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Tells each write, and waits to be let on before the first.
    struct Gate {
        writes: mpsc::Sender<Vec<u8>>,
        open: Option<mpsc::Receiver<()>>,
    }

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if let Some(open) = self.open.take() {
                open.recv().ok();
            }
            self.writes.send(bytes.to_vec()).ok();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_are_written_whole_in_their_order_and_many_at_a_time() {
        let (writes, written) = mpsc::channel();
        let (lines, flush) = Lines::start(Gate { writes, open: None }).unwrap();
        for i in 0..1000 {
            lines.add(format!("line {i}\n").as_bytes());
        }
        drop(flush);
        let written: Vec<Vec<u8>> = written.iter().collect();
        assert!(written.len() < 100, "{} writes", written.len());
        let expected: String = (0..1000).map(|i| format!("line {i}\n")).collect();
        assert_eq!(String::from_utf8(written.concat()).unwrap(), expected);
    }

    #[test]
    fn a_single_line_does_not_wait_for_another() {
        let (writes, written) = mpsc::channel();
        let (lines, _flush) = Lines::start(Gate { writes, open: None }).unwrap();
        lines.add(b"alone\n");
        assert_eq!(written.recv_timeout(Duration::from_secs(10)).unwrap(), b"alone\n");
    }

    #[test]
    fn a_reader_that_stalls_costs_lines_and_no_memory_past_the_bound() {
        let (writes, written) = mpsc::channel();
        let (open, wait) = mpsc::channel();
        let (lines, flush) = Lines::start(Gate { writes, open: Some(wait) }).unwrap();
        let line = [&[b'x'; 1023][..], b"\n"].concat();
        let added = 3 * HELD_BYTES_MAX / line.len();
        for _ in 0..added {
            lines.add(&line);
        }
        assert!(lines.0.dropped.load(Ordering::Relaxed) > 0);
        open.send(()).unwrap();
        drop(flush);
        let bytes: usize = written.iter().map(|write| write.len()).sum();
        assert!(bytes <= 2 * HELD_BYTES_MAX && bytes.is_multiple_of(line.len()), "{bytes}");
    }
}
