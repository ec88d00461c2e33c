//! Probing, warm-up, passive health, drain and reload over real sockets.

use std::time::Duration;

use weighbridge::balance::Gate;
use weighbridge::fleet::{State, TrafficEvent};
use weighbridge::units::ReplicaId;

use crate::bench::{Replica, Reply, config, config_at, for_a_while, keep, list, run, until};

#[test]
fn a_replica_is_closed_until_its_first_good_probe_and_ready_waits_for_it() {
    run(async {
        let replica = Replica::vllm(&["m"]).await;
        replica.on("/health", Reply::Late(Duration::from_millis(300), String::new()));
        let kept = keep(&config(&list(&[&replica.url()]), ""));
        assert_eq!((kept.gate("r0"), kept.fleet.ready()), (Some(Gate::Unknown), false));
        kept.until_gate("r0", Gate::Open).await;
        assert!(kept.fleet.ready());
        let view = &kept.balancer.views()[0];
        assert_eq!(kept.balancer.window(&"m".into()).map(|t| t.0), Some(2048), "{view:?}");
    });
}

#[test]
fn ready_does_not_wait_for_a_replica_that_refuses() {
    run(async {
        let mut replica = Replica::vllm(&["m"]).await;
        replica.kill();
        let kept = keep(&config(&list(&[&replica.url()]), ""));
        until(|| kept.fleet.ready(), || "ready".to_owned()).await;
        assert_eq!(kept.gate("r0"), Some(Gate::Unknown));
        kept.until_gate("r0", Gate::Ill).await;
        replica.revive().await;
        kept.until_gate("r0", Gate::Open).await;
    });
}

