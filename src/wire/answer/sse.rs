//! Finds the events of an SSE stream in any chunking, by the WHATWG HTML standard, section 9.2.

use std::ops::Range;

use memchr::memchr2;

/// Where the framing stands between two chunks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Framer {
    /// Inside a line: its first byte has been seen.
    in_line: bool,
    /// The last byte was a CR; a LF that follows belongs to it.
    after_cr: bool,
}

/// How far one step went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// A line ended here; the event goes on.
    Line,
    /// A blank line ended here, and with it the event.
    Event,
    /// The chunk ended first.
    More,
}

impl Framer {
    /// Moves `pos` over the rest of the current line, or to the end of the chunk.
    #[inline]
    pub(super) fn step(&mut self, chunk: &[u8], pos: &mut usize) -> Step {
        let Some(offset) = memchr2(b'\n', b'\r', &chunk[*pos..]) else {
            self.in_line |= *pos < chunk.len();
            *pos = chunk.len();
            return Step::More;
        };
        let blank = offset == 0 && !self.in_line;
        *pos += offset + 1;
        if chunk[*pos - 1] == b'\r' {
            match chunk.get(*pos) {
                Some(b'\n') => *pos += 1,
                Some(_) => {}
                None => self.after_cr = true,
            }
        }
        self.in_line = false;
        if blank { Step::Event } else { Step::Line }
    }

    /// The chunk ended in a CR that may be half of a CRLF.
    pub(super) fn awaits_newline(&self) -> bool {
        self.after_cr
    }

    /// At a chunk's start: 1 where its first byte is the LF of a CR that ended the chunk before.
    #[inline]
    pub(super) fn split_newline(&mut self, chunk: &[u8]) -> usize {
        let Some(&first) = chunk.first() else { return 0 };
        usize::from(std::mem::take(&mut self.after_cr) && first == b'\n')
    }
}

/// The data of an event, and its name.
#[derive(Debug, PartialEq)]
pub(super) struct Event<'a> {
    /// Its data lines joined by LF; `None` without any.
    pub(super) data: Option<&'a [u8]>,
    /// The `event` field is `error`.
    pub(super) error: bool,
}

/// Reads the fields of one event. `joined` is scratch space for events of several data lines.
#[inline]
pub(super) fn fields<'a>(event: &'a [u8], joined: &'a mut Vec<u8>) -> Event<'a> {
    let mut data: Option<Range<usize>> = None;
    let mut error = false;
    let mut several = false;
    let mut at = 0;
    while at < event.len() {
        let end = memchr2(b'\n', b'\r', &event[at..]).map_or(event.len(), |offset| at + offset);
        if let Some(value) = value_of(event, at..end, b"data") {
            match &data {
                None => data = Some(value),
                Some(before) => {
                    if !several {
                        several = true;
                        joined.clear();
                        joined.extend_from_slice(&event[before.clone()]);
                    }
                    joined.push(b'\n');
                    joined.extend_from_slice(&event[value]);
                }
            }
        } else if let Some(value) = value_of(event, at..end, b"event") {
            error = &event[value] == b"error";
        }
        // A CRLF leaves an empty line behind, which names no field.
        at = end + 1;
    }
    let data = if several { Some(joined.as_slice()) } else { data.map(|range| &event[range]) };
    Event { data, error }
}

/// The value of a line, if the line is of this field; one leading space is not part of it.
#[inline]
fn value_of(event: &[u8], line: Range<usize>, name: &[u8]) -> Option<Range<usize>> {
    let text = &event[line.clone()];
    let rest = text.strip_prefix(name)?;
    let start = line.start + name.len();
    match rest {
        [] => Some(start..start),
        [b':', b' ', ..] => Some(start + 2..line.end),
        [b':', ..] => Some(start + 1..line.end),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(event: &str) -> (Option<String>, bool) {
        let mut joined = Vec::new();
        let event = fields(event.as_bytes(), &mut joined);
        (event.data.map(|data| String::from_utf8(data.to_vec()).unwrap()), event.error)
    }

    fn data(text: &str) -> (Option<String>, bool) {
        (Some(text.to_owned()), false)
    }

    #[test]
    fn data_lines_are_joined_by_one_line_feed() {
        assert_eq!(parse("data: a\ndata: b\r\ndata:c\rdata\n\n"), data("a\nb\nc\n"));
    }

    #[test]
    fn only_one_blank_after_the_colon_is_dropped() {
        assert_eq!(parse("data:  a\n\n"), data(" a"));
        assert_eq!(parse("data:a\n\n"), data("a"));
        assert_eq!(parse("data\n\n"), data(""));
        assert_eq!(parse("data:\n\n"), data(""));
    }

    #[test]
    fn comments_and_other_fields_are_no_data() {
        assert_eq!(parse(": data: a\nid: 1\nretry: 5\ndatas: x\n\n"), (None, false));
        assert_eq!(parse("event: error\ndata: x\n\n"), (Some("x".to_owned()), true));
        assert_eq!(parse(":\n\n"), (None, false));
    }

    fn events(stream: &[u8], cut: usize) -> Vec<Vec<u8>> {
        let mut framer = Framer::default();
        let mut found = Vec::new();
        let mut current = Vec::new();
        for chunk in stream.chunks(cut) {
            let mut pos = framer.split_newline(chunk);
            while pos < chunk.len() {
                let start = pos;
                let step = framer.step(chunk, &mut pos);
                current.extend_from_slice(&chunk[start..pos]);
                if step == Step::Event {
                    found.push(std::mem::take(&mut current));
                }
            }
        }
        found
    }

    #[test]
    fn every_line_ending_frames_events_in_every_chunking() {
        for newline in ["\n", "\r\n", "\r"] {
            let stream = "data: a\n\n: c\n\ndata: b\ndata: c\n\n".replace('\n', newline);
            for cut in 1..=stream.len() {
                let found = events(stream.as_bytes(), cut);
                let datas: Vec<_> = found.iter().map(|e| parse(std::str::from_utf8(e).unwrap()).0).collect();
                assert_eq!(datas, [Some("a".to_owned()), None, Some("b\nc".to_owned())], "{newline:?} cut {cut}");
            }
        }
    }
}
