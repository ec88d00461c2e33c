//! Scraping engines' metrics over real sockets.

use std::time::Duration;

use weighbridge::config::Engine;

use crate::bench::{Replica, Reply, config, keep, list, run, until};

const VLLM: &str = include_str!("../data/fleet/vllm-0.32-busy.prom");

#[test]
fn metrics_of_a_vllm_reach_the_books() {
    run(async {
        let replica = Replica::vllm(&["m"]).await;
        replica.say("/metrics", 200, VLLM);
        replica.say("/load", 200, r#"{"server_load":20}"#);
        let kept = keep(&config(&list(&[&replica.url()]), "scrape: {interval: 50ms}"));
        until(|| kept.balancer.views()[0].kv_pressure.is_some(), || "KV pressure in the books".to_owned()).await;
        let view = &kept.balancer.views()[0];
        assert_eq!(view.token_capacity.map(|t| t.0), Some(182 * 128), "read from the engine's cache info");
        let status = &kept.fleet.status().replicas[0];
        assert_eq!(status.engine, Engine::Vllm);
        assert_eq!((status.scrape.running, status.scrape.waiting), (Some(8.0), Some(12.0)), "/load counts at once");
    });
}

#[test]
fn a_slow_scrape_is_made_less_often_and_never_twice_at_once() {
    run(async {
        let replica = Replica::vllm(&["m"]).await;
        replica.on("/metrics", Reply::Late(Duration::from_millis(200), VLLM.to_owned()));
        let kept = keep(&config(&list(&[&replica.url()]), "scrape: {interval: 20ms}"));
        until(|| !replica.asked("/metrics").is_empty(), || "a scrape".to_owned()).await;
        tokio::time::sleep(Duration::from_millis(1500)).await;
        let n = replica.asked("/metrics").len();
        assert!(n <= 2, "{n} scrapes of 200 ms in 1.5 s: the pause is ten times as long as the scrape");
        assert_eq!(kept.open(), ["r0"]);
    });
}

#[test]
fn an_engine_without_metrics_is_served_all_the_same() {
    run(async {
        let replica = Replica::vllm(&["m"]).await;
        let kept = keep(&config(&list(&[&replica.url()]), "scrape: {interval: 30ms}"));
        kept.until_open(&["r0"]).await;
        until(|| kept.fleet.status().replicas[0].scrape.failed >= 2, || "failed scrapes".to_owned()).await;
        assert_eq!((kept.open(), kept.balancer.views()[0].kv_pressure), (vec!["r0".to_owned()], None));
    });
}

#[test]
fn off_reads_no_metrics() {
    run(async {
        let replica = Replica::vllm(&["m"]).await;
        let kept = keep(&config(&list(&[&replica.url()]), "scrape: {interval: off}"));
        kept.until_open(&["r0"]).await;
        tokio::time::sleep(Duration::from_millis(700)).await;
        assert!(replica.asked("/metrics").is_empty());
    });
}

#[test]
fn a_llama_servers_slots_make_its_capacity() {
    run(async {
        let replica = Replica::bare().await;
        replica.say("/health", 200, r#"{"status":"ok"}"#);
        let models = r#"{"data":[{"id":"other","owned_by":"llamacpp","meta":{"n_ctx":2048}}]}"#;
        replica.say("/v1/models", 200, models);
        replica.say("/props", 200, r#"{"default_generation_settings":{"n_ctx":2048},"total_slots":4}"#);
        let kept = keep(&config(&list(&[&replica.url()]), ""));
        kept.until_open(&["r0"]).await;
        assert_eq!(kept.balancer.views()[0].token_capacity.map(|t| t.0), Some(8192));
        assert_eq!(kept.balancer.window(&"m".into()).map(|t| t.0), Some(2048));
    });
}
