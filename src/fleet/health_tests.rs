use super::*;

const PROBE_EVERY: Duration = Duration::from_secs(2);

fn rules() -> Rules {
    Rules::new(&config::Health::default(), &config::Warmup::default())
}

struct Bench {
    machine: Machine,
    now: Time,
}

impl Bench {
    fn new() -> Bench {
        Bench::with(rules())
    }

    fn with(rules: Rules) -> Bench {
        Bench { machine: Machine::new(rules, 7), now: Time::ZERO }
    }

    fn open() -> Bench {
        let mut bench = Bench::new();
        bench.probe(ProbeOutcome::Good);
        assert_eq!(bench.machine.gate(), Gate::Open);
        bench
    }

    fn wait(&mut self, d: Duration) {
        self.now = self.now.after(d);
        self.machine.tick(self.now);
    }

    fn probe(&mut self, outcome: ProbeOutcome) {
        self.wait(PROBE_EVERY);
        self.machine.probe(&outcome, self.now);
    }

    fn bad(&mut self) {
        self.probe(ProbeOutcome::Bad("refused".to_owned()));
    }

    fn sees(&mut self, event: TrafficEvent) -> Effect {
        self.machine.traffic(&event, self.now, true)
    }

    fn gate(&self) -> Gate {
        self.machine.gate()
    }

    /// Waits until an ejection is over, with green probes all along; the time it took.
    fn sit_out(&mut self) -> Duration {
        let from = self.now;
        for _ in 0..1000 {
            self.probe(ProbeOutcome::Good);
            if self.gate() != Gate::Ill {
                return self.now.since(from);
            }
        }
        panic!("ejected for ever");
    }
}

fn status(status: u16) -> TrafficEvent {
    TrafficEvent::Status { status, retry_after: None, body_is_client_fault: false }
}

#[test]
fn a_new_replica_is_closed_until_its_first_good_probe() {
    let mut b = Bench::new();
    assert_eq!((b.gate(), b.machine.probed()), (Gate::Unknown, false));
    b.bad();
    assert_eq!((b.gate(), b.machine.probed()), (Gate::Unknown, true));
    b.probe(ProbeOutcome::Good);
    assert_eq!(b.gate(), Gate::Open);
}

#[test]
fn a_server_that_loads_its_model_warms_and_is_not_ill() {
    let mut b = Bench::new();
    for _ in 0..50 {
        b.probe(ProbeOutcome::Loading);
        assert_eq!((b.gate(), b.machine.state()), (Gate::Warming, State::Loading));
    }
    b.probe(ProbeOutcome::Good);
    assert_eq!(b.gate(), Gate::Open);
}

/// c105
#[test]
fn out_after_three_failures_in_a_row_and_in_after_two_successes() {
    let mut b = Bench::open();
    b.bad();
    b.bad();
    b.probe(ProbeOutcome::Good);
    b.bad();
    b.bad();
    assert_eq!(b.gate(), Gate::Open);
    b.bad();
    assert_eq!(b.gate(), Gate::Ill);
    b.probe(ProbeOutcome::Good);
    assert_eq!(b.gate(), Gate::Ill);
    b.probe(ProbeOutcome::Good);
    assert_eq!(b.gate(), Gate::Open);
}

/// c105
#[test]
fn a_late_probe_is_no_death_while_data_flows() {
    let mut b = Bench::open();
    for _ in 0..20 {
        b.sees(TrafficEvent::Alive);
        b.probe(ProbeOutcome::Late);
        assert_eq!(b.gate(), Gate::Open);
    }
    b.wait(Duration::from_secs(60));
    (0..3).for_each(|_| b.probe(ProbeOutcome::Late));
    assert_eq!(b.gate(), Gate::Ill, "nothing flows any more");
    b.sees(TrafficEvent::Alive);
    assert_eq!(b.gate(), Gate::Open, "it was only busy");
}

#[test]
fn data_does_not_excuse_a_refused_probe() {
    let mut b = Bench::open();
    for _ in 0..3 {
        b.sees(TrafficEvent::Alive);
        b.bad();
    }
    assert_eq!(b.gate(), Gate::Ill);
    b.sees(TrafficEvent::Alive);
    assert_eq!(b.gate(), Gate::Ill, "a server that closes its door still finishes its streams");
}

