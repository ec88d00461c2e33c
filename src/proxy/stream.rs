//! A client's connection, as Pingora reads it.
//!
//! Pingora reads from a client for two reasons: to get its request, and, while an answer is under way, to notice
//! that it left. [`EdgeStream`] stands between the two and adds what Pingora has no hook for:
//!
//! - bytes past the end of a request (a pipelining client) are kept for the next request instead of ending this one;
//! - a deadline: past it the read side fails with `TimedOut`, which ends the exchange at once and drops the replica's
//!   connection, while the write side still works, so that the client can be told why.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use async_trait::async_trait;
use bytes::{Buf, BytesMut};
use futures::task::AtomicWaker;
use pingora::protocols::raw_connect::ProxyDigest;
use pingora::protocols::tls::SslDigest;
use pingora::protocols::{
    ALPN, GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, Stream, TimingDigest,
    UniqueID, UniqueIDType,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Duration, Instant, Sleep};

use crate::units::ReplicaId;

/// Bytes kept of a client that writes ahead; past them its socket is left unread.
const HELD_BYTES_MAX: usize = 64 * 1024;

/// No deadline.
const NEVER: u64 = u64::MAX;
/// The body's end is not known beforehand (chunked).
const UNKNOWN: u64 = u64::MAX;

/// What the proxy and a connection's stream tell each other.
#[derive(Debug)]
pub struct ConnState {
    start: Instant,
    /// Microseconds after `start`, or `NEVER`.
    deadline: AtomicU64,
    /// The deadline passed and a read failed for it.
    expired: std::sync::atomic::AtomicBool,
    /// Bytes of the current request still to be read; `UNKNOWN` until its end is known; 0 while it is answered.
    request_left: AtomicU64,
    /// A hash of the replica that answers; 0 while none does.
    served_by: AtomicU64,
    waker: AtomicWaker,
}

impl ConnState {
    /// A connection that has no deadline and reads anything.
    pub fn new() -> Arc<ConnState> {
        Arc::new(ConnState {
            start: Instant::now(),
            deadline: AtomicU64::new(NEVER),
            expired: std::sync::atomic::AtomicBool::new(false),
            request_left: AtomicU64::new(UNKNOWN),
            served_by: AtomicU64::new(0),
            waker: AtomicWaker::new(),
        })
    }

    /// Fails the read side `after` now; `None` takes a deadline back.
    pub fn set_deadline(&self, after: Option<Duration>) {
        let at = match after {
            Some(d) => {
                u64::try_from((self.start.elapsed().saturating_add(d)).as_micros()).unwrap_or(NEVER - 1).min(NEVER - 1)
            }
            None => NEVER,
        };
        let before = self.deadline.swap(at, Ordering::AcqRel);
        if at < before {
            // An armed timer may be set for later: let the reader look again.
            self.waker.wake();
        }
    }

    /// Whether a read failed because the deadline passed.
    pub fn expired(&self) -> bool {
        self.expired.load(Ordering::Acquire)
    }

    /// This replica is asked now.
    pub fn served_by(&self, replica: &ReplicaId) {
        self.served_by.store(hash(replica), Ordering::Release);
    }

    /// Whether this replica was asked and its answer is not over.
    pub fn is_served_by(&self, replica: &ReplicaId) -> bool {
        self.served_by.load(Ordering::Acquire) == hash(replica)
    }

    /// A request of this many body bytes begins (`None`: chunked).
    pub fn begin_request(&self, body_bytes: Option<u64>) {
        self.deadline.store(NEVER, Ordering::Release);
        self.expired.store(false, Ordering::Release);
        self.request_left.store(body_bytes.unwrap_or(UNKNOWN), Ordering::Release);
    }

    /// The next request's header is awaited: every byte is wanted.
    pub fn await_request(&self) {
        self.served_by.store(0, Ordering::Release);
        self.deadline.store(NEVER, Ordering::Release);
        self.request_left.store(UNKNOWN, Ordering::Release);
    }

