//! Runs the table: a few cases at a time, those that measure time alone, and a count at the end.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::harness::{files, full_figures};

/// Cases that run beside one another.
const PARALLEL: usize = 4;
/// No case takes longer, not even on a machine with ten other things to do.
const LIMIT: Duration = Duration::from_secs(180);

/// In full, a million requests and eleven minutes of silence are among them.
const LIMIT_IN_FULL: Duration = Duration::from_secs(3600);

/// One entry of the table.
pub struct Case {
    pub id: &'static str,
    /// The sentence that the case proves.
    pub name: &'static str,
    pub run: fn() -> Pin<Box<dyn Future<Output = ()>>>,
    /// Measures time or memory: nothing runs beside it.
    pub alone: bool,
}

/// An entry of the table: the case's function and the sentence that it proves.
macro_rules! case {
    ($id:ident, $name:literal) => {
        $crate::runner::Case { id: stringify!($id), name: $name, run: || Box::pin($id()), alone: false }
    };
    ($id:ident, $name:literal, alone) => {
        $crate::runner::Case { id: stringify!($id), name: $name, run: || Box::pin($id()), alone: true }
    };
}
pub(crate) use case;

thread_local! {
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs the cases that the arguments name (all without any) and exits.
pub fn run(table: Vec<Case>) {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let filters: Vec<&String> = arguments.iter().filter(|a| !a.starts_with('-')).collect();
    complete(&table);
    let all = table.len();
    let chosen: Vec<Case> = table
        .into_iter()
        .filter(|c| filters.is_empty() || filters.iter().any(|f| c.id == f.as_str() || c.name.contains(f.as_str())))
        .collect();
    if arguments.iter().any(|a| a == "--list") {
        for case in &chosen {
            println!("{}: test", case.id);
        }
        return;
    }
    std::panic::set_hook(Box::new(|info| {
        let payload = info.payload();
        let message = payload
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| payload.downcast_ref::<&str>().copied())
            .unwrap_or("a panic without a message");
        let place = info.location().map(ToString::to_string).unwrap_or_default();
        PANIC.set(format!("{place}: {message}"));
    }));
    let started = Instant::now();
    let outcome = run_all(chosen);
    let ran = outcome.failures.len() + outcome.passed;
    println!();
    for (id, message) in &outcome.failures {
        println!("FAILED {id}\n    {}\n", message.replace('\n', "\n    "));
    }
    // As the standard harness says it, so that what adds up its lines adds up these.
    let word = if outcome.failures.is_empty() { "ok" } else { "FAILED" };
    println!("test result: {word}. {} passed; {} failed", outcome.passed, outcome.failures.len());
    let of = if ran == all { format!("{all}") } else { format!("{ran} run ({all} in the table)") };
    println!("field cases: {} passed of {of}, in {:.0} s", outcome.passed, started.elapsed().as_secs_f64());
    // Leaves no time for tasks that hang.
    std::process::exit(i32::from(!outcome.failures.is_empty()));
}

struct Outcome {
    passed: usize,
    failures: Vec<(&'static str, String)>,
}

/// Runs the cases that may be beside others on a few threads, then the rest one by one.
fn run_all(cases: Vec<Case>) -> Outcome {
    let (alone, beside): (Vec<Case>, Vec<Case>) = cases.into_iter().partition(|c| c.alone);
    let mut results = run_on(PARALLEL, beside);
    results.extend(run_on(1, alone));
    let mut outcome = Outcome { passed: 0, failures: Vec::new() };
    for (id, result) in results {
        match result {
            Ok(()) => outcome.passed += 1,
            Err(message) => outcome.failures.push((id, message)),
        }
    }
    outcome
}

fn run_on(threads: usize, cases: Vec<Case>) -> Vec<(&'static str, Result<(), String>)> {
    let waiting = Mutex::new(cases.into_iter());
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let Some(case) = waiting.lock().next() else { return };
                    let result = run_one(&case);
                    results.lock().push((case.id, result));
                }
            });
        }
    });
    results.into_inner()
}

/// Runs one case on a runtime of its own.
fn run_one(case: &Case) -> Result<(), String> {
    let started = Instant::now();
    let limit = if full_figures() { LIMIT_IN_FULL } else { LIMIT };
    let run =
        std::panic::catch_unwind(|| crate::harness::run(async { tokio::time::timeout(limit, (case.run)()).await }));
    let result = match run {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) => Err(format!("not done after {limit:?}")),
        Err(_) => Err(PANIC.take()),
    };
    let word = if result.is_ok() { "ok    " } else { "FAILED" };
    println!("{word} {} {} ({:.1} s)", case.id, case.name, started.elapsed().as_secs_f64());
    result
}

/// Every entry of the collection is in the table once, and nothing else is.
fn complete(table: &[Case]) {
    let entries: BTreeSet<String> = std::fs::read_dir(files::path("field_cases/data"))
        .expect("the cases' directory")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .filter_map(|name| name.strip_suffix(".md").filter(|id| id.starts_with('c')).map(str::to_owned))
        .collect();
    let tested: BTreeSet<String> = table.iter().map(|c| c.id.to_owned()).collect();
    assert_eq!(tested.len(), table.len(), "an entry is in the table twice");
    assert_eq!(entries, tested, "the table and the collection differ");
}
