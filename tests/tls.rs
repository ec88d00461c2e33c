//! TLS on both sides: certificates checked, reloaded, asked for; HTTP/2 where the other side speaks it.

mod harness;

use std::time::Duration;

use harness::h2::{Ending, H2Client, H2Upstream, Manner};
use harness::tls::{TlsFront, connect, pem};
use harness::{Reply, Running, Setup, Upstream, run, within};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const HI: &[u8] = br#"{"model":"m1","messages":[{"role":"user","content":"hi"}]}"#;

fn listening(extra: &str) -> Setup {
    let yaml = format!(
        "\n  - {{address: $ADDRESS, tls: {{cert: {}, key: {}{extra}}}}}",
        pem("server.pem").display(),
        pem("server.key").display()
    );
    Setup::m1().section("listen", &yaml)
}

/// One request over HTTP/1.1 in TLS; the status.
async fn over_tls(lb: &Running, with_certificate: bool) -> std::io::Result<u16> {
    let mut tls = connect(lb.address, &[b"http/1.1"], with_certificate).await?;
    tls.write_all(&harness::client::request("POST", "/v1/chat/completions", &[("connection", "close")], Some(HI)))
        .await?;
    let mut answer = Vec::new();
    tls.read_to_end(&mut answer).await?;
    let text = String::from_utf8_lossy(&answer);
    text.get(9..12).and_then(|s| s.parse().ok()).ok_or_else(|| std::io::Error::other(format!("no status: {text}")))
}

#[test]
fn a_tls_listener_speaks_http_1_and_2() {
    run(async {
        let a = Upstream::start().await;
        let lb = listening("").replica("a", &a.url()).start().await;
        assert_eq!(over_tls(&lb, false).await.expect("an answer"), 200);
        let tls = connect(lb.address, &[b"h2", b"http/1.1"], false).await.expect("a handshake");
        assert_eq!(tls.get_ref().1.alpn_protocol(), Some(&b"h2"[..]), "h2 is chosen where it is offered");
        let mut h2 = H2Client::over(tls).await;
        let answer = h2.chat(HI, Ending::OnLastData).await;
        assert_eq!((answer.status, answer.reset), (200, None));
        assert_eq!(a.seen()[1].header("x-forwarded-proto"), Some("https"));
        // Plain text on it is refused, and the rest goes on.
        let mut plain = lb.client().await;
        let _ = plain.try_send(&harness::client::request("POST", "/v1/chat/completions", &[], Some(HI))).await;
        assert!(plain.try_answer().await.is_err() || a.count() == 2);
        assert_eq!(over_tls(&lb, false).await.expect("an answer"), 200);
        lb.books().settled().await;
    });
}

#[test]
fn a_listener_with_a_client_authority_refuses_strangers() {
    run(async {
        let a = Upstream::start().await;
        let lb = listening(&format!(", client_ca: {}", pem("ca.pem").display())).replica("a", &a.url()).start().await;
        assert_eq!(over_tls(&lb, true).await.expect("an answer"), 200);
        assert!(over_tls(&lb, false).await.is_err(), "a client without a certificate gets no answer");
        assert_eq!(a.count(), 1);
        lb.books().settled().await;
    });
}

#[test]
fn certificates_are_reloaded_with_the_configuration() {
    run(async {
        let a = Upstream::start().await;
        let setup = Setup::m1();
        let (cert, key) = (setup.path("c.pem"), setup.path("k.pem"));
        let put = |name: &str| {
            std::fs::copy(pem(&format!("{name}.pem")), &cert).expect("a copy");
            std::fs::copy(pem(&format!("{name}.key")), &key).expect("a copy");
        };
        put("server");
        let yaml = format!("\n  - {{address: $ADDRESS, tls: {{cert: {}, key: {}}}}}", cert.display(), key.display());
        let lb = setup.section("listen", &yaml).replica("a", &a.url()).start().await;
        let shown = async || {
            let tls = connect(lb.address, &[], false).await.expect("a handshake");
            tls.get_ref().1.peer_certificates().expect("a certificate")[0].to_vec()
        };
        let first = shown().await;
        put("other");
        assert_eq!(lb.reload().await.status, 200);
        let changed = within(Duration::from_secs(3), async || shown().await != first).await;
        assert!(changed, "the new certificate is shown");
        // A broken one is refused and the good one stays.
        std::fs::write(&cert, "no certificate").expect("a file");
        assert!(lb.reload().await.status >= 400);
        assert_eq!(over_tls(&lb, false).await.expect("an answer"), 200);
        lb.books().settled().await;
    });
}

