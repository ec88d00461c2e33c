//! drain and reload: nothing running is cut, nothing broken is applied, nothing waits without need.

use std::time::{Duration, Instant};

use crate::harness::balancer::command;
use crate::harness::{Act, Client, End, Gate, Reply, Setup, Upstream, case_bytes, client, ms, within};
use crate::runner::{Case, case};
use crate::support::*;

pub fn cases() -> Vec<Case> {
    vec![
        case!(c111, "streams finish after SIGTERM, and the process ends with the last of them"),
        case!(c112, "an idle balancer ends at once"),
        case!(c114, "a bad configuration changes nothing, the next good one is taken"),
        case!(c115, "a removed replica finishes what it has, an edited one keeps its books"),
        case!(c117, "readiness falls at once while requests are still taken"),
    ]
}

async fn c111() {
    let (a, lb) = one_with(Setup::m1().section("shutdown", "{drain_window: 200ms, grace: 20s}")).await;
    // The case's twenty seconds a stream, scaled.
    a.plays(Reply::script("c111-upstream.jsonl").pauses(|_| ms(60)));
    let mut streams = Vec::new();
    for _ in 0..5 {
        let mut client = lb.ask(&case_bytes("c111-request.json")).await;
        let head = client.head().await;
        streams.push((client, head));
    }
    lb.signal("TERM");
    let finishing = streams.into_iter().map(|(mut client, head)| async move { client.rest(head).await });
    let finishing = tokio::spawn(futures::future::join_all(finishing));
    // After the window, new connections are refused or told to go.
    tokio::time::sleep(ms(600)).await;
    if let Ok(mut client) = Client::try_connect(lb.address).await {
        let _ = client.try_send(&crate::harness::client::request("POST", "/v1/chat/completions", &[], Some(HI))).await;
        if let Ok(answer) = client.try_answer().await {
            assert_eq!(answer.status, 503, "{}", answer.text());
            assert_eq!(answer.header("connection"), Some("close"));
        }
    }
    let answers = finishing.await.expect("the streams end");
    let last = answers.iter().map(|a| a.end_at).max().expect("five");
    for answer in answers {
        assert_eq!(answer.end, End::Clean);
        same_bytes(&answer.body, &case_bytes("c111-upstream-body.sse"));
    }
    let (status, _) = lb.exits_within(Duration::from_secs(3)).await.expect("it ends with the last stream");
    assert!(status.success(), "{status}");
    assert!(last.elapsed() < Duration::from_millis(1500), "{:?} after the last stream", last.elapsed());
    // What is left at the bound is broken visibly.
    let (a, lb) = one_with(Setup::m1().section("shutdown", "{drain_window: 0s, grace: 1s}")).await;
    a.plays(Reply::new(200, "text/event-stream").events(1, Duration::ZERO).act(Act::Hang));
    let mut client = lb.ask(HI_STREAM).await;
    let head = client.head().await;
    client.data().await;
    let start = Instant::now();
    lb.signal("TERM");
    let answer = client.rest(head).await;
    assert_ne!(answer.end, End::Clean);
    assert!(lb.exits_within(Duration::from_secs(4)).await.is_some(), "it ends at the bound");
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
}

async fn c112() {
    for window in ["0s", "500ms"] {
        let (_a, lb) =
            one_with(Setup::m1().section("shutdown", &format!("{{drain_window: {window}, grace: 300s}}"))).await;
        lb.chat(HI).await;
        // An idle kept-alive connection holds nothing up.
        let mut idle = lb.client().await;
        idle.post("/v1/chat/completions", HI).await;
        idle.answer().await;
        lb.signal("TERM");
        let (status, took) = lb.exits_within(Duration::from_secs(5)).await.expect("it ends");
        assert!(status.success() && took < Duration::from_secs(2), "{status} after {took:?}");
    }
}