/// c106
#[test]
fn a_frozen_engine_behind_green_probes_is_put_out_until_a_real_request_succeeds() {
    let mut b = Bench::open();
    for i in 0..3 {
        assert_eq!(b.gate(), Gate::Open, "after {i} timeouts");
        b.probe(ProbeOutcome::Good);
        b.sees(TrafficEvent::FirstByteTimeout);
    }
    assert_eq!((b.gate(), b.machine.state()), (Gate::Ill, State::Ejected));
    let mut waits = Vec::new();
    for _ in 0..4 {
        waits.push(b.sit_out());
        assert_eq!(b.gate(), Gate::HalfOpen);
        b.sees(TrafficEvent::FirstByteTimeout);
        assert_eq!(b.gate(), Gate::Ill, "a failed trial closes at once");
    }
    assert!(waits.windows(2).all(|w| w[1] > w[0]), "the delay grows: {waits:?}");
    b.sit_out();
    b.sees(TrafficEvent::Alive);
    assert_eq!(b.gate(), Gate::Open);
}

#[test]
fn an_ejection_never_outlasts_its_bound() {
    let mut b = Bench::open();
    (0..3).for_each(|_| {
        b.sees(TrafficEvent::FirstByteTimeout);
    });
    for _ in 0..12 {
        assert!(b.sit_out() <= rules().eject_max + PROBE_EVERY);
        b.sees(TrafficEvent::ConnectFailed);
    }
}

#[test]
fn answers_that_break_off_count_although_their_data_came() {
    let mut b = Bench::open();
    for _ in 0..3 {
        assert_eq!(b.gate(), Gate::Open);
        b.sees(TrafficEvent::Alive);
        b.sees(TrafficEvent::DiedMidStream);
    }
    assert_eq!(b.gate(), Gate::Ill);
}

#[test]
fn a_replica_that_fails_every_other_request_is_put_out() {
    let mut b = Bench::open();
    for _ in 0..16 {
        b.sees(TrafficEvent::Completed);
        b.sees(status(500));
    }
    assert_eq!(b.gate(), Gate::Ill);
    let mut b = Bench::open();
    for _ in 0..100 {
        (0..9).for_each(|_| {
            b.sees(TrafficEvent::Completed);
        });
        b.sees(status(500));
    }
    assert_eq!(b.gate(), Gate::Open, "one in ten is not the replica");
}

#[test]
fn a_clients_fault_never_counts() {
    let mut b = Bench::open();
    for code in [400, 401, 403, 404, 405, 408, 413, 415, 422, 499, 501] {
        (0..100).for_each(|_| assert_eq!(b.sees(status(code)), Effect::default()));
    }
    let fault = TrafficEvent::Status { status: 500, retry_after: None, body_is_client_fault: true };
    (0..100).for_each(|_| assert_eq!(b.sees(fault.clone()), Effect::default()));
    assert_eq!(b.gate(), Gate::Open);
}

/// c104
#[test]
fn overload_backs_off_that_replica_and_is_never_illness() {
    let mut b = Bench::open();
    for code in [429, 503, 529] {
        for _ in 0..50 {
            assert_eq!(b.sees(status(code)).back_off_until, Some(b.now.after(BACK_OFF)));
        }
        let said = TrafficEvent::Status {
            status: code,
            retry_after: Some(Duration::from_secs(7)),
            body_is_client_fault: false,
        };
        assert_eq!(b.sees(said).back_off_until, Some(b.now.after(Duration::from_secs(7))));
        let hours = TrafficEvent::Status {
            status: code,
            retry_after: Some(Duration::from_secs(9000)),
            body_is_client_fault: false,
        };
        assert_eq!(b.sees(hours).back_off_until, Some(b.now.after(BACK_OFF_MAX)));
    }
    assert_eq!(b.gate(), Gate::Open);
}

#[test]
fn a_refused_or_broken_connection_sends_others_elsewhere_until_a_probe_has_told() {
    for event in [TrafficEvent::ConnectFailed, TrafficEvent::DiedMidStream] {
        let mut b = Bench::open();
        let effect = b.sees(event);
        assert_eq!(effect, Effect { back_off_until: Some(b.now.after(BACK_OFF)), probe_now: true });
        assert_eq!(b.gate(), Gate::Open);
    }
}

/// c109
#[test]
fn warm_up_requests_go_before_users_and_again_after_an_illness() {
    let warm = Rules { warm_up: true, ..rules() };
    let mut b = Bench::with(warm);
    b.probe(ProbeOutcome::Good);
    assert_eq!((b.gate(), b.machine.wants_warm_up()), (Gate::Warming, true));
    for _ in 0..60 {
        b.probe(ProbeOutcome::Good);
        assert_eq!(b.gate(), Gate::Warming, "the first request takes minutes and users wait elsewhere");
    }
    b.machine.warmed(Ok(()), b.now);
    assert_eq!((b.gate(), b.machine.wants_warm_up()), (Gate::Open, false));
    (0..3).for_each(|_| b.bad());
    (0..2).for_each(|_| b.probe(ProbeOutcome::Good));
    assert_eq!(b.gate(), Gate::Warming);
    b.machine.warmed(Err("timeout".to_owned()), b.now);
    assert_eq!(b.gate(), Gate::Ill);
    b.sit_out();
    assert!(b.machine.wants_warm_up(), "tried again by a request of our own, not by a user's");
}

