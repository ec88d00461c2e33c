//! The instruments themselves, without a balancer between: what they say of it can be trusted only if they are right.

mod harness;

use std::time::{Duration, Instant};

use harness::client::post;
use harness::h2::{Ending, H2Client, H2Upstream, Manner};
use harness::{Act, Client, End, Reply, Upstream, case_bytes, files, ms, run};

#[test]
fn every_script_of_the_collection_is_played_byte_for_byte() {
    run(async {
        let a = Upstream::start().await;
        let mut played = 0;
        for entry in std::fs::read_dir(files::path("field_cases/data")).expect("the collection") {
            let name = entry.expect("an entry").file_name().to_string_lossy().into_owned();
            let Some(id) = name.strip_suffix("-upstream.jsonl") else { continue };
            let reply = Reply::script(&name).pauses(|p| p.min(ms(20)));
            let reset = reply.acts.iter().any(|act| matches!(act, Act::Rst));
            let body = reply.body();
            let status = reply.status;
            a.then(reply);
            let answer = post(a.address, "/v1/chat/completions", b"{}").await;
            assert_eq!((answer.status, answer.end == End::Clean), (status, !reset), "{id}: {:?}", answer.end);
            assert_eq!(answer.body, body, "{id}");
            for kind in ["sse", "json", "bin"] {
                let file = files::path("field_cases/data").join(format!("{id}-upstream-body.{kind}"));
                if file.exists() {
                    assert_eq!(answer.body, case_bytes(&format!("{id}-upstream-body.{kind}")), "{id}");
                }
            }
            played += 1;
        }
        assert!(played >= 30, "{played} scripts");
        assert!(a.complaints().is_empty(), "{:?}", a.complaints());
    });
}

#[test]
fn a_replica_sees_when_its_client_leaves_and_what_it_sent() {
    run(async {
        let a = Upstream::start().await;
        a.plays(Reply::never());
        let mut client = Client::connect(a.address).await;
        client.post_with("/v1/x?y=1", &[("X-A", "b")], b"body").await;
        a.wait_for(1).await;
        let left = Instant::now();
        drop(client);
        let late = a.left_after(0, left, Duration::from_secs(1)).await.expect("it is seen");
        assert!(late < ms(50), "{late:?}");
        let seen = a.only();
        assert_eq!((seen.target.as_str(), seen.header("x-a"), &seen.body[..]), ("/v1/x?y=1", Some("b"), &b"body"[..]));
        // Two framings are no proper request.
        let mut client = Client::connect(a.address).await;
        client.send(b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n").await;
        tokio::time::sleep(ms(50)).await;
        assert_eq!(a.complaints().len(), 1);
    });
}

#[test]
fn a_client_tells_a_clean_end_from_a_cut_and_a_reset() {
    run(async {
        let a = Upstream::start().await;
        for (act, end) in [
            (None, End::Clean),
            (Some(Act::Fin), End::Clean),
            (Some(Act::Cut), End::Truncated),
            (Some(Act::Rst), End::Reset),
        ] {
            let mut reply = Reply::new(200, "text/plain").send("abc");
            reply.acts.extend(act.clone());
            a.then(reply);
            assert_eq!(post(a.address, "/", b"").await.end, end, "{act:?}");
        }
    });
}

#[test]
fn http_2_client_and_replica_understand_one_another() {
    run(async {
        let a = H2Upstream::start(Manner::Answer).await;
        let mut client = H2Client::connect(a.address).await;
        for ending in [Ending::OnLastData, Ending::OnEmptyData] {
            let answer = client.chat(b"{}", ending).await;
            assert_eq!((answer.status, answer.reset), (200, None));
        }
        *a.manner.lock() = Manner::Reset(h2::Reason::REFUSED_STREAM);
        assert_eq!(client.chat(b"{}", Ending::OnLastData).await.reset, Some(h2::Reason::REFUSED_STREAM));
        *a.manner.lock() = Manner::GoAway;
        assert_eq!(client.chat(b"{}", Ending::OnLastData).await.status, 0, "no answer at all");
        assert_eq!(a.count(), 4);
    });
}
