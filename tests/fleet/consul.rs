//! Replicas that are a Consul service.

use std::time::Duration;

use crate::bench::{Replica, config, config_at, for_a_while, keep, run, until};
use crate::consul_server::Consul;

fn discovery(url: &str, more: &str) -> String {
    format!("discovery: {{consul: {{address: '{url}', service: llm, template: {{model: m}}{more}}}}}")
}

#[test]
fn passing_instances_come_and_go_with_the_blocking_query() {
    run(async {
        let (a, b) = (Replica::vllm(&["m"]).await, Replica::vllm(&["m"]).await);
        let (consul, url) = Consul::start().await;
        consul.set(10, &[("gpu-1", a.address, "700")]);
        let kept = keep(&config(&discovery(&url, ""), ""));
        kept.until_open(&["gpu-1"]).await;
        assert_eq!(kept.balancer.replica(&"gpu-1".into()).unwrap().spec().tokens_per_sec, 700.0);
        consul.set(11, &[("gpu-1", a.address, "700"), ("gpu-2", b.address, "900")]);
        kept.until_open(&["gpu-1", "gpu-2"]).await;
        consul.set(12, &[("gpu-2", b.address, "900")]);
        kept.until_open(&["gpu-2"]).await;
        let asked = consul.asked.lock().len();
        assert!(asked <= 6, "{asked} queries for three states: they block");
    });
}

#[test]
fn a_failing_consul_and_an_empty_answer_keep_the_last_good_set() {
    run(async {
        let a = Replica::vllm(&["m"]).await;
        let b = Replica::vllm(&["m"]).await;
        let (consul, url) = Consul::start().await;
        consul.set(10, &[("gpu-1", a.address, "1")]);
        let kept = keep(&config(&discovery(&url, ""), ""));
        kept.until_open(&["gpu-1"]).await;
        *consul.broken.lock() = true;
        consul.set(11, &[("gpu-1", a.address, "1")]);
        until(|| kept.fleet.discovery_states() == [("consul:llm".to_owned(), false)], || "a failure".to_owned()).await;
        for_a_while(Duration::from_millis(700), || kept.open() == ["gpu-1"], "the last good set stays").await;
        *consul.broken.lock() = false;
        consul.set(12, &[("gpu-1", a.address, "1"), ("gpu-2", b.address, "1")]);
        kept.until_open(&["gpu-1", "gpu-2"]).await;
        assert_eq!(kept.fleet.discovery_states(), [("consul:llm".to_owned(), true)]);
        consul.set(13, &[]);
        until(|| !kept.fleet.discovery_states()[0].1, || "an empty answer to be told".to_owned()).await;
        assert_eq!(kept.open(), ["gpu-1", "gpu-2"]);
    });
}

#[test]
fn an_index_that_goes_back_starts_over_and_the_token_is_sent() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("token"), "acl\n").unwrap();
        let (a, b) = (Replica::vllm(&["m"]).await, Replica::vllm(&["m"]).await);
        let (consul, url) = Consul::start().await;
        consul.set(100, &[("gpu-1", a.address, "1")]);
        let kept = keep(&config_at(&discovery(&url, ", token_file: token"), "", dir.path()));
        kept.until_open(&["gpu-1"]).await;
        consul.set(5, &[("gpu-2", b.address, "1")]);
        kept.until_open(&["gpu-2"]).await;
        let asked = || consul.asked.lock().clone();
        let over = || asked().iter().filter(|(index, _)| index.is_none()).count();
        until(|| over() == 2, || format!("a query that starts over: {:?}", asked())).await;
        assert!(asked().iter().all(|(_, token)| token.as_deref() == Some("acl")));
    });
}