#[test]
fn a_server_that_loads_its_model_warms_and_opens_when_it_has() {
    run(async {
        let replica = Replica::bare().await;
        let loading = r#"{"error":{"message":"Loading model","type":"unavailable_error","code":503}}"#;
        replica.say("/health", 503, loading);
        let kept = keep(&config(&list(&[&replica.url()]), ""));
        kept.until_state("r0", State::Loading).await;
        for_a_while(Duration::from_millis(600), || kept.gate("r0") == Some(Gate::Warming), "warming, never ill").await;
        replica.say("/health", 200, r#"{"status":"ok"}"#);
        kept.until_gate("r0", Gate::Open).await;
    });
}

#[test]
fn a_killed_replica_is_out_within_three_probes_and_comes_back() {
    run(async {
        let (mut a, b) = (Replica::vllm(&["m"]).await, Replica::vllm(&["m"]).await);
        let kept = keep(&config(&list(&[&a.url(), &b.url()]), ""));
        kept.until_open(&["r0", "r1"]).await;
        a.kill();
        let killed = std::time::Instant::now();
        kept.until_gate("r0", Gate::Ill).await;
        let took = killed.elapsed();
        assert!(took < Duration::from_secs(3), "three probes of 100 ms took {took:?}");
        assert_eq!(kept.gate("r1"), Some(Gate::Open));
        a.revive().await;
        kept.until_open(&["r0", "r1"]).await;
    });
}

#[test]
fn a_frozen_replica_does_not_slow_the_probes_of_the_others() {
    run(async {
        let (a, mut b) = (Replica::vllm(&["m"]).await, Replica::vllm(&["m"]).await);
        let health = "health: {interval: 100ms, timeout: 5s, unhealthy_after: 3}";
        let kept = keep(&config(&list(&[&a.url(), &b.url()]), health));
        kept.until_open(&["r0", "r1"]).await;
        a.on("/health", Reply::Hang);
        tokio::time::sleep(Duration::from_millis(300)).await;
        b.kill();
        let killed = std::time::Instant::now();
        kept.until_gate("r1", Gate::Ill).await;
        assert!(killed.elapsed() < Duration::from_secs(4), "{:?}", killed.elapsed());
    });
}

#[test]
fn a_late_probe_is_no_death_while_data_flows() {
    run(async {
        let replica = Replica::vllm(&["m"]).await;
        let kept = keep(&config(&list(&[&replica.url()]), "health: {interval: 50ms, timeout: 150ms}"));
        kept.until_gate("r0", Gate::Open).await;
        replica.on("/health", Reply::Hang);
        let r0 = kept.balancer.replica(&ReplicaId::from("r0")).unwrap();
        for_a_while(
            Duration::from_secs(2),
            || {
                kept.fleet.report(&r0, TrafficEvent::Alive);
                r0.gate() == Gate::Open
            },
            "open while data flows",
        )
        .await;
        kept.until_gate("r0", Gate::Ill).await;
        kept.fleet.report(&r0, TrafficEvent::Alive);
        assert_eq!(r0.gate(), Gate::Open, "it was only busy");
    });
}

#[test]
fn warm_up_requests_are_answered_before_users_are_let_in() {
    run(async {
        let replica = Replica::vllm(&["m"]).await;
        replica.on("/v1/chat/completions", Reply::Late(Duration::from_millis(400), "{}".to_owned()));
        let kept = keep(&config(&list(&[&replica.url()]), "warmup: {prompt: Hello, requests: 2, ramp: 0s}"));
        kept.until_gate("r0", Gate::Warming).await;
        kept.until_gate("r0", Gate::Open).await;
        let asked = replica.asked("/v1/chat/completions");
        assert_eq!(asked.len(), 2);
        let body: serde_json::Value = serde_json::from_str(&asked[0].body).unwrap();
        assert_eq!((&body["model"], &body["max_tokens"]), (&"m".into(), &1.into()));
        assert_eq!(body["messages"][0]["content"], "Hello");
    });
}

#[test]
fn a_warm_up_that_fails_keeps_the_gate_shut_and_is_tried_again() {
    run(async {
        let replica = Replica::vllm(&["m"]).await;
        replica.say("/v1/chat/completions", 500, "out of memory");
        let kept = keep(&config(&list(&[&replica.url()]), "warmup: {prompt: Hi, ramp: 0s}"));
        kept.until_state("r0", State::Ejected).await;
        assert!(kept.reason("r0").contains("warm-up"), "{}", kept.reason("r0"));
        replica.say("/v1/chat/completions", 200, "{}");
        kept.until_gate("r0", Gate::Open).await;
    });
}

/// c106
#[test]
fn a_frozen_engine_behind_a_green_health_url_is_put_out_and_tried_one_by_one() {
    run(async {
        let (a, b) = (Replica::vllm(&["m"]).await, Replica::vllm(&["m"]).await);
        let kept = keep(&config(&list(&[&a.url(), &b.url()]), ""));
        kept.until_open(&["r0", "r1"]).await;
        let r0 = kept.balancer.replica(&ReplicaId::from("r0")).unwrap();
        a.on("/v1/chat/completions", Reply::Hang);
        (0..3).for_each(|_| kept.fleet.report(&r0, TrafficEvent::FirstByteTimeout));
        assert_eq!(r0.gate(), Gate::Ill);
        kept.until_gate("r0", Gate::HalfOpen).await;
        kept.fleet.report(&r0, TrafficEvent::FirstByteTimeout);
        assert_eq!(r0.gate(), Gate::Ill);
        kept.until_gate("r0", Gate::HalfOpen).await;
        kept.fleet.report(&r0, TrafficEvent::Alive);
        assert_eq!(r0.gate(), Gate::Open);
    });
}

#[test]
fn traffic_puts_out_half_of_a_pool_at_most() {
    run(async {
        let mut replicas = Vec::new();
        for _ in 0..4 {
            replicas.push(Replica::vllm(&["m"]).await);
        }
        let urls: Vec<String> = replicas.iter().map(Replica::url).collect();
        let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
        let kept = keep(&config(&list(&urls), ""));
        kept.until_open(&["r0", "r1", "r2", "r3"]).await;
        for replica in kept.balancer.replicas().iter() {
            (0..10).for_each(|_| kept.fleet.report(replica, TrafficEvent::DiedMidStream));
        }
        assert_eq!(kept.open().len(), 2);
    });
}

#[test]
fn a_generation_probe_finds_an_engine_that_hangs_without_any_traffic() {
    run(async {
        let (a, b) = (Replica::vllm(&["m"]).await, Replica::vllm(&["m"]).await);
        let health = "health: {interval: 50ms, timeout: 50ms, generation_probe: 100ms, eject: 60s}";
        let kept = keep(&config(&list(&[&a.url(), &b.url()]), health));
        kept.until_open(&["r0", "r1"]).await;
        until(|| !a.asked("/v1/chat/completions").is_empty(), || "a generation".to_owned()).await;
        a.on("/v1/chat/completions", Reply::Hang);
        kept.until_state("r0", State::Ejected).await;
        assert_eq!(kept.gate("r1"), Some(Gate::Open));
    });
}

#[test]
fn probes_carry_the_replicas_own_host_path_and_key() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("key"), "s3cret\n").unwrap();
        let replica = Replica::bare().await;
        for path in ["/base/health", "/base/v1/models"] {
            replica.say(path, 200, "{}");
        }
        let port = replica.address.port();
        let text = format!("replicas: [{{id: r0, url: 'http://localhost:{port}/base/', model: m, api_key_file: key}}]");
        let kept = keep(&config_at(&text, "", dir.path()));
        kept.until_gate("r0", Gate::Open).await;
        let asked = &replica.asked("/base/health")[0];
        assert_eq!(asked.headers["host"], format!("localhost:{port}"));
        assert_eq!(asked.headers["authorization"], "Bearer s3cret");
        assert_eq!(kept.fleet.address(&"r0".into()).map(|a| a.port()), Some(port), "the name is resolved");
        let status = serde_json::to_string(&kept.fleet.status()).unwrap();
        assert!(!status.contains("s3cret"), "{status}");
    });
}