async fn c114() {
    let (a, lb) = one().await;
    let good = lb.yaml();
    let failures = async || lb.books().metric("weighbridge_config_reloads_total", &[("result", "failed")]).await;
    let revision = async || lb.books().metric("weighbridge_config_revision", &[]).await;
    let first = revision().await;
    let dir = lb.dir();
    std::fs::create_dir_all(dir.join("nothing")).expect("a directory");
    let bad: Vec<(&str, Vec<u8>)> = vec![
        ("broken YAML", case_bytes("c114-bad-1.yaml")),
        ("an unknown key", case_bytes("c114-bad-2.yaml")),
        ("an empty file", case_bytes("c114-bad-3.yaml")),
        ("cut in the middle", good.as_bytes()[..good.len() / 2].to_vec()),
        ("a misspelt key", good.replace("tokenizer:", "tokeniser:").into_bytes()),
        ("an unknown model", good.replace("model: m1", "model: m7").into_bytes()),
        ("a replica twice", format!("{good}  - {{id: a, url: \"http://127.0.0.1:9\", model: m1}}\n").into_bytes()),
        ("no replicas", good.split("replicas:").next().expect("a part").as_bytes().to_vec()),
        ("a tokenizer folder that is not there", good.replace("byte-tokenizer", "no-such-folder").into_bytes()),
        ("a tab", b"listen:\n\t- x".to_vec()),
        ("not UTF-8", vec![0xff, 0xfe, 0x00]),
    ];
    for (n, (what, yaml)) in bad.iter().enumerate() {
        lb.write_config(yaml);
        let answer = lb.reload().await;
        assert!(answer.status >= 400, "{what}: {} {}", answer.status, answer.text());
        assert_eq!(lb.chat(HI).await.status, 200, "{what}: the old one serves on");
        assert!(failures().await >= (n + 1) as f64, "{what} is counted");
        assert_eq!(revision().await, first, "{what}: nothing is applied");
        // At a first start the same file is fatal.
        let path = dir.join("first.yaml");
        std::fs::write(&path, yaml).expect("a file");
        let (code, out, err) = command(&["serve", "--config", path.to_str().expect("UTF-8")], b"");
        assert!(code.is_some_and(|c| c != 0), "{what}: {code:?}");
        assert!(format!("{out}{err}").contains("first.yaml"), "{what}: the file is named: {out}{err}");
    }
    assert!(lb.log().contains("line") || lb.log().contains("yaml:"), "the log tells the line: {}", lb.log());
    // Gone altogether, then back; by a signal, too.
    std::fs::remove_file(&lb.config).expect("removed");
    lb.signal("HUP");
    tokio::time::sleep(ms(300)).await;
    assert_eq!(lb.chat(HI).await.status, 200);
    let b = Upstream::start().await;
    lb.write_config(
        format!("{good}  - {{id: b, url: \"{}\", model: m1, max_context_tokens: 4096}}\n", b.url()).as_bytes(),
    );
    lb.signal("HUP");
    let taken = within(Duration::from_secs(3), async || lb.books().has_replica("b").await).await;
    assert!(taken, "the next good one is taken: {}", lb.log());
    assert!(revision().await != first);
    // A symlink that is swapped, as Kubernetes does it.
    for (name, replicas) in [("one", 1), ("two", 2)] {
        let target = dir.join(name);
        let text = if replicas == 1 {
            good.clone()
        } else {
            format!("{good}  - {{id: b, url: \"{}\", model: m1, max_context_tokens: 4096}}\n", b.url())
        };
        std::fs::write(&target, text).expect("a file");
        let link = dir.join("link");
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(&target, &link).expect("a link");
        std::fs::rename(&link, &lb.config).expect("a swap");
        lb.signal("HUP");
        let swapped = within(Duration::from_secs(3), async || {
            lb.books().replicas().await.iter().filter(|r| r["state"] != "draining").count() == replicas
        })
        .await;
        assert!(swapped, "{name}: {:?}", lb.books().replicas().await);
    }
    assert_eq!(lb.chat(HI).await.status, 200);
    assert!(a.complaints().is_empty(), "{:?}", a.complaints());
    lb.books().settled().await;
}