    /// The request is read whole: what comes now belongs to the next one.
    pub fn request_is_read(&self) {
        self.request_left.store(0, Ordering::Release);
    }

    fn deadline_at(&self) -> Option<Instant> {
        match self.deadline.load(Ordering::Acquire) {
            NEVER => None,
            micros => Some(self.start + Duration::from_micros(micros)),
        }
    }
}

fn hash(replica: &ReplicaId) -> u64 {
    xxhash_rust::xxh3::xxh3_64(replica.as_str().as_bytes()).max(1)
}

/// See the module's documentation.
pub struct EdgeStream {
    inner: Stream,
    state: Arc<ConnState>,
    held: BytesMut,
    timer: Option<Pin<Box<Sleep>>>,
}

impl fmt::Debug for EdgeStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EdgeStream").field("state", &self.state).field("held_bytes", &self.held.len()).finish()
    }
}

impl EdgeStream {
    /// Wraps an accepted connection.
    pub fn new(inner: Stream, state: Arc<ConnState>) -> Self {
        EdgeStream { inner, state, held: BytesMut::new(), timer: None }
    }

    /// What the proxy tells this connection.
    pub fn state(&self) -> &Arc<ConnState> {
        &self.state
    }

    /// Puts bytes back that were read past the end of a request.
    pub fn hold(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
    }

    /// Ready with an error once the deadline has passed.
    fn poll_deadline(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        self.state.waker.register(cx.waker());
        let Some(at) = self.state.deadline_at() else {
            return Poll::Pending;
        };
        loop {
            let timer = match &mut self.timer {
                Some(timer) => {
                    // A timer armed for earlier than the deadline is left to fire: deadlines move on with every
                    // chunk, and re-arming each time would cost more than one idle wake-up.
                    if timer.deadline() > at {
                        timer.as_mut().reset(at);
                    }
                    timer
                }
                None => self.timer.insert(Box::pin(tokio::time::sleep_until(at))),
            };
            if timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            if Instant::now() >= at {
                self.state.expired.store(true, Ordering::Release);
                return Poll::Ready(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the deadline of this exchange has passed",
                ));
            }
            timer.as_mut().reset(at);
        }
    }
}

impl AsyncRead for EdgeStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let left = this.state.request_left.load(Ordering::Acquire);
        if left == 0 {
            // Answering: look for the end of the connection, keep what belongs to the next request.
            while this.held.len() < HELD_BYTES_MAX {
                let mut probe = [0u8; 512];
                let mut probe = ReadBuf::new(&mut probe);
                match Pin::new(&mut this.inner).poll_read(cx, &mut probe) {
                    Poll::Ready(Ok(())) if probe.filled().is_empty() => return Poll::Ready(Ok(())),
                    Poll::Ready(Ok(())) => this.held.extend_from_slice(probe.filled()),
                    Poll::Ready(Err(e)) => return Poll::Ready(Err(e)),
                    Poll::Pending => break,
                }
            }
            return this.poll_deadline(cx).map(Err);
        }
        if this.held.has_remaining() {
            let n = this.held.len().min(buf.remaining()).min(usize::try_from(left).unwrap_or(usize::MAX));
            buf.put_slice(&this.held[..n]);
            this.held.advance(n);
            this.state.took(n, left);
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        match Pin::new(&mut this.inner).poll_read(cx, buf) {
            Poll::Ready(Ok(())) => {
                let got = buf.filled().len() - before;
                let wanted = usize::try_from(left).unwrap_or(usize::MAX);
                if got > wanted {
                    let end = before + wanted;
                    this.held.extend_from_slice(&buf.filled()[end..]);
                    buf.set_filled(end);
                }
                this.state.took(got.min(wanted), left);
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(e)) => Poll::Ready(Err(e)),
            Poll::Pending => this.poll_deadline(cx).map(Err),
        }
    }
}

