//! What a scripted replica answers, act by act.

use std::time::Duration;

use bytes::Bytes;
use serde_json::Value;
use tokio::sync::watch;

use super::files::case_text;

/// A door that a test opens when it wants a scripted replica to go on.
#[derive(Clone, Debug)]
pub struct Gate {
    open: watch::Sender<bool>,
}

impl Gate {
    pub fn closed() -> Gate {
        Gate { open: watch::Sender::new(false) }
    }

    pub fn open(&self) {
        self.open.send_replace(true);
    }

    pub async fn passed(&self) {
        let mut open = self.open.subscribe();
        // The sender lives in `self`.
        let _ = open.wait_for(|open| *open).await;
    }
}

/// One act of a scripted answer.
#[derive(Clone, Debug)]
pub enum Act {
    /// One HTTP chunk (or raw bytes where the framing is not chunked), flushed.
    Send(Bytes),
    /// Bytes as they are, past any framing.
    Raw(Bytes),
    Pause(Duration),
    /// Waits until the test opens the gate.
    Hold(Gate),
    /// The clean end of the body, then the connection is closed.
    Fin,
    /// The connection is reset, the body unfinished.
    Rst,
    /// The connection is closed by FIN, the body unfinished.
    Cut,
    /// Nothing more, ever; the connection stays open.
    Hang,
}

/// How the body's end is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    Chunked,
    /// `content-length` of all `Send`s together.
    Length,
    /// By the end of the connection.
    Close,
    /// The reply's `Raw` acts bring everything, the head too.
    Bare,
}

/// A whole scripted answer.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Waits this long before the status line.
    pub before: Duration,
    /// Waits for this before the status line.
    pub gate: Option<Gate>,
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub framing: Framing,
    pub acts: Vec<Act>,
}

impl Reply {
    pub fn new(status: u16, content_type: &str) -> Reply {
        Reply {
            before: Duration::ZERO,
            gate: None,
            status,
            headers: vec![("content-type".to_owned(), content_type.to_owned())],
            framing: Framing::Chunked,
            acts: Vec::new(),
        }
    }

    /// A whole body with its length.
    pub fn whole(status: u16, content_type: &str, body: impl Into<Bytes>) -> Reply {
        let mut reply = Reply::new(status, content_type).send(body);
        reply.framing = Framing::Length;
        reply
    }

    /// A whole JSON body with its length.
    pub fn json(status: u16, body: impl Into<Bytes>) -> Reply {
        Reply::whole(status, "application/json", body)
    }

    /// A stream of these bytes in one chunk, then its clean end.
    pub fn sse(body: impl Into<Bytes>) -> Reply {
        Reply::new(200, "text/event-stream").send(body)
    }

    /// An ordinary streamed answer of `tokens` content events and a usage chunk.
    pub fn stream_of(tokens: u64, prompt: u64) -> Reply {
        Reply::new(200, "text/event-stream").events(tokens, ms0()).send(usage_chunk(prompt, tokens)).send(DONE)
    }

    /// Adds `count` content events, `gap` apart.
    pub fn events(mut self, count: u64, gap: Duration) -> Reply {
        for n in 0..count {
            self.acts.push(Act::Send(content_chunk(&format!("t{n} "))));
            if !gap.is_zero() {
                self.acts.push(Act::Pause(gap));
            }
        }
        self
    }

    /// An ordinary whole answer with this usage.
    pub fn chat(prompt: u64, output: u64) -> Reply {
        Reply::json(
            200,
            format!(
                r#"{{"id":"c","object":"chat.completion","created":1,"model":"m1","choices":[{{"index":0,"message":{{"role":"assistant","content":"ok"}},"finish_reason":"stop"}}],"usage":{{"prompt_tokens":{prompt},"completion_tokens":{output},"total_tokens":{}}}}}"#,
                prompt + output
            ),
        )
    }

    /// Never a status line; the connection stays open.
    pub fn never() -> Reply {
        Reply { framing: Framing::Bare, acts: vec![Act::Hang], ..Reply::new(200, "text/plain") }
    }

    /// Reads the request and closes without a byte.
    pub fn slam() -> Reply {
        Reply { framing: Framing::Bare, acts: vec![Act::Cut], ..Reply::new(200, "text/plain") }
    }

