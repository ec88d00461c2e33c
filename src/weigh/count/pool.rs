//! A fixed number of threads for work too long for the event loop, with a bounded queue.
//!
//! Not the runtime's blocking pool, which grows without bound and is shared with file access.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Jobs that may wait. Past it, prompts are estimated: at some 5 ms a job this is a third of a second for one thread.
pub const QUEUE_JOBS_MAX: usize = 64;

type Job = Box<dyn FnOnce() + Send>;

/// The pool; its threads end when the last handle is dropped.
#[derive(Debug)]
pub struct Pool {
    jobs: SyncSender<Job>,
    threads: usize,
}

impl Pool {
    /// A pool of a quarter of the machine's cores, at least one thread.
    pub fn new() -> Arc<Pool> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self::with_threads((cores / 4).max(1))
    }

    /// A pool of this many threads.
    pub fn with_threads(threads: usize) -> Arc<Pool> {
        let (jobs, queue) = sync_channel::<Job>(QUEUE_JOBS_MAX);
        let queue = Arc::new(Mutex::new(queue));
        for i in 0..threads {
            let queue = Arc::clone(&queue);
            // A machine that cannot start a thread counts by approximation: the queue fills and stays full.
            let _ = thread::Builder::new().name(format!("weigh-{i}")).spawn(move || work(&queue));
        }
        Arc::new(Pool { jobs, threads })
    }

    /// Threads of the pool.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Queues a job; `false` where the queue is full, and the job is then dropped.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) -> bool {
        match self.jobs.try_send(Box::new(job)) {
            Ok(()) => true,
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => false,
        }
    }
}

fn work(queue: &Mutex<Receiver<Job>>) {
    loop {
        let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        match job {
            // A job that panics loses its own answer, which its asker sees; the thread goes on.
            Ok(job) => drop(std::panic::catch_unwind(std::panic::AssertUnwindSafe(job))),
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_job_that_panics_takes_no_thread_with_it() {
        let pool = Pool::with_threads(1);
        let (done, answers) = channel();
        assert!(pool.run(|| std::panic::resume_unwind(Box::new("no message"))));
        assert!(pool.run(move || done.send(7).unwrap()));
        assert_eq!(answers.recv().unwrap(), 7);
    }

    #[test]
    fn a_full_queue_refuses_and_does_not_wait() {
        let pool = Pool::with_threads(1);
        let (release, gate) = channel::<()>();
        let (started, running) = channel::<()>();
        assert!(pool.run(move || {
            started.send(()).unwrap();
            let _ = gate.recv();
        }));
        running.recv().unwrap();
        for _ in 0..QUEUE_JOBS_MAX {
            assert!(pool.run(|| {}));
        }
        assert!(!pool.run(|| {}));
        drop(release);
    }
}
