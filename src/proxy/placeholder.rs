//! A client's session whose body was read: it claims one byte in its place, so that Pingora goes on.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::HeaderMap;
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::protocols::Digest;
use pingora::protocols::http::custom::CustomMessageWrite;
use pingora::protocols::http::custom::server::Session as CustomSession;
use pingora::protocols::http::{HttpTask, ServerSession};
use pingora::protocols::l4::socket::SocketAddr;
use pingora::{Error, ErrorType, Result};

type MessageReader = Box<dyn futures::Stream<Item = Result<Bytes>> + Unpin + Send + Sync + 'static>;

/// See the module's documentation.
pub struct Placeholder {
    inner: ServerSession,
}

impl Placeholder {
    /// Wraps a session whose body was read to its end.
    pub fn new(inner: ServerSession) -> Self {
        Placeholder { inner }
    }
}

fn no_messages() -> Box<Error> {
    Error::explain(ErrorType::InternalError, "this session has no custom messages")
}

#[async_trait]
impl CustomSession for Placeholder {
    fn req_header(&self) -> &RequestHeader {
        self.inner.req_header()
    }

    fn req_header_mut(&mut self) -> &mut RequestHeader {
        self.inner.req_header_mut()
    }

    async fn read_body_bytes(&mut self) -> Result<Option<Bytes>> {
        Ok(None)
    }

    async fn drain_request_body(&mut self) -> Result<()> {
        self.inner.drain_request_body().await
    }

    async fn write_response_header(&mut self, resp: Box<ResponseHeader>, end: bool) -> Result<()> {
        self.inner.write_response_header(resp).await?;
        if end { self.inner.finish_body().await } else { Ok(()) }
    }

    async fn write_response_header_ref(&mut self, resp: &ResponseHeader, end: bool) -> Result<()> {
        self.inner.write_response_header_ref(resp).await?;
        if end { self.inner.finish_body().await } else { Ok(()) }
    }

    async fn write_body(&mut self, data: Bytes, end: bool) -> Result<()> {
        self.inner.write_response_body(data, end).await
    }

    async fn write_trailers(&mut self, trailers: HeaderMap) -> Result<()> {
        self.inner.write_response_trailers(trailers).await
    }

    async fn response_duplex_vec(&mut self, tasks: Vec<HttpTask>) -> Result<bool> {
        self.inner.response_duplex_vec(tasks).await
    }

    fn set_read_timeout(&mut self, timeout: Option<Duration>) {
        self.inner.set_read_timeout(timeout);
    }

    fn get_read_timeout(&self) -> Option<Duration> {
        self.inner.get_read_timeout()
    }

    fn set_write_timeout(&mut self, timeout: Option<Duration>) {
        self.inner.set_write_timeout(timeout);
    }

    fn get_write_timeout(&self) -> Option<Duration> {
        self.inner.get_write_timeout()
    }

    fn set_total_drain_timeout(&mut self, timeout: Option<Duration>) {
        self.inner.set_total_drain_timeout(timeout);
    }

    fn get_total_drain_timeout(&self) -> Option<Duration> {
        self.inner.get_total_drain_timeout()
    }

    fn request_summary(&self) -> String {
        self.inner.request_summary()
    }

    fn response_written(&self) -> Option<&ResponseHeader> {
        self.inner.response_written()
    }

    async fn shutdown(&mut self, _code: u32, _ctx: &str) {
        self.inner.shutdown().await;
    }

    fn is_body_done(&mut self) -> bool {
        true
    }

    async fn finish(&mut self) -> Result<()> {
        self.inner.finish_body().await
    }

    fn is_body_empty(&mut self) -> bool {
        false
    }

    async fn read_body_or_idle(&mut self, _no_body_expected: bool) -> Result<Option<Bytes>> {
        self.inner.read_body_or_idle(true).await
    }

    fn body_bytes_sent(&self) -> usize {
        self.inner.body_bytes_sent()
    }

    fn body_bytes_read(&self) -> usize {
        self.inner.body_bytes_read()
    }

    fn digest(&self) -> Option<&Digest> {
        self.inner.digest()
    }

    fn digest_mut(&mut self) -> Option<&mut Digest> {
        self.inner.digest_mut()
    }

    fn client_addr(&self) -> Option<&SocketAddr> {
        self.inner.client_addr()
    }

    fn server_addr(&self) -> Option<&SocketAddr> {
        self.inner.server_addr()
    }

    fn pseudo_raw_h1_request_header(&self) -> Bytes {
        self.inner.to_h1_raw()
    }

    fn enable_retry_buffering(&mut self) {}

    fn retry_buffer_truncated(&self) -> bool {
        false
    }

    fn get_retry_buffer(&self) -> Option<Bytes> {
        Some(Bytes::from_static(b"x"))
    }

    async fn finish_custom(&mut self) -> Result<()> {
        self.inner.finish_body().await
    }

    fn take_custom_message_reader(&mut self) -> Option<MessageReader> {
        None
    }

    fn restore_custom_message_reader(&mut self, _reader: MessageReader) -> Result<()> {
        Err(no_messages())
    }

    fn take_custom_message_writer(&mut self) -> Option<Box<dyn CustomMessageWrite>> {
        None
    }

    fn restore_custom_message_writer(&mut self, _writer: Box<dyn CustomMessageWrite>) -> Result<()> {
        Err(no_messages())
    }
}
