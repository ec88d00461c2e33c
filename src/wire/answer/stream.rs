//! An SSE answer: events read beside the bytes, and the usage chunk that the client did not ask for taken out.

use std::ops::Range;

use bytes::Bytes;
use memchr::memmem;

use super::Tally;
use super::event;
use super::out::Out;
use super::sse::{self, Framer, Step};
use crate::wire::endpoint::Endpoint;
use crate::wire::json;

/// Most bytes held back while an event may prove to be a usage chunk; real ones have some 300 bytes.
const HELD_BYTES_MAX: usize = 64 << 10;
/// Buffers that grew past this are given back after the event that needed them.
const KEPT_CAPACITY_BYTES: usize = 16 << 10;
/// Longer events are read each for itself.
const SHAPE_BYTES_MAX: usize = 1 << 10;
/// Characters kept of an error event's text that is not JSON.
const ERROR_CHARS_MAX: usize = 300;

/// Reads a stream of events.
#[derive(Debug)]
pub(super) struct Stream {
    endpoint: Endpoint,
    hide_usage: bool,
    event_bytes: usize,
    framer: Framer,
    /// What earlier chunks brought of the current event.
    begun: Vec<u8>,
    /// How much of `begun` has left already.
    sent: usize,
    /// How much of `begun` was searched for choices.
    searched: usize,
    /// The current event is known to be no usage chunk, or is too long to wait for: it leaves as it comes.
    passing: bool,
    /// The current event is too long to be read.
    oversize: bool,
    /// A hidden event ended in a CR that may be half of a CRLF.
    hide_newline: bool,
    /// No event has ended yet: a byte order mark may stand before the first.
    first: bool,
    joined: Vec<u8>,
    shape: Shape,
}

/// An event that said nothing but a text, without that text. Nearly all events of a stream differ in nothing else, and
/// what another such one says is known without reading it.
#[derive(Debug, Default)]
struct Shape {
    head: Vec<u8>,
    /// From the text's closing quote on; empty where no shape is known.
    tail: Vec<u8>,
    /// Tokens that such an event carries.
    tokens: u64,
}

impl Shape {
    /// Notes the shape of an event that carries `tokens` and the text at this range.
    fn learn(&mut self, event: &[u8], text: Range<usize>, tokens: u64) {
        self.head.clear();
        self.tail.clear();
        if event.len() <= SHAPE_BYTES_MAX {
            self.head.extend_from_slice(&event[..text.start]);
            self.tail.extend_from_slice(&event[text.end..]);
            self.tokens = tokens;
        }
    }

    /// The tokens of an event of this shape; `None` for any other. Its text stands for itself: it ends where the shape
    /// has its quote, and no line ends in it.
    fn tokens(&self, event: &[u8]) -> Option<u64> {
        let text = event.strip_prefix(&self.head[..])?.strip_suffix(&self.tail[..])?;
        (!self.tail.is_empty() && !text.is_empty() && json::is_plain(text)).then_some(self.tokens)
    }
}

impl Stream {
    pub(super) fn new(endpoint: Endpoint, hide_usage: bool, event_bytes: usize) -> Self {
        // Only these have a chunk that `include_usage` adds.
        let hide_usage = hide_usage && matches!(endpoint, Endpoint::ChatCompletions | Endpoint::Completions);
        Stream {
            endpoint,
            hide_usage,
            event_bytes,
            framer: Framer::default(),
            begun: Vec::new(),
            sent: 0,
            searched: 0,
            passing: !hide_usage,
            oversize: false,
            hide_newline: false,
            first: true,
            joined: Vec::new(),
            shape: Shape::default(),
        }
    }

    pub(super) fn push(&mut self, chunk: Bytes, tally: &mut Tally) -> Bytes {
        let mut out = Out::new(chunk.clone());
        let bytes: &[u8] = &chunk;
        let mut pos = self.framer.split_newline(bytes);
        let mut start = 0;
        if pos == 1 && self.begun.is_empty() && !self.oversize {
            // The LF of the event that ended the chunk before.
            if !std::mem::take(&mut self.hide_newline) {
                out.pass(0..1);
            }
            start = 1;
        }
        if !bytes.is_empty() {
            self.hide_newline = false;
        }
        while pos < bytes.len() {
            match self.framer.step(bytes, &mut pos) {
                Step::Line => {}
                Step::Event => {
                    self.end_event(start, pos, bytes, &mut out, tally);
                    start = pos;
                }
                Step::More => break,
            }
        }
        if start < bytes.len() {
            self.keep(start, bytes, &mut out, tally);
        }
        out.into_bytes()
    }

    pub(super) fn finish(&mut self, tally: &mut Tally) -> Bytes {
        if self.begun.is_empty() {
            return Bytes::new();
        }
        let event = std::mem::take(&mut self.begun);
        let hidden = self.read(&event, tally) && !self.passing;
        let held = if hidden || self.passing { event.len() } else { self.sent };
        Bytes::copy_from_slice(&event[held..])
    }