#[test]
fn a_replica_behind_tls_is_checked_against_its_authority() {
    run(async {
        let a = Upstream::start().await;
        let front = TlsFront::before(a.address, "server", false).await;
        let url = format!("https://localhost:{}", front.address.port());
        let ca = format!("tls: {{ca: {}}}", pem("ca.pem").display());
        let lb = Setup::m1().replica_with("a", &url, &ca).start().await;
        assert_eq!(lb.chat(HI).await.status, 200);
        // Unknown authority, and a name that the certificate does not have.
        for (url, extra) in [(url.clone(), String::new()), (url.replace("localhost", "127.0.0.2"), ca.clone())] {
            let lb = Setup::m1().replica_with("a", &url, &extra).start().await;
            let before = a.count();
            let answer = lb.chat(HI).await;
            assert!(matches!(answer.status, 502 | 503), "{} {}", answer.status, answer.text());
            assert_eq!(a.count(), before);
            lb.books().settled().await;
        }
    });
}

#[test]
fn a_replica_that_asks_for_a_certificate_gets_ours() {
    run(async {
        let a = Upstream::start().await;
        let front = TlsFront::before(a.address, "server", true).await;
        let url = format!("https://localhost:{}", front.address.port());
        let with = format!(
            "tls: {{ca: {}, cert: {}, key: {}}}",
            pem("ca.pem").display(),
            pem("client.pem").display(),
            pem("client.key").display()
        );
        let lb = Setup::m1().replica_with("a", &url, &with).start().await;
        assert_eq!(lb.chat(HI).await.status, 200);
        let without = format!("tls: {{ca: {}}}", pem("ca.pem").display());
        let lb = Setup::m1().replica_with("a", &url, &without).start().await;
        assert_ne!(lb.chat(HI).await.status, 200);
        lb.books().settled().await;
    });
}

#[test]
fn a_replica_may_speak_h2c() {
    run(async {
        for manner in [Manner::Answer, Manner::Stream] {
            let a = H2Upstream::start(manner).await;
            let lb = Setup::m1().replica("a", &a.url()).start().await;
            for _ in 0..5 {
                let answer = lb.chat(HI).await;
                assert_eq!(answer.status, 200, "{}", answer.text());
            }
            assert_eq!(a.count(), 5);
            assert!(a.bodies().iter().all(|b| &b[..] == HI));
            lb.books().settled().await;
        }
        // A client that leaves resets its stream there.
        let a = H2Upstream::start(Manner::Hang).await;
        let lb = Setup::m1().replica("a", &a.url()).start().await;
        let client = lb.ask(HI).await;
        assert!(within(Duration::from_secs(3), async || a.count() == 1).await);
        drop(client);
        assert!(within(Duration::from_secs(2), async || a.resets().len() == 1).await, "the stream is reset");
        lb.books().settled().await;
    });
}

#[test]
fn h2c_on_a_listener_is_only_where_it_was_asked_for() {
    run(async {
        let a = Upstream::start().await;
        a.plays(Reply::chat(3, 2));
        let lb = Setup::m1().replica("a", &a.url()).start().await;
        let mut client = lb.client().await;
        client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
        let answered = client.try_answer().await;
        assert!(answered.is_err() || answered.is_ok_and(|a| a.status >= 400), "no h2c by default");
        lb.books().settled().await;
    });
}
