//! A tolerant reader: takes what is right, writes down everything that is not, and goes on.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_yaml::{Mapping, Value};

use super::error::{ConfigError, Errors};
use super::locate::{self, Step};

/// Longest span a configuration may name, one year: past it is a slip of the pen, and sums cannot overflow.
const DURATION_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// How like a known name an unknown one must be to be offered as its correction (Jaro-Winkler, 0 to 1).
const SIMILAR: f64 = 0.7;

#[derive(Debug)]
struct Problem {
    path: Vec<Step>,
    at_key: bool,
    problem: String,
    allowed: Option<String>,
}

/// Where the faults of one text are collected.
#[derive(Debug)]
pub(super) struct Sink {
    problems: RefCell<Vec<Problem>>,
    /// What relative paths are relative to.
    pub(super) base: PathBuf,
}

impl Sink {
    pub(super) fn new(base: &Path) -> Sink {
        Sink { problems: RefCell::default(), base: base.to_owned() }
    }

    /// The faults with their lines, in the order of the text; `None` where there are none.
    pub(super) fn errors(self, file: &str, text: &str) -> Option<Errors> {
        let mut errors: Vec<ConfigError> = self
            .problems
            .into_inner()
            .into_iter()
            .map(|p| ConfigError {
                file: file.to_owned(),
                line: locate::line(text, &p.path, p.at_key),
                path: locate::show(&p.path),
                problem: p.problem,
                allowed: p.allowed,
            })
            .collect();
        errors.sort_by_key(|e| e.line);
        (!errors.is_empty()).then_some(Errors(errors))
    }
}

/// A value of the text and the place it stands at.
#[derive(Clone, Debug)]
pub(super) struct Node<'a> {
    value: &'a Value,
    path: Vec<Step>,
    pub(super) sink: &'a Sink,
}