    /// Reads the request and resets.
    pub fn reset() -> Reply {
        Reply { framing: Framing::Bare, acts: vec![Act::Rst], ..Reply::new(200, "text/plain") }
    }

    /// These raw bytes in place of an answer, then the connection stays open.
    pub fn bare(bytes: impl Into<Bytes>) -> Reply {
        Reply { framing: Framing::Bare, acts: vec![Act::Raw(bytes.into())], ..Reply::new(200, "text/plain") }
    }

    /// The script of a field case.
    pub fn script(name: &str) -> Reply {
        Reply::parse(&case_text(name))
    }

    /// Parses the script format of the field cases (their INDEX.md).
    pub fn parse(script: &str) -> Reply {
        let mut lines = script.lines().filter(|line| !line.trim().is_empty());
        let head: Value = serde_json::from_str(lines.next().expect("a head line")).expect("a head");
        let mut reply = Reply::new(head["status"].as_u64().expect("a status") as u16, "");
        reply.headers = head["headers"]
            .as_object()
            .map(|headers| {
                headers.iter().map(|(k, v)| (k.clone(), v.as_str().expect("a header's text").to_owned())).collect()
            })
            .unwrap_or_default();
        for line in lines {
            let act: Value = serde_json::from_str(line).expect("an act");
            let act = act.as_object().expect("an act is an object");
            let (name, value) = act.iter().next().expect("an act has a name");
            reply.acts.push(match name.as_str() {
                "send" => Act::Send(Bytes::from(value.as_str().expect("text").to_owned())),
                "send_hex" => Act::Send(Bytes::from(unhex(value.as_str().expect("hex")))),
                "pause_ms" => Act::Pause(Duration::from_millis(value.as_u64().expect("milliseconds"))),
                "close" if value == "fin" => Act::Fin,
                "close" if value == "rst" => Act::Rst,
                _ => panic!("unknown act {line}"),
            });
        }
        reply
    }

    pub fn send(mut self, body: impl Into<Bytes>) -> Reply {
        self.acts.push(Act::Send(body.into()));
        self
    }

    pub fn act(mut self, act: Act) -> Reply {
        self.acts.push(act);
        self
    }

    pub fn pause(self, pause: Duration) -> Reply {
        self.act(Act::Pause(pause))
    }

    pub fn header(mut self, name: &str, value: &str) -> Reply {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn framing(mut self, framing: Framing) -> Reply {
        self.framing = framing;
        self
    }

    /// Sends nothing, not even the head, before the gate is open.
    pub fn after_gate(mut self, gate: &Gate) -> Reply {
        self.gate = Some(gate.clone());
        self
    }

    /// Waits this long before the status line.
    pub fn after(mut self, before: Duration) -> Reply {
        self.before = before;
        self
    }

    /// Scales every pause, so that hours become milliseconds.
    pub fn pauses(mut self, scale: impl Fn(Duration) -> Duration) -> Reply {
        for act in &mut self.acts {
            if let Act::Pause(pause) = act {
                *pause = scale(*pause);
            }
        }
        self
    }

    /// All bytes of the body together.
    pub fn body(&self) -> Bytes {
        let mut all = Vec::new();
        for act in &self.acts {
            if let Act::Send(bytes) = act {
                all.extend_from_slice(bytes);
            }
        }
        all.into()
    }
}

const fn ms0() -> Duration {
    Duration::ZERO
}

/// The stream's last event.
pub const DONE: &[u8] = b"data: [DONE]\n\n";

/// One content event as vLLM sends it.
pub fn content_chunk(text: &str) -> Bytes {
    let text = serde_json::to_string(text).expect("text is JSON");
    Bytes::from(format!(
        "data: {{\"id\":\"chatcmpl-t\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m1\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":{text}}},\"finish_reason\":null}}]}}\n\n"
    ))
}

/// A usage-only event as vLLM sends it.
pub fn usage_chunk(prompt: u64, output: u64) -> Bytes {
    Bytes::from(format!(
        "data: {{\"id\":\"chatcmpl-t\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m1\",\"choices\":[],\"usage\":{{\"prompt_tokens\":{prompt},\"completion_tokens\":{output},\"total_tokens\":{}}}}}\n\n",
        prompt + output
    ))
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).expect("hex digits")).collect()
}