/// c109
#[test]
fn a_fresh_replica_among_proven_ones_takes_one_user_at_a_time_until_data_comes() {
    let mut b = Bench::new();
    b.machine.set_on_trial(true);
    b.probe(ProbeOutcome::Good);
    for _ in 0..60 {
        b.probe(ProbeOutcome::Good);
        assert_eq!(b.gate(), Gate::HalfOpen, "its first request takes minutes");
    }
    b.sees(TrafficEvent::Alive);
    assert_eq!(b.gate(), Gate::Open);
}

#[test]
fn a_replica_that_was_ejected_and_then_died_comes_back_on_trial() {
    let mut b = Bench::open();
    (0..3).for_each(|_| {
        b.sees(TrafficEvent::ConnectFailed);
    });
    (0..3).for_each(|_| b.bad());
    assert_eq!(b.machine.state(), State::Ill);
    (0..2).for_each(|_| b.probe(ProbeOutcome::Good));
    assert_eq!(b.gate(), Gate::HalfOpen);
}

#[test]
fn a_restart_that_loads_again_forgets_the_old_process() {
    let mut b = Bench::open();
    (0..3).for_each(|_| {
        b.sees(TrafficEvent::ConnectFailed);
    });
    b.probe(ProbeOutcome::Loading);
    b.probe(ProbeOutcome::Good);
    assert_eq!(b.gate(), Gate::Open);
}

#[test]
fn draining_closes_whatever_else_is_true_and_opens_again() {
    let mut b = Bench::open();
    b.machine.set_draining(true);
    b.sees(TrafficEvent::Alive);
    b.probe(ProbeOutcome::Good);
    assert_eq!(b.gate(), Gate::Draining);
    b.machine.set_draining(false);
    assert_eq!(b.gate(), Gate::Open);
}

#[test]
fn a_bad_minute_cannot_empty_a_pool() {
    assert!(!may_eject(1, 0, 0.5));
    assert!(may_eject(2, 0, 0.5));
    assert!(!may_eject(2, 1, 0.5));
    assert!(may_eject(4, 1, 0.5) && !may_eject(4, 2, 0.5));
    assert!(!may_eject(10, 0, 0.0));
    let mut b = Bench::open();
    (0..100).for_each(|_| {
        b.machine.traffic(&TrafficEvent::FirstByteTimeout, b.now, false);
    });
    assert_eq!(b.gate(), Gate::Open);
}

#[test]
fn replicas_ejected_together_do_not_return_together() {
    let ends: std::collections::BTreeSet<String> = (0..8)
        .map(|seed| {
            let mut m = Machine::new(rules(), seed);
            m.probe(&ProbeOutcome::Good, Time::ZERO);
            (0..3).for_each(|_| {
                m.traffic(&TrafficEvent::ConnectFailed, Time::ZERO, true);
            });
            format!("{:?}", m.phase)
        })
        .collect();
    assert_eq!(ends.len(), 8);
}

mod any_order {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever happens, a replica whose server and engine are well afterwards is open again in bounded time.
        #[test]
        fn a_replica_that_is_well_always_comes_back(steps in proptest::collection::vec(0u8..14, 0..200)) {
            let mut b = Bench::new();
            for step in steps {
                match step {
                    0 => b.probe(ProbeOutcome::Good),
                    1 => b.probe(ProbeOutcome::Loading),
                    2 => b.bad(),
                    3 => b.probe(ProbeOutcome::Late),
                    4 => b.probe(ProbeOutcome::Neither),
                    5 => { b.sees(TrafficEvent::Alive); }
                    6 => { b.sees(TrafficEvent::Completed); }
                    7 => { b.sees(TrafficEvent::ConnectFailed); }
                    8 => { b.sees(TrafficEvent::DiedMidStream); }
                    9 => { b.sees(TrafficEvent::FirstByteTimeout); }
                    10 => { b.sees(status(500)); }
                    11 => { b.sees(status(503)); }
                    12 => b.machine.warmed(Ok(()), b.now),
                    _ => b.wait(Duration::from_secs(30)),
                }
            }
            for _ in 0..(rules().eject_max.as_secs() / PROBE_EVERY.as_secs() + 5) {
                b.probe(ProbeOutcome::Good);
                if b.gate() == Gate::HalfOpen {
                    b.sees(TrafficEvent::Completed);
                }
            }
            prop_assert_eq!(b.gate(), Gate::Open);
        }
    }
}
