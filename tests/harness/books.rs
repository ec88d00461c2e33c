//! Reads the balancer's books: the admin API and the metrics.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;

use super::client::{Answer, Client, get, request};
use super::within;

/// One line of `/metrics`.
#[derive(Clone, Debug)]
pub struct Series {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

/// A reader of one balancer's books.
#[derive(Clone, Copy, Debug)]
pub struct Books {
    pub admin: SocketAddr,
}

impl Books {
    pub async fn metrics(&self) -> Vec<Series> {
        let answer = get(self.admin, "/metrics").await;
        assert_eq!(answer.status, 200, "/metrics: {}", answer.text());
        parse(&answer.text())
    }

    /// The sum of all series of this name that carry these labels.
    pub async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        sum(&self.metrics().await, name, labels)
    }

    /// Tokens counted so far, by kind, whatever their source.
    pub async fn tokens(&self, kind: &str) -> u64 {
        self.metric("weighbridge_tokens_total", &[("kind", kind)]).await as u64
    }

    /// Requests counted so far with this outcome.
    pub async fn outcome(&self, outcome: &str) -> u64 {
        self.metric("weighbridge_requests_total", &[("outcome", outcome)]).await as u64
    }

    pub async fn replicas(&self) -> Vec<Value> {
        let answer = get(self.admin, "/admin/replicas").await;
        assert_eq!(answer.status, 200, "/admin/replicas: {}", answer.text());
        let value = answer.json();
        value.as_array().unwrap_or_else(|| panic!("an array of replicas: {value}")).clone()
    }

    pub async fn replica(&self, id: &str) -> Value {
        let all = self.replicas().await;
        all.iter().find(|r| r["id"] == id).unwrap_or_else(|| panic!("no replica {id} in {all:?}")).clone()
    }

    pub async fn has_replica(&self, id: &str) -> bool {
        self.replicas().await.iter().any(|r| r["id"] == id)
    }

    pub async fn in_flight(&self, id: &str) -> u64 {
        self.replica(id).await["requests_in_flight"].as_u64().expect("requests_in_flight")
    }

    pub async fn projected(&self, id: &str) -> u64 {
        self.replica(id).await["projected_tokens"].as_u64().expect("projected_tokens")
    }

    pub async fn state(&self, id: &str) -> String {
        self.replica(id).await["state"].as_str().expect("state").to_owned()
    }

    /// Waits until a replica is in this state.
    pub async fn reaches(&self, id: &str, state: &str, limit: Duration) {
        let mut last = String::new();
        let reached = within(limit, async || {
            last = self.state(id).await;
            last == state
        })
        .await;
        assert!(reached, "{id} should be {state} within {limit:?}, it is {last}");
    }

    /// Requests waiting in all queues.
    pub async fn waiting(&self) -> u64 {
        let answer = get(self.admin, "/admin/queues").await;
        assert_eq!(answer.status, 200, "/admin/queues: {}", answer.text());
        answer.json().as_array().expect("an array").iter().map(|q| q["waiting"].as_u64().expect("waiting")).sum()
    }

    /// What is not zero in the books.
    pub async fn left_over(&self) -> Vec<String> {
        let mut left = Vec::new();
        for replica in self.replicas().await {
            for key in
                ["projected_tokens", "booked_kv_tokens", "load_seconds", "active_sequences", "requests_in_flight"]
            {
                let value = replica[key].as_f64().unwrap_or_else(|| panic!("{key} in {replica}"));
                if value != 0.0 {
                    left.push(format!("{} of {} is {value}", key, replica["id"]));
                }
            }
        }
        let waiting = self.waiting().await;
        if waiting != 0 {
            left.push(format!("{waiting} are waiting"));
        }
        for series in self.metrics().await {
            if series.name == "weighbridge_replica_projected_tokens" && series.value != 0.0 {
                left.push(format!("{} {:?} is {}", series.name, series.labels, series.value));
            }
        }
        left
    }

    /// The books are at exactly zero, within two seconds.
    #[track_caller]
    pub fn settled(&self) -> impl Future<Output = ()> + use<> {
        let books = *self;
        let place = std::panic::Location::caller();
        async move {
            let mut left = Vec::new();
            let settled = within(Duration::from_secs(2), async || {
                left = books.left_over().await;
                left.is_empty()
            })
            .await;
            assert!(settled, "at {place}: still booked: {left:?}");
        }
    }

    pub async fn post(&self, path: &str) -> Answer {
        let host = self.admin.to_string();
        let mut client = Client::connect(self.admin).await;
        client.send(&request("POST", path, &[("host", &host), ("connection", "close")], Some(b""))).await;
        client.answer().await
    }
}

/// The sum of all series of this name that carry these labels.
pub fn sum(series: &[Series], name: &str, labels: &[(&str, &str)]) -> f64 {
    series
        .iter()
        .filter(|s| s.name == name && labels.iter().all(|(k, v)| s.labels.get(*k).is_some_and(|found| found == v)))
        .map(|s| s.value)
        .sum()
}

/// Parses Prometheus' text format.
pub fn parse(text: &str) -> Vec<Series> {
    text.lines()
        .filter(|line| !line.starts_with('#') && !line.trim().is_empty())
        .map(|line| {
            let (id, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("a metrics line: {line}"));
            let (name, labels) = match id.split_once('{') {
                Some((name, labels)) => (name, labels.strip_suffix('}').expect("closed labels")),
                None => (id, ""),
            };
            let labels = labels
                .split("\",")
                .filter(|pair| !pair.is_empty())
                .map(|pair| {
                    let (key, value) = pair.split_once("=\"").unwrap_or_else(|| panic!("a label: {pair}"));
                    (key.trim_start_matches(',').to_owned(), value.trim_end_matches('"').to_owned())
                })
                .collect();
            Series { name: name.to_owned(), labels, value: value.parse().unwrap_or(f64::NAN) }
        })
        .collect()
}