#[test]
fn a_server_without_a_health_url_is_probed_by_its_list_of_models() {
    run(async {
        let replica = Replica::bare().await;
        replica.say("/v1/models", 200, r#"{"data":[{"id":"m"}]}"#);
        let kept = keep(&config(&list(&[&replica.url()]), ""));
        kept.until_gate("r0", Gate::Open).await;
    });
}

#[test]
fn a_model_that_the_replica_does_not_serve_is_named_and_keeps_it_shut() {
    run(async {
        let replica = Replica::vllm(&["llama", "lora"]).await;
        let kept = keep(&config(&list(&[&replica.url()]), ""));
        kept.until_gate("r0", Gate::Ill).await;
        assert_eq!(kept.reason("r0"), "does not serve `m`; it serves llama, lora");
        let both = Replica::vllm(&["m"]).await;
        let text = format!("replicas: [{{id: r0, url: '{}', models: [m, n]}}]", both.url());
        let mut two = config(&list(&["http://127.0.0.1:9"]), "");
        two = {
            let models = "models: [{name: m, tokenizer: approximate}, {name: n, tokenizer: approximate}]";
            let yaml = format!("listen: [{{address: 127.0.0.1:1}}]\n{models}\nhealth: {{interval: 100ms}}\n{text}\n");
            drop(two);
            weighbridge::config::parse(&yaml, std::path::Path::new("")).unwrap()
        };
        kept.apply(&two);
        kept.until_gate("r0", Gate::Open).await;
        until(
            || kept.balancer.replica(&"r0".into()).unwrap().spec().models == ["m".into()],
            || "the model it serves alone to be told to the balancer".to_owned(),
        )
        .await;
    });
}

#[test]
fn draining_by_hand_and_by_configuration_closes_and_opens_again() {
    run(async {
        let replica = Replica::vllm(&["m"]).await;
        let list = list(&[&replica.url()]);
        let kept = keep(&config(&list, ""));
        kept.until_gate("r0", Gate::Open).await;
        assert!(kept.fleet.drain(&"r0".into(), None) && !kept.fleet.drain(&"r9".into(), None));
        assert_eq!(kept.gate("r0"), Some(Gate::Draining));
        kept.apply(&config(&list, ""));
        assert_eq!(kept.gate("r0"), Some(Gate::Draining), "a reload does not end a drain by hand");
        assert!(kept.fleet.undrain(&"r0".into()));
        assert_eq!(kept.gate("r0"), Some(Gate::Open));
        kept.apply(&config(&list.replace("model: m", "model: m, draining: true"), ""));
        assert_eq!(kept.gate("r0"), Some(Gate::Draining));
        kept.apply(&config(&list, ""));
        kept.until_gate("r0", Gate::Open).await;
    });
}

#[test]
fn a_reload_keeps_the_health_of_who_stays_and_starts_the_others_anew() {
    run(async {
        let (a, b) = (Replica::vllm(&["m"]).await, Replica::vllm(&["m"]).await);
        let kept = keep(&config(&list(&[&a.url()]), ""));
        kept.until_gate("r0", Gate::Open).await;
        b.on("/health", Reply::Late(Duration::from_millis(300), String::new()));
        kept.apply(&config(&list(&[&a.url(), &b.url()]).replace("model: m}", "model: m, tokens_per_sec: 9}"), ""));
        assert_eq!((kept.gate("r0"), kept.gate("r1")), (Some(Gate::Open), Some(Gate::Unknown)));
        kept.until_open(&["r0", "r1"]).await;
        b.on("/health", Reply::Hang);
        kept.apply(&config(&list(&[&b.url()]), ""));
        assert_eq!(kept.gate("r0"), Some(Gate::Unknown), "the id's address is another server's");
        assert!(kept.gate("r1").is_none_or(|g| g == Gate::Draining), "gone, or finishing");
        b.say("/health", 200, "");
        kept.until_gate("r0", Gate::Open).await;
    });
}

#[test]
fn a_name_that_does_not_resolve_is_said_and_stays_shut() {
    run(async {
        let kept = keep(&config(&list(&["http://no-such-host.invalid:8000"]), ""));
        until(|| kept.fleet.ready(), || "ready".to_owned()).await;
        assert_eq!(kept.gate("r0"), Some(Gate::Unknown));
        assert!(kept.reason("r0").contains("cannot resolve no-such-host.invalid"), "{}", kept.reason("r0"));
    });
}

#[test]
fn overload_backs_the_replica_off_and_leaves_it_open() {
    run(async {
        let replica = Replica::vllm(&["m"]).await;
        let kept = keep(&config(&list(&[&replica.url()]), ""));
        kept.until_gate("r0", Gate::Open).await;
        let r0 = kept.balancer.replica(&"r0".into()).unwrap();
        let event = TrafficEvent::Status { status: 503, retry_after: None, body_is_client_fault: false };
        (0..50).for_each(|_| kept.fleet.report(&r0, event.clone()));
        for_a_while(Duration::from_millis(500), || r0.gate() == Gate::Open, "load is not illness").await;
    });
}

/// c109
#[test]
fn a_fresh_replica_among_proven_ones_is_tried_by_one_user_first() {
    run(async {
        let (a, b) = (Replica::vllm(&["m"]).await, Replica::vllm(&["m"]).await);
        let kept = keep(&config(&list(&[&a.url()]), ""));
        kept.until_open(&["r0"]).await;
        kept.fleet.report(&kept.balancer.replica(&"r0".into()).unwrap(), TrafficEvent::Completed);
        kept.apply(&config(&list(&[&a.url(), &b.url()]), ""));
        kept.until_gate("r1", Gate::HalfOpen).await;
        kept.fleet.report(&kept.balancer.replica(&"r1".into()).unwrap(), TrafficEvent::Alive);
        assert_eq!(kept.gate("r1"), Some(Gate::Open));
    });
}

#[test]
fn an_open_replica_of_the_model_is_asked_to_count() {
    use weighbridge::weigh::source::replica::ReplicaAsk;
    run(async {
        let replica = Replica::vllm(&["m"]).await;
        replica.say("/tokenize", 200, r#"{"count":7}"#);
        let kept = keep(&config(&list(&[&replica.url()]), ""));
        let ask = |model: &str, path: &str| {
            let (fleet, model, path) = (kept.fleet.clone(), model.into(), path.to_owned());
            async move { fleet.ask(&model, &path, "{}".into()).await }
        };
        assert!(ask("m", "/tokenize").await.unwrap_err().contains("no replica of m is open"));
        kept.until_open(&["r0"]).await;
        assert_eq!(ask("m", "/tokenize").await.unwrap(), r#"{"count":7}"#);
        assert!(ask("m", "/nothing").await.unwrap_err().contains("404"));
        assert!(ask("n", "/tokenize").await.is_err());
        replica.on("/tokenize", Reply::Hang);
        assert!(ask("m", "/tokenize").await.unwrap_err().contains("in time"));
        assert_eq!(replica.asked("/tokenize")[0].headers["content-type"], "application/json");
    });
}

#[test]
fn without_traffic_a_request_of_our_own_ends_the_trial() {
    run(async {
        let (a, b) = (Replica::vllm(&["m"]).await, Replica::vllm(&["m"]).await);
        let kept = keep(&config(&list(&[&a.url(), &b.url()]), ""));
        kept.until_open(&["r0", "r1"]).await;
        let r0 = kept.balancer.replica(&ReplicaId::from("r0")).unwrap();
        (0..3).for_each(|_| kept.fleet.report(&r0, TrafficEvent::FirstByteTimeout));
        assert!(a.asked("/v1/chat/completions").is_empty());
        kept.until_gate("r0", Gate::Open).await;
        assert_eq!(a.asked("/v1/chat/completions").len(), 1);
    });
}

#[test]
fn a_key_that_is_rotated_in_place_is_read_again_when_the_old_one_is_refused() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("key"), "old").unwrap();
        let replica = Replica::vllm(&["m"]).await;
        let text = format!("replicas: [{{id: r0, url: '{}', model: m, api_key_file: key}}]", replica.url());
        let kept = keep(&config_at(&text, "", dir.path()));
        kept.until_gate("r0", Gate::Open).await;
        std::fs::write(dir.path().join("key"), "new").unwrap();
        replica.say("/health", 401, "");
        until(
            || replica.asked("/health").iter().any(|a| a.headers["authorization"] == "Bearer new"),
            || "the new key".to_owned(),
        )
        .await;
    });
}