impl ConnState {
    fn took(&self, n: usize, left: u64) {
        if left != UNKNOWN {
            // Only the reader lowers it, and only one reader exists.
            self.request_left.store(left - n as u64, Ordering::Release);
        }
    }
}

impl AsyncWrite for EdgeStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

#[async_trait]
impl Shutdown for EdgeStream {
    async fn shutdown(&mut self) {
        self.inner.shutdown().await
    }
}

impl UniqueID for EdgeStream {
    fn id(&self) -> UniqueIDType {
        self.inner.id()
    }
}

impl Ssl for EdgeStream {
    fn get_ssl(&self) -> Option<&pingora::protocols::tls::TlsRef> {
        self.inner.get_ssl()
    }

    fn get_ssl_digest(&self) -> Option<Arc<SslDigest>> {
        self.inner.get_ssl_digest()
    }

    fn selected_alpn_proto(&self) -> Option<ALPN> {
        self.inner.selected_alpn_proto()
    }
}

impl GetTimingDigest for EdgeStream {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        self.inner.get_timing_digest()
    }
}

impl GetProxyDigest for EdgeStream {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        self.inner.get_proxy_digest()
    }
}

impl GetSocketDigest for EdgeStream {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        self.inner.get_socket_digest()
    }
}

impl Peek for EdgeStream {}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn pair() -> (EdgeStream, Arc<ConnState>, tokio::io::DuplexStream) {
        let (here, there) = tokio::io::duplex(1 << 16);
        let state = ConnState::new();
        (EdgeStream::new(Box::new(here), state.clone()), state, there)
    }

    #[tokio::test]
    async fn bytes_past_the_end_of_a_request_wait_for_the_next_one() {
        let (mut edge, state, mut client) = pair();
        state.begin_request(Some(3));
        client.write_all(b"abcNEXT").await.unwrap();
        let mut buf = [0u8; 16];
        assert_eq!(edge.read(&mut buf).await.unwrap(), 3);
        assert_eq!(&buf[..3], b"abc");
        // While the answer is under way nothing is readable.
        let quiet = tokio::time::timeout(Duration::from_millis(20), edge.read(&mut buf)).await;
        assert!(quiet.is_err());
        state.await_request();
        assert_eq!(edge.read(&mut buf).await.unwrap(), 4);
        assert_eq!(&buf[..4], b"NEXT");
    }

    #[tokio::test]
    async fn a_client_that_leaves_is_seen_while_its_answer_is_under_way() {
        let (mut edge, state, mut client) = pair();
        state.begin_request(Some(0));
        client.write_all(b"ahead").await.unwrap();
        drop(client);
        let mut buf = [0u8; 16];
        assert_eq!(edge.read(&mut buf).await.unwrap(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_fails_the_read_side_and_leaves_the_write_side_alone() {
        let (mut edge, state, mut client) = pair();
        state.begin_request(Some(0));
        state.set_deadline(Some(Duration::from_secs(5)));
        let mut buf = [0u8; 16];
        let error = edge.read(&mut buf).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(state.expired());
        edge.write_all(b"why").await.unwrap();
        assert_eq!(client.read(&mut buf).await.unwrap(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_that_moves_on_is_kept_and_one_that_moves_nearer_is_seen() {
        let (mut edge, state, _client) = pair();
        state.begin_request(Some(0));
        state.set_deadline(Some(Duration::from_secs(5)));
        let begin = Instant::now();
        let mover = state.clone();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(4)).await;
            mover.set_deadline(Some(Duration::from_secs(10)));
            tokio::time::sleep(Duration::from_secs(2)).await;
            mover.set_deadline(Some(Duration::from_secs(1)));
        });
        let mut buf = [0u8; 16];
        assert!(edge.read(&mut buf).await.is_err());
        let took = begin.elapsed();
        assert!(took >= Duration::from_secs(7) && took < Duration::from_millis(7_100), "{took:?}");
    }
}