    /// An event ends at `end` of the chunk.
    fn end_event(&mut self, start: usize, end: usize, bytes: &[u8], out: &mut Out, tally: &mut Tally) {
        let usage_only = if self.oversize {
            false
        } else if self.begun.is_empty() {
            self.read(&bytes[start..end], tally)
        } else if self.begun.len() + (end - start) > self.event_bytes {
            tally.progress.unread = true;
            false
        } else {
            let held = self.begun.len();
            self.begun.extend_from_slice(&bytes[start..end]);
            let event = std::mem::take(&mut self.begun);
            let usage_only = self.read(&event, tally);
            self.begun = event;
            self.begun.truncate(held);
            usage_only
        };
        if usage_only && !self.passing {
            self.hide_newline = self.framer.awaits_newline();
        } else {
            if !self.passing {
                out.release(&self.begun[self.sent..]);
            }
            out.pass(start..end);
        }
        self.begun.clear();
        self.begun.shrink_to(KEPT_CAPACITY_BYTES);
        self.joined.shrink_to(KEPT_CAPACITY_BYTES);
        self.sent = 0;
        self.searched = 0;
        self.passing = !self.hide_usage;
        self.oversize = false;
        self.first = false;
    }

    /// The chunk ends inside an event, which began at `start` or before.
    fn keep(&mut self, start: usize, bytes: &[u8], out: &mut Out, tally: &mut Tally) {
        let rest = &bytes[start..];
        if self.oversize {
            out.pass(start..bytes.len());
            return;
        }
        let before = self.begun.len();
        if before + rest.len() > self.event_bytes {
            tally.progress.unread = true;
            self.oversize = true;
            self.let_go(before, start, bytes, out);
            self.begun = Vec::new();
            self.sent = 0;
            return;
        }
        self.begun.extend_from_slice(rest);
        if self.passing || !self.may_be_usage() {
            self.let_go(before, start, bytes, out);
        } else if only_comments(&self.begun) {
            self.let_go(before, start, bytes, out);
            self.passing = false;
            self.sent = self.begun.len();
        }
    }

    /// Lets what was held go, and the chunk's part of the event with it.
    fn let_go(&mut self, before: usize, start: usize, bytes: &[u8], out: &mut Out) {
        if !self.passing {
            out.release(&self.begun[self.sent..before]);
        }
        out.pass(start..bytes.len());
        self.passing = true;
    }

    /// Whether the event that has begun may prove to be a usage chunk: false as soon as its list of choices has an
    /// entry. The quotes of a key inside a text are escaped, so that text never looks like one.
    fn may_be_usage(&mut self) -> bool {
        const KEY: &[u8] = b"\"choices\"";
        if self.begun.len() > HELD_BYTES_MAX {
            return false;
        }
        let Some(offset) = memmem::find(&self.begun[self.searched..], KEY) else {
            self.searched = self.begun.len().saturating_sub(KEY.len() - 1);
            return true;
        };
        self.searched += offset;
        let mut rest = self.begun[self.searched + KEY.len()..].iter().filter(|b| !b.is_ascii_whitespace());
        match (rest.next(), rest.next(), rest.next()) {
            (Some(b':'), Some(b'['), Some(b']')) => true,
            (Some(b':'), Some(b'['), Some(_)) => false,
            _ => true,
        }
    }

    /// Reads one whole event; true for a chunk of usage alone.
    fn read(&mut self, event: &[u8], tally: &mut Tally) -> bool {
        if event.len() > self.event_bytes {
            tally.progress.unread = true;
            return false;
        }
        let event = match self.first {
            true => event.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(event),
            false => event,
        };
        if let Some(tokens) = self.shape.tokens(event) {
            tally.event(event::Meaning { contents: 1, tokens, ..event::Meaning::default() });
            return false;
        }
        let fields = sse::fields(event, &mut self.joined);
        let Some(data) = fields.data else { return false };
        let mut meaning = event::read(self.endpoint, data);
        if fields.error && meaning.error.is_none() {
            meaning.error = Some(String::from_utf8_lossy(data).chars().take(ERROR_CHARS_MAX).collect());
        }
        if meaning.is_text_alone()
            && let (Some(text), Some(at)) = (&meaning.text, place(event, data))
        {
            self.shape.learn(event, at + text.start..at + text.end, meaning.tokens);
        }
        let usage_only = meaning.usage_only;
        tally.event(meaning);
        usage_only
    }
}

/// Where the data stands in its event; `None` where it was put together of several lines.
fn place(event: &[u8], data: &[u8]) -> Option<usize> {
    let at = (data.as_ptr() as usize).checked_sub(event.as_ptr() as usize)?;
    (at + data.len() <= event.len()).then_some(at)
}

