//! Where log lines go: into memory, and from there to standard output many at a time, by a thread of its own.
//!
//! A write and two wake-ups for each line cost as much as placing the request that it tells of. So a line waits for up
//! to [`BATCH`], or until [`FLUSH_BYTES`] of others have come. A reader that stalls cannot hold up traffic: past
//! [`HELD_BYTES_MAX`] lines are dropped and counted.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tracing_subscriber::fmt::MakeWriter;

/// How long a line may wait for others.
const BATCH: Duration = Duration::from_millis(20);
/// Bytes that are written without waiting any longer.
const FLUSH_BYTES: usize = 64 << 10;
/// Bytes that wait for a reader that does not read; what comes after them is dropped.
const HELD_BYTES_MAX: usize = 8 << 20;
/// Whole lines of so many bytes go out in one write: what a pipe takes in one piece (PIPE_BUF), since during an upgrade
/// two processes write to the same one.
const WRITE_BYTES: usize = 4096;
/// How long a reader that takes nothing is waited for when the process ends.
const LAST_LINES: Duration = Duration::from_secs(1);
/// Where standard output does not block, how long until it is tried again.
const FULL_PAUSE: Duration = Duration::from_millis(5);

/// The process's log, and whether it is made of JSON lines.
static PROCESS: OnceLock<(Lines, bool)> = OnceLock::new();

/// A log that lines are added to. Cheap to clone; safe from any thread.
#[derive(Clone, Debug)]
pub struct Lines(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    held: Mutex<Held>,
    /// The writer waits here: for a first line, then for the batch to fill.
    more: Condvar,
    /// Who wants everything written waits here.
    written: Condvar,
    dropped: AtomicU64,
    /// Somebody wants everything written.
    urgent: AtomicBool,
}

#[derive(Debug)]
struct Held {
    lines: Vec<u8>,
    /// The writer has some that it did not finish writing.
    writing: bool,
}

/// Writes out what is held when it is dropped, within a second.
#[derive(Debug)]
pub struct Flush(Lines);

impl Lines {
    /// Starts a log that writes to `out`.
    ///
    /// # Errors
    /// A thread that cannot be started.
    pub fn start(out: impl Write + Send + 'static) -> io::Result<(Lines, Flush)> {
        let shared = Arc::new(Shared {
            held: Mutex::new(Held { lines: Vec::with_capacity(FLUSH_BYTES), writing: false }),
            more: Condvar::new(),
            written: Condvar::new(),
            dropped: AtomicU64::new(0),
            urgent: AtomicBool::new(false),
        });
        let of_writer = Arc::clone(&shared);
        // It ends with the process: a reader that stalls must not hold that up.
        std::thread::Builder::new().name("log".to_owned()).spawn(move || of_writer.write_to(out))?;
        let lines = Lines(shared);
        Ok((lines.clone(), Flush(lines)))
    }

    /// Adds whole lines, their ends included.
    pub fn add(&self, lines: &[u8]) {
        let mut held = self.0.held.lock();
        let (before, after) = (held.lines.len(), held.lines.len() + lines.len());
        if after > HELD_BYTES_MAX {
            self.0.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        held.lines.extend_from_slice(lines);
        drop(held);
        if before == 0 || (before < FLUSH_BYTES && after >= FLUSH_BYTES) {
            self.0.more.notify_one();
        }
    }

    /// Makes this the process's log; a second one is ignored.
    pub fn is_the_process_s(&self, json: bool) {
        let _ = PROCESS.set((self.clone(), json));
    }

    /// Writes out what is held. Blocks until that is done, or for this long.
    pub fn flush(&self, within: Duration) {
        let until = Instant::now() + within;
        let mut held = self.0.held.lock();
        self.0.urgent.store(true, Ordering::Release);
        self.0.more.notify_one();
        while held.writing || !held.lines.is_empty() {
            if self.0.written.wait_until(&mut held, until).timed_out() {
                break;
            }
        }
        self.0.urgent.store(false, Ordering::Release);
    }
}

/// The process's log, where it is made of JSON lines.
pub fn json_lines() -> Option<&'static Lines> {
    PROCESS.get().and_then(|(lines, json)| json.then_some(lines))
}

/// Writes out what the process's log holds, within a second: before the process ends.
pub fn flush() {
    if let Some((lines, _)) = PROCESS.get() {
        lines.flush(LAST_LINES);
    }
}

impl Shared {
    fn write_to(&self, mut out: impl Write) {
        let mut lines = Vec::with_capacity(FLUSH_BYTES);
        loop {
            let mut held = self.held.lock();
            held.writing = false;
            self.written.notify_all();
            while held.lines.is_empty() {
                self.more.wait(&mut held);
            }
            if held.lines.len() < FLUSH_BYTES && !self.urgent.load(Ordering::Acquire) {
                self.more.wait_for(&mut held, BATCH);
            }
            std::mem::swap(&mut held.lines, &mut lines);
            held.writing = true;
            drop(held);
            let mut rest = &lines[..];
            while !rest.is_empty() {
                let (piece, others) = rest.split_at(whole_lines(rest));
                // Nobody can be told that the log cannot be written, and traffic goes on without it.
                if write_piece(&mut out, piece).is_err() {
                    self.dropped.fetch_add(1, Ordering::Relaxed);
                }
                rest = others;
            }
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

/// Bytes of the whole lines that go out in one write; a longer line goes alone.
fn whole_lines(lines: &[u8]) -> usize {
    let first = &lines[..lines.len().min(WRITE_BYTES)];
    match memchr::memrchr(b'\n', first) {
        Some(end) => end + 1,
        None => memchr::memchr(b'\n', lines).map_or(lines.len(), |end| end + 1),
    }
}

fn write_piece(out: &mut impl Write, mut piece: &[u8]) -> io::Result<()> {
    while !piece.is_empty() {
        match out.write(piece) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => piece = &piece[n..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(FULL_PAUSE),
            Err(e) => return Err(e),
        }
    }
    out.flush()
}

impl Drop for Flush {
    fn drop(&mut self) {
        self.0.flush(LAST_LINES);
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
        let written: Vec<Vec<u8>> = written.try_iter().collect();
        assert!(written.len() < 100, "{} writes", written.len());
        assert!(written.iter().all(|write| write.len() <= WRITE_BYTES && write.ends_with(b"\n")));
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
        let begun = Instant::now();
        lines.flush(Duration::from_millis(50));
        assert!(begun.elapsed() < Duration::from_secs(10), "a reader that stalls holds nobody up");
        open.send(()).unwrap();
        lines.flush(Duration::from_secs(60));
        drop(flush);
        let bytes: usize = written.try_iter().map(|write| write.len()).sum();
        assert!(bytes <= 2 * HELD_BYTES_MAX && bytes.is_multiple_of(line.len()), "{bytes}");
    }
}
