//! One request's context: what each phase leaves for the next.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::balance::quota::{Hold, Rates};
use crate::balance::{Ask, Outcome, Replica, Reservation};
use crate::config::Model;
use crate::running::tenants::TenantState;
use crate::running::{Counted, Epoch, Running};
use crate::units::{Band, ReplicaId, Time};
use crate::weigh::Weight;
use crate::wire::headers::RequestIds;
use crate::wire::request::Edits;
use crate::wire::{AnswerReader, ApiError, Endpoint, Request};

use super::stream::ConnState;

/// See the module's documentation.
pub struct Ctx {
    pub started: Time,
    pub in_flight: Option<Counted>,
    pub epoch: Option<Arc<Epoch>>,
    pub conn: Option<Arc<ConnState>>,
    pub client: Option<IpAddr>,
    /// Echoed to the client: its own, or one made for it.
    pub request_id: String,
    pub ids: Option<RequestIds>,
    pub endpoint: Option<Endpoint>,
    pub model: Option<Arc<Model>>,
    pub band: Option<Band>,
    pub tenant: Option<Arc<TenantState>>,
    pub quota: Option<Hold>,
    /// What the tenant's limits stand at, for the answer.
    pub rates: Option<Rates>,
    pub exchange: Option<Box<Exchange>>,
    /// The error that the client was, or is to be, told.
    pub error: Option<ApiError>,
    pub status: u16,
    pub outcome: Option<Outcome>,
    /// Answered by the balancer itself (`/v1/models`, `/tokenize`): not an inference request.
    pub answered_here: bool,
}

impl std::fmt::Debug for Ctx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ctx").field("request_id", &self.request_id).finish_non_exhaustive()
    }
}

impl Ctx {
    /// A context for a request that begins now.
    pub fn new(running: &Arc<Running>) -> Ctx {
        Ctx {
            started: running.clock.now(),
            in_flight: Some(running.enter()),
            epoch: None,
            conn: None,
            client: None,
            request_id: String::new(),
            ids: None,
            endpoint: None,
            model: None,
            band: None,
            tenant: None,
            quota: None,
            rates: None,
            exchange: None,
            error: None,
            status: 0,
            outcome: None,
            answered_here: false,
        }
    }
}

/// A request that has a place on a replica, or had one.
pub struct Exchange {
    pub ask: Arc<Ask>,
    pub weight: Weight,
    /// Parsed, for another attempt's edits; `None` for an upload.
    pub request: Option<Request>,
    pub edits: Edits,
    pub body: RequestBody,
    /// This attempt has taken the whole of it.
    pub body_sent: bool,
    pub stream: bool,
    pub hide_usage: bool,
    pub reservation: Option<Reservation>,
    /// Replicas that failed this request.
    pub tried: Vec<ReplicaId>,
    pub attempts: u32,
    /// The replica of the reservation is asked a second time, on a connection of its own.
    pub same_again: Option<SameAgain>,
    /// An attempt died before its header: that is repeated once.
    pub died_once: bool,
    /// Where the last attempt failed, after its reservation was given back.
    pub lost_on: Option<Arc<Replica>>,
    /// A status was already reported to the replica's keeper.
    pub status_reported: bool,
    /// The answer is an event stream.
    pub sse: bool,
    /// The answer came to its end.
    pub ended: bool,
    pub queue_wait: Duration,
    /// The last replica, for the log.
    pub replica: Option<ReplicaId>,
    pub upstream_request_id: Option<String>,
    /// When the current attempt's request went out.
    pub sent_at: Option<Time>,
    pub reader: Option<AnswerReader>,
    pub first_content_at: Option<Time>,
    pub last_content_at: Option<Time>,
    /// What was last told to the ledger.
    pub output_told: u64,
    /// The answer's header has gone to the client.
    pub header_forwarded: bool,
    /// The replica's own status, where its answer was forwarded.
    pub upstream_status: Option<u16>,
    /// Of an error answer, for its class: the first bytes of its body.
    pub error_head: Vec<u8>,
    pub error_retry_after: Option<Duration>,
}

impl Exchange {
    /// An exchange that has its place and was not sent yet.
    pub fn new(
        ask: Arc<Ask>,
        weight: Weight,
        body: RequestBody,
        reservation: Reservation,
        queue_wait: Duration,
    ) -> Self {
        Exchange {
            replica: Some(reservation.replica().id().clone()),
            stream: ask.stream,
            ask,
            weight,
            request: None,
            edits: Edits::default(),
            body,
            body_sent: false,
            hide_usage: false,
            reservation: Some(reservation),
            tried: Vec::new(),
            attempts: 0,
            same_again: None,
            died_once: false,
            lost_on: None,
            status_reported: false,
            sse: false,
            ended: false,
            queue_wait,
            upstream_request_id: None,
            sent_at: None,
            reader: None,
            first_content_at: None,
            last_content_at: None,
            output_told: 0,
            header_forwarded: false,
            upstream_status: None,
            error_head: Vec::new(),
            error_retry_after: None,
        }
    }

    /// Its replica drains, and the time for what still runs there is over.
    pub fn is_overdue(&self) -> bool {
        self.reservation.as_ref().is_some_and(|r| r.replica().overdue())
    }

    /// The answer's header goes to the client: what was kept for another attempt is not needed any more. Prompts are
    /// megabytes and answers take minutes.
    pub fn answer_begins(&mut self) {
        self.header_forwarded = true;
        if self.body_sent {
            self.body = RequestBody::Spent;
            self.request = None;
        }
    }

    /// Makes the body fit the replica of the reservation: engines differ in what they understand.
    pub fn refit(&mut self) {
        let (Some(request), Some(reservation)) = (&self.request, &self.reservation) else { return };
        let schedules = reservation.replica().spec().priority_scheduling;
        let priority = schedules.then(|| i64::from(self.ask.band.0));
        if priority != self.edits.set_priority {
            self.edits.set_priority = priority;
            self.body = RequestBody::Whole(request.upstream_body(&self.edits));
        }
        self.status_reported = false;
        self.error_retry_after = None;
    }
}

/// Why a replica is asked a second time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SameAgain {
    /// A kept-alive connection ended as the request went out: the replica had closed it, most likely, or has just died.
    ReusedConnection,
    /// It said that it had not begun: an HTTP/2 stream refused, or left out of a GOAWAY.
    Untouched,
}

/// What is sent to the replica.
#[derive(Clone, Debug)]
pub enum RequestBody {
    /// Buffered, with its edits spliced in; sent whole on every attempt.
    Whole(Bytes),
    /// Not buffered: passes as it comes.
    Streamed,
    /// Sent whole, and the answer has begun: no other attempt can need it.
    Spent,
}

impl std::fmt::Debug for Exchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exchange")
            .field("replica", &self.replica)
            .field("attempts", &self.attempts)
            .finish_non_exhaustive()
    }
}
