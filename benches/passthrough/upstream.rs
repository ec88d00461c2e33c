//! A model server that computes nothing: a fixed answer, or events at a fixed pace. One thread, so that it leaves the
//! machine to what is measured.

use std::convert::Infallible;
use std::time::Duration;

use anyhow::Result;
use memchr::memmem;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Serves on `listen` until killed; a stream gets `events_per_second`.
pub fn run(listen: &str, events_per_second: f64) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let pace = Duration::from_secs_f64(1.0 / events_per_second);
    match runtime.block_on(accept(listen, pace))? {}
}

async fn accept(listen: &str, pace: Duration) -> Result<Infallible> {
    let listener = TcpListener::bind(listen).await?;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        // A connection ends when its peer leaves, by design in the middle of a stream: nothing to report.
        tokio::spawn(async move { serve(stream, pace).await.ok() });
    }
}

async fn serve(mut stream: TcpStream, pace: Duration) -> Result<()> {
    let answer = with_header("application/json", &chat_answer());
    let models = with_header(
        "application/json",
        r#"{"object":"list","data":[{"id":"bench","object":"model","max_model_len":32768}]}"#,
    );
    let nothing = with_header("text/plain", "");
    let mut pending = Vec::with_capacity(16 << 10);
    while let Some((head, body)) = read_request(&mut stream, &mut pending).await? {
        let target = head.split(' ').nth(1).unwrap_or_default().to_owned();
        match target.as_str() {
            "/v1/chat/completions" if memmem::find(&body, br#""stream":true"#).is_some() => {
                return paced_events(&mut stream, pace).await;
            }
            "/v1/chat/completions" => stream.write_all(&answer).await?,
            "/v1/models" => stream.write_all(&models).await?,
            _ => stream.write_all(&nothing).await?,
        }
    }
    Ok(())
}

/// The next request's head and body; `None` where the peer closed between two.
async fn read_request(stream: &mut TcpStream, pending: &mut Vec<u8>) -> Result<Option<(String, Vec<u8>)>> {
    loop {
        if let Some(end) = memmem::find(pending, b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&pending[..end]).into_owned();
            let length = content_length(&head);
            while pending.len() < end + 4 + length {
                if stream.read_buf(pending).await? == 0 {
                    return Ok(None);
                }
            }
            let body = pending[end + 4..end + 4 + length].to_vec();
            pending.drain(..end + 4 + length);
            return Ok(Some((head, body)));
        }
        if stream.read_buf(pending).await? == 0 {
            return Ok(None);
        }
    }
}

/// A head's `content-length`; 0 where there is none.
pub fn content_length(head: &str) -> usize {
    head.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .and_then(|(_, value)| value.trim().parse().ok())
        .unwrap_or(0)
}

async fn paced_events(stream: &mut TcpStream, pace: Duration) -> Result<()> {
    stream
        .write_all(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n",
        )
        .await?;
    let event = concat!(
        r#"data: {"id":"chatcmpl-8f2b","object":"chat.completion.chunk","created":1764400000,"model":"bench","#,
        r#""choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}"#,
        "\n\n"
    );
    let chunk = format!("{:x}\r\n{event}\r\n", event.len());
    let mut interval = tokio::time::interval(pace);
    loop {
        interval.tick().await;
        stream.write_all(chunk.as_bytes()).await?;
    }
}

fn with_header(content_type: &str, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
        .into_bytes()
}

/// A chat answer of 1 KB.
fn chat_answer() -> String {
    let content = "tokens and more tokens, ".repeat(28);
    format!(
        concat!(
            r#"{{"id":"chatcmpl-8f2b","object":"chat.completion","created":1764400000,"model":"bench","choices":[{{"index":0,"#,
            r#""message":{{"role":"assistant","content":"{}"}},"logprobs":null,"finish_reason":"stop"}}],"#,
            r#""usage":{{"prompt_tokens":190,"completion_tokens":168,"total_tokens":358}}}}"#
        ),
        content
    )
}
