//! Replicas that advertise themselves in a real etcd.

use std::time::Duration;

use serde_json::json;

use crate::bench::{Replica, config, config_at, for_a_while, keep, run, until};
use crate::etcd_server::Etcd;

fn discovery(url: &str) -> String {
    format!("discovery: {{etcd: {{endpoints: ['{url}'], prefix: /gpus/, template: {{model: m, tokens_per_sec: 5}}}}}}")
}

#[test]
fn replicas_advertise_themselves_and_vanish_with_their_lease() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (Replica::vllm(&["m"]).await, Replica::vllm(&["m"]).await);
        let etcd = Etcd::start(dir.path()).await;
        etcd.put("/gpus/a", &a.url(), None).await;
        etcd.put("/other", "http://127.0.0.1:9", None).await;
        let kept = keep(&config(&discovery(&etcd.url()), ""));
        kept.until_open(&["a"]).await;
        let lease = etcd.lease(2).await;
        let advertised = json!({"url": b.url(), "tokens_per_sec": 900, "token_capacity": 5000}).to_string();
        etcd.put("/gpus/b", &advertised, Some(&lease)).await;
        kept.until_open(&["a", "b"]).await;
        let spec = kept.balancer.replica(&"b".into()).unwrap().spec();
        assert_eq!((spec.tokens_per_sec, spec.token_capacity.map(|t| t.0)), (900.0, Some(5000)));
        until(|| kept.gate("b").is_none(), || "b to vanish with its lease".to_owned()).await;
        assert_eq!(kept.open(), ["a"]);
    });
}

#[test]
fn a_damaged_advertisement_is_passed_over_and_the_others_count() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        let a = Replica::vllm(&["m"]).await;
        let etcd = Etcd::start(dir.path()).await;
        etcd.put("/gpus/bad", r#"{"url": "nonsense", "modle": "m"}"#, None).await;
        etcd.put("/gpus/a", &a.url(), None).await;
        let kept = keep(&config(&discovery(&etcd.url()), ""));
        kept.until_open(&["a"]).await;
        assert_eq!(kept.balancer.replicas().len(), 1);
    });
}

#[test]
fn etcd_stopped_and_restarted_loses_no_replica_and_is_followed_again() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (Replica::vllm(&["m"]).await, Replica::vllm(&["m"]).await);
        let mut etcd = Etcd::start(dir.path()).await;
        etcd.put("/gpus/a", &a.url(), None).await;
        let kept = keep(&config(&discovery(&etcd.url()), ""));
        kept.until_open(&["a"]).await;
        etcd.stop();
        until(|| kept.fleet.discovery_states() == [("etcd:/gpus/".to_owned(), false)], || "a failure".to_owned()).await;
        for_a_while(Duration::from_secs(1), || kept.open() == ["a"], "the last good set stays").await;
        etcd.restart(dir.path()).await;
        etcd.put("/gpus/b", &b.url(), None).await;
        kept.until_open(&["a", "b"]).await;
        assert!(kept.fleet.discovery_states()[0].1);
    });
}

#[test]
fn a_user_and_its_password_are_shown_where_etcd_asks_for_them() {
    run(async {
        let (dir, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (a, b) = (Replica::vllm(&["m"]).await, Replica::vllm(&["m"]).await);
        let mut etcd = Etcd::start(dir.path()).await;
        etcd.put("/gpus/a", &a.url(), None).await;
        etcd.authenticate("/gpus/", "s3cret").await;
        std::fs::write(files.path().join("password"), "wrong\n").unwrap();
        let text = discovery(&etcd.url()).replace("prefix:", "user: lb, password_file: password, prefix:");
        let kept = keep(&config_at(&text, "", files.path()));
        let error = || kept.fleet.status().sources[0].error.clone().unwrap_or_default();
        until(|| error().contains("user `lb` is not let in"), || format!("a refusal, but: {}", error())).await;
        // Put right in place, without a reload.
        std::fs::write(files.path().join("password"), "s3cret\n").unwrap();
        kept.until_open(&["a"]).await;
        etcd.put("/gpus/b", &b.url(), None).await;
        kept.until_open(&["a", "b"]).await;
        assert!(!serde_json::to_string(&kept.fleet.status()).unwrap().contains("s3cret"));
    });
}

#[test]
fn who_shows_no_user_is_refused_where_etcd_asks_for_one() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        let a = Replica::vllm(&["m"]).await;
        let mut etcd = Etcd::start(dir.path()).await;
        etcd.put("/gpus/a", &a.url(), None).await;
        etcd.authenticate("/gpus/", "s3cret").await;
        let kept = keep(&config(&discovery(&etcd.url()), ""));
        until(|| kept.fleet.discovery_states() == [("etcd:/gpus/".to_owned(), false)], || "a failure".to_owned()).await;
        for_a_while(Duration::from_millis(700), || kept.open().is_empty(), "nothing is found").await;
    });
}