impl<'a> Node<'a> {
    pub(super) fn root(value: &'a Value, sink: &'a Sink) -> Node<'a> {
        Node { value, path: Vec::new(), sink }
    }

    /// Writes down a fault at this value.
    pub(super) fn fail(&self, problem: impl Into<String>, allowed: Option<String>) {
        self.report(&self.path, false, problem.into(), allowed);
    }

    fn report(&self, path: &[Step], at_key: bool, problem: String, allowed: Option<String>) {
        self.sink.problems.borrow_mut().push(Problem { path: path.to_vec(), at_key, problem, allowed });
    }

    /// Writes down that the value itself is wrong.
    pub(super) fn wrong(&self, allowed: &str) {
        self.fail(format!("found {}", describe(self.value)), Some(allowed.to_owned()));
    }

    /// Writes down that a name is not known, with the nearest that is.
    pub(super) fn unknown<'k>(&self, what: &str, found: &str, known: impl IntoIterator<Item = &'k str>) {
        let known: Vec<&str> = known.into_iter().collect();
        self.fail(format!("unknown {what} `{found}`{}", did_you_mean(found, &known)), Some(listed(&known)));
    }

    pub(super) fn is_map(&self) -> bool {
        self.value.is_mapping()
    }

    pub(super) fn is_list(&self) -> bool {
        self.value.is_sequence()
    }

    /// The value as it stands, where it is text.
    pub(super) fn as_text(&self) -> Option<&'a str> {
        self.value.as_str()
    }

    pub(super) fn as_u64(&self) -> Option<u64> {
        self.value.as_u64()
    }

    pub(super) fn map(&self, known: &'static [&'static str]) -> Option<Map<'a>> {
        let Value::Mapping(entries) = self.value else {
            self.wrong(&format!("a mapping with keys {}", listed(known)));
            return None;
        };
        for key in entries.keys() {
            let name = match key {
                Value::String(name) => name.clone(),
                other => describe(other),
            };
            if !known.contains(&name.as_str()) {
                let mut path = self.path.clone();
                path.push(Step::Key(name.clone()));
                self.report(
                    &path,
                    true,
                    format!("unknown key `{name}`{}", did_you_mean(&name, known)),
                    Some(listed(known)),
                );
            }
        }
        Some(Map { entries, node: self.clone(), known })
    }

    /// A mapping whose keys are names of the writer's own.
    pub(super) fn entries(&self, allowed: &str) -> Vec<(String, Node<'a>)> {
        let Value::Mapping(entries) = self.value else {
            self.wrong(allowed);
            return Vec::new();
        };
        let mut found = Vec::new();
        for (key, value) in entries {
            match key.as_str() {
                Some(name) => found.push((name.to_owned(), self.child(value, Step::Key(name.to_owned())))),
                None => self.fail(format!("found the key {}", describe(key)), Some("text as a key".to_owned())),
            }
        }
        found
    }

    /// The mapping without a word about its keys, where it was read before.
    pub(super) fn map_quietly(&self) -> Option<Map<'a>> {
        let Value::Mapping(entries) = self.value else { return None };
        Some(Map { entries, node: self.clone(), known: &[] })
    }

    /// The items of a list without a word where it is none.
    pub(super) fn children(&self) -> Vec<Node<'a>> {
        let Value::Sequence(items) = self.value else { return Vec::new() };
        items.iter().enumerate().map(|(i, v)| self.child(v, Step::Index(i))).collect()
    }

    fn child(&self, value: &'a Value, step: Step) -> Node<'a> {
        let mut path = self.path.clone();
        path.push(step);
        Node { value, path, sink: self.sink }
    }

    pub(super) fn list(&self, of: &str) -> Vec<Node<'a>> {
        let Value::Sequence(items) = self.value else {
            self.wrong(&format!("a list of {of}"));
            return Vec::new();
        };
        items.iter().enumerate().map(|(i, v)| self.child(v, Step::Index(i))).collect()
    }

    pub(super) fn text(&self) -> Option<String> {
        match self.value {
            Value::String(text) if !text.trim().is_empty() => Some(text.clone()),
            Value::Number(_) | Value::Bool(_) => {
                self.wrong("text (put it into quotes)");
                None
            }
            _ => {
                self.wrong("text, not empty");
                None
            }
        }
    }

    pub(super) fn texts(&self, of: &str) -> Vec<(String, Node<'a>)> {
        self.list(of).into_iter().filter_map(|n| n.text().map(|t| (t, n))).collect()
    }

    pub(super) fn bool(&self) -> Option<bool> {
        match self.value {
            Value::Bool(b) => Some(*b),
            // YAML 1.1's spellings, which people and their tools still write.
            Value::String(s) if matches!(s.to_ascii_lowercase().as_str(), "yes" | "on") => Some(true),
            Value::String(s) if matches!(s.to_ascii_lowercase().as_str(), "no" | "off") => Some(false),
            _ => {
                self.wrong("true or false");
                None
            }
        }
    }

    pub(super) fn uint(&self, range: RangeInclusive<u64>) -> Option<u64> {
        let found = self.value.as_u64().filter(|n| range.contains(n));
        if found.is_none() {
            let (low, high) = (range.start(), range.end());
            self.wrong(&match *high {
                u64::MAX => format!("a whole number, at least {low}"),
                _ => format!("a whole number from {low} to {high}"),
            });
        }
        found
    }

    /// A finite number above zero.
    pub(super) fn positive(&self, unit: &str) -> Option<f64> {
        let found = self.value.as_f64().filter(|n| n.is_finite() && *n > 0.0);
        if found.is_none() {
            self.wrong(&format!("a number of {unit} above 0"));
        }
        found
    }

    /// A finite number, zero allowed.
    pub(super) fn not_negative(&self, unit: &str) -> Option<f64> {
        let found = self.value.as_f64().filter(|n| n.is_finite() && *n >= 0.0);
        if found.is_none() {
            self.wrong(&format!("a number of {unit} from 0"));
        }
        found
    }

    /// A share written as `0.1` or `10%`.
    pub(super) fn share(&self, zero: bool) -> Option<f64> {
        let number = match self.value {
            Value::String(text) => {
                text.trim().strip_suffix('%').and_then(|n| n.trim().parse::<f64>().ok()).map(|n| n / 100.0)
            }
            other => other.as_f64(),
        };
        let found = number.filter(|n| n.is_finite() && *n <= 1.0 && if zero { *n >= 0.0 } else { *n > 0.0 });
        if found.is_none() {
            let low = if zero { "from 0" } else { "above 0" };
            self.wrong(&format!("a share {low} to 1, or as a percentage such as 10%"));
        }
        found
    }

    pub(super) fn duration(&self, zero: bool) -> Option<Duration> {
        let found = match self.value {
            Value::String(text) => humantime::parse_duration(text.trim()).ok(),
            Value::Number(n) if n.as_u64() == Some(0) => Some(Duration::ZERO),
            _ => None,
        };
        let found = found.filter(|d| *d <= DURATION_MAX && (zero || !d.is_zero()));
        if found.is_none() {
            let what = if zero { "a time with its unit" } else { "a time above 0 with its unit" };
            self.wrong(&format!("{what}, at most 365 days: 90ms, 30s, 5m, 1h"));
        }
        found
    }

    /// A time, or `off`.
    pub(super) fn duration_or_off(&self) -> Option<Option<Duration>> {
        match self.value {
            Value::Bool(false) => Some(None),
            Value::String(text) if matches!(text.as_str(), "off" | "no") => Some(None),
            Value::String(text) => match humantime::parse_duration(text.trim()) {
                Ok(d) if !d.is_zero() && d <= DURATION_MAX => Some(Some(d)),
                _ => {
                    self.wrong("off, or a time above 0 with its unit: 30s, 5m");
                    None
                }
            },
            _ => {
                self.wrong("off, or a time above 0 with its unit: 30s, 5m");
                None
            }
        }
    }

    pub(super) fn bytes(&self) -> Option<u64> {
        let found = match self.value {
            Value::Number(n) => n.as_u64(),
            Value::String(text) => text.trim().parse::<bytesize::ByteSize>().ok().map(|b| b.as_u64()),
            _ => None,
        };
        let found = found.filter(|n| (1..=1 << 40).contains(n));
        if found.is_none() {
            self.wrong("a size from 1 byte to 1 TiB: 512, 64KiB, 32MiB");
        }
        found
    }

    pub(super) fn address(&self) -> Option<SocketAddr> {
        let found = self.value.as_str().and_then(|t| t.parse().ok());
        if found.is_none() {
            self.wrong("an address with its port: 0.0.0.0:8080, 127.0.0.1:9090, [::]:8080");
        }
        found
    }

    /// A path, taken from the directory of the configuration where it is relative.
    pub(super) fn path(&self) -> Option<PathBuf> {
        self.text().map(|t| self.sink.base.join(t))
    }

    /// A file that can be read and holds something. An empty key file is how a missing secret looks: an error at
    /// start, not a request sent without its key.
    pub(super) fn file(&self) -> Option<PathBuf> {
        let path = self.path()?;
        let fault = match std::fs::read(&path) {
            Err(e) => format!("cannot read {}: {e}", path.display()),
            Ok(bytes) if bytes.trim_ascii().is_empty() => format!("{} is empty", path.display()),
            Ok(_) => return Some(path),
        };
        self.fail(fault, Some("a file that can be read and is not empty".to_owned()));
        None
    }
}