/// Whether nothing but comments has come of an event: those leave at once, since they keep idle timers alive.
fn only_comments(begun: &[u8]) -> bool {
    begun.split(|&b| b == b'\n' || b == b'\r').all(|line| line.is_empty() || line[0] == b':')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Progress;
    use super::*;

    /// Texts as they stand between quotes, plain ones and those that end early or break the JSON among them.
    fn text() -> impl Strategy<Value = String> {
        prop_oneof![
            4 => "[a-zA-Z \u{e9}\u{5929}]{1,12}",
            1 => Just(String::new()),
            1 => Just("a\\\"b".to_owned()),
            1 => Just("x\"},\"finish_reason\":\"stop\"}],\"y\":[{\"z\":\"".to_owned()),
            1 => Just("x\",\"role\":\"".to_owned()),
            1 => Just("tab\tand\u{1}".to_owned()),
            1 => Just("line\ndata: x".to_owned()),
        ]
    }

    fn event() -> impl Strategy<Value = String> {
        let chat = |delta: String, rest: &str| {
            format!("data: {{\"id\":\"c-1\",\"choices\":[{{\"index\":0,\"delta\":{{{delta}}}{rest}}}]}}\n\n")
        };
        prop_oneof![
            8 => text().prop_map(move |t| chat(format!("\"content\":\"{t}\""), ",\"finish_reason\":null")),
            2 => text().prop_map(move |t| chat(format!("\"content\":\"{t}\",\"reasoning\":\"\""), "")),
            2 => (text(), text()).prop_map(move |(a, b)| chat(format!("\"content\":\"{a}\",\"reasoning\":\"{b}\""), "")),
            1 => text().prop_map(move |t| chat(format!("\"content\":\"{t}\""), ",\"finish_reason\":\"stop\"")),
            1 => text().prop_map(move |t| chat(format!("\"content\":\"{t}\""), ",\"token_ids\":[1,2,3]")),
            2 => text().prop_map(|t| format!("data: {{\"choices\":[{{\"text\":\"{t}\"}}]}}\n\n")),
            1 => text().prop_map(|t| format!("data: {{\"choices\":[{{\"text\":\"{t}\"}},{{\"text\":\"b\"}}]}}\n\n")),
            1 => text().prop_map(|t| format!("event: error\ndata: {{\"choices\":[{{\"text\":\"{t}\"}}]}}\n\n")),
            1 => text().prop_map(|t| format!("data: {{\"choices\":[{{\"text\":\ndata: \"{t}\"}}]}}\n\n")),
            1 => text().prop_map(|t| format!("data: {{\"object\":\"{t}\",\"message\":\"m\",\"choices\":[]}}\n\n")),
            1 => Just("data: {\"object\":\"error\",\"message\":\"m\",\"choices\":[]}\n\n".to_owned()),
            1 => Just("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":7}}\n\n".to_owned()),
            1 => Just(": comment\n\n".to_owned()),
        ]
    }

    proptest! {
        #[test]
        fn a_known_shape_says_what_reading_the_event_would(events in proptest::collection::vec(event(), 1..24)) {
            let mut stream = Stream::new(Endpoint::ChatCompletions, false, 1 << 20);
            let mut forgetful = Stream::new(Endpoint::ChatCompletions, false, 1 << 20);
            let (mut quick, mut slow) = (Tally::default(), Tally::default());
            for event in &events {
                let bytes = Bytes::from(event.clone());
                prop_assert_eq!(stream.push(bytes.clone(), &mut quick), bytes.clone());
                forgetful.shape = Shape::default();
                forgetful.push(bytes, &mut slow);
                let told = |progress: &Progress| format!("{progress:?}");
                prop_assert_eq!(told(&quick.progress), told(&slow.progress), "{}", event);
            }
        }
    }

    #[test]
    fn events_that_differ_in_their_text_alone_are_not_read_again() {
        let mut stream = Stream::new(Endpoint::ChatCompletions, true, 1 << 20);
        let mut tally = Tally::default();
        let event = |text: &str| {
            let data =
                format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{text}\"}},\"finish_reason\":null}}]}}\n\n");
            Bytes::from(data)
        };
        stream.push(event("one"), &mut tally);
        assert!(stream.shape.head.ends_with(b"\"content\":\"") && stream.shape.tail.starts_with(b"\"}"));
        for (text, known) in [(" two", Some(1)), ("\u{5929}", Some(1)), ("", None), ("a\\n", None), ("\"", None)] {
            assert_eq!(stream.shape.tokens(&event(text)), known, "{text:?}");
        }
        // Cut anywhere, an event is the same one.
        let whole = event("three");
        for cut in 1..whole.len() {
            stream.push(whole.slice(..cut), &mut tally);
            stream.push(whole.slice(cut..), &mut tally);
        }
        assert_eq!(tally.progress.content_events, whole.len() as u64);
    }

    #[test]
    fn a_shape_is_bounded() {
        let mut stream = Stream::new(Endpoint::ChatCompletions, false, 1 << 20);
        let mut tally = Tally::default();
        let long = format!("data: {{\"id\":\"{}\",\"choices\":[{{\"text\":\"a\"}}]}}\n\n", "x".repeat(SHAPE_BYTES_MAX));
        stream.push(Bytes::from(long), &mut tally);
        assert!(tally.progress.content_events == 1 && stream.shape.tail.is_empty() && stream.shape.head.is_empty());
    }
}