async fn c115() {
    let (a, b, lb) = two_with(Setup::m1()).await;
    let gate = Gate::closed();
    let held = Reply::new(200, "text/event-stream")
        .events(2, Duration::ZERO)
        .act(Act::Hold(gate.clone()))
        .events(2, Duration::ZERO);
    a.plays(held.clone());
    b.plays(held);
    let mut streams = Vec::new();
    while a.count() < 3 {
        let mut client = lb.ask(HI_STREAM).await;
        let head = client.head().await;
        // Both events: until then what is booked is still drawn down.
        let mut seen = Vec::new();
        while seen.windows(2).filter(|pair| pair == b"\n\n").count() < 2 {
            seen.extend_from_slice(&client.data().await);
        }
        streams.push((client, head));
    }
    let (a_url, b_url) = (a.url(), b.url());
    // A is edited: its books stay.
    let before = lb.books().replica("a").await;
    lb.rewrite(|s| s.no_replicas().replica_with("a", &a_url, "tokens_per_sec: 500").replica("b", &b_url));
    assert_eq!(lb.reload().await.status, 200);
    let after = lb.books().replica("a").await;
    for key in ["requests_in_flight", "projected_tokens", "booked_kv_tokens", "active_sequences"] {
        assert_eq!(before[key], after[key], "{key}");
    }
    assert_eq!(after["state"], "open", "an edit is no reason to be probed anew");
    // A is removed: it gets nothing new and finishes what it has.
    lb.rewrite(|s| s.no_replicas().replica("b", &b_url));
    assert_eq!(lb.reload().await.status, 200);
    b.plays(Reply::chat(3, 2));
    for _ in 0..6 {
        assert_eq!(lb.chat(HI).await.replica(), "b");
    }
    assert_eq!(lb.books().state("a").await, "draining");
    gate.open();
    for (mut client, head) in streams {
        let answer = client.rest(head).await;
        assert_eq!(answer.end, End::Clean, "a good answer stays one");
    }
    let gone = within(Duration::from_secs(3), async || !lb.books().has_replica("a").await).await;
    assert!(gone, "then its state goes: {:?}", lb.books().replicas().await);
    // And comes back by a later reload.
    a.plays(Reply::chat(3, 2));
    lb.rewrite(|s| s.no_replicas().replica("a", &a_url).replica("b", &b_url));
    assert_eq!(lb.reload().await.status, 200);
    let served = within(Duration::from_secs(5), async || lb.chat(HI).await.replica() == "a").await;
    assert!(served, "{:?}", lb.books().replicas().await);
    outcomes(&lb.books(), "upstream_error", 0).await;
    lb.books().settled().await;
}

async fn c117() {
    let (a, lb) = one_with(Setup::m1().section("shutdown", "{drain_window: 1500ms, grace: 20s}")).await;
    // Something still runs, so that the process outlives its window.
    let gate = Gate::closed();
    a.then(Reply::chat(3, 2).after_gate(&gate));
    let mut running = lb.ask(HI).await;
    a.wait_for(1).await;
    lb.signal("TERM");
    let start = Instant::now();
    let fell = within(ms(500), async || client::get(lb.admin, "/readyz").await.status == 503).await;
    assert!(fell, "readiness turns 503 at once");
    let mut taken = 0;
    while start.elapsed() < ms(1200) {
        assert_eq!(lb.chat(HI).await.status, 200, "still taken after {:?}", start.elapsed());
        assert_eq!(client::get(lb.admin, "/readyz").await.status, 503);
        assert_eq!(client::get(lb.admin, "/healthz").await.status, 200, "alive");
        taken += 1;
        tokio::time::sleep(ms(100)).await;
    }
    assert!(taken > 3);
    let closed = within(Duration::from_secs(3), async || match Client::try_connect(lb.address).await {
        Err(_) => true,
        Ok(mut c) => {
            let _ = c.try_send(&crate::harness::client::request("POST", "/v1/chat/completions", &[], Some(HI))).await;
            !matches!(c.try_answer().await, Ok(answer) if answer.status == 200)
        }
    })
    .await;
    assert!(closed, "then the listener closes");
    gate.open();
    assert_eq!(running.answer().await.status, 200);
    assert!(lb.exits_within(Duration::from_secs(3)).await.is_some());
}