/// A mapping of the text whose keys are known.
#[derive(Debug)]
pub(super) struct Map<'a> {
    entries: &'a Mapping,
    pub(super) node: Node<'a>,
    known: &'static [&'static str],
}

impl<'a> Map<'a> {
    /// The value under `key`; a key without a value is as if it were not written.
    pub(super) fn get(&self, key: &str) -> Option<Node<'a>> {
        debug_assert!(self.known.is_empty() || self.knows(key), "`{key}` is read but not in its table's list of keys");
        let value = self.entries.get(key)?;
        (!value.is_null()).then(|| self.node.child(value, Step::Key(key.to_owned())))
    }

    /// Whether this table may hold `key`.
    pub(super) fn knows(&self, key: &str) -> bool {
        self.known.contains(&key)
    }

    pub(super) fn required(&self, key: &str, allowed: &str) -> Option<Node<'a>> {
        let found = self.get(key);
        if found.is_none() {
            self.node.fail(format!("`{key}` is missing"), Some(format!("{key}: {allowed}")));
        }
        found
    }

    pub(super) fn set<T>(&self, key: &str, place: &mut T, read: impl FnOnce(&Node<'a>) -> Option<T>) {
        if let Some(found) = self.get(key).and_then(|n| read(&n)) {
            *place = found;
        }
    }

    pub(super) fn choice<T: Copy>(&self, key: &str, place: &mut T, choices: &[(&str, T)]) {
        self.set(key, place, |n| {
            let text = n.text()?;
            let found = choices.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
            if found.is_none() {
                n.unknown(key, &text, choices.iter().map(|(name, _)| *name));
            }
            found
        });
    }
}

/// A value as the writer of the file would name it; long ones are cut.
fn describe(value: &Value) -> String {
    match value {
        Value::Null => "nothing".to_owned(),
        Value::Bool(b) => format!("{b}"),
        Value::Number(n) => format!("{n}"),
        Value::String(s) if s.chars().count() > 60 => format!("`{}…`", s.chars().take(60).collect::<String>()),
        Value::String(s) => format!("`{s}`"),
        Value::Sequence(_) => "a list".to_owned(),
        Value::Mapping(_) => "a mapping".to_owned(),
        Value::Tagged(t) => format!("a value tagged {}", t.tag),
    }
}

fn listed(names: &[&str]) -> String {
    if names.is_empty() { "none are configured".to_owned() } else { names.join(", ") }
}

/// `, did you mean ...?`, or nothing where no known name is like it.
pub(super) fn did_you_mean(found: &str, known: &[&str]) -> String {
    let lower = found.to_ascii_lowercase();
    let best = known
        .iter()
        .map(|name| (strsim::jaro_winkler(&lower, &name.to_ascii_lowercase()), *name))
        .filter(|(likeness, _)| *likeness >= SIMILAR)
        .max_by(|a, b| a.0.total_cmp(&b.0));
    best.map(|(_, name)| format!(", did you mean `{name}`?")).unwrap_or_default()
}
