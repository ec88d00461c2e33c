//! A name server of a few lines: A, AAAA and SRV by script, over UDP.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hickory_resolver::Name;
use hickory_resolver::proto::op::{Message, MessageType, OpCode, ResponseCode};
use hickory_resolver::proto::rr::rdata::{A, AAAA, SRV};
use hickory_resolver::proto::rr::{RData, Record};
use weighbridge::balance::Gate;

use crate::bench::{Replica, config, for_a_while, keep, run, until};

/// Owner names and their data; `None` where the server fails.
type Records = Arc<Mutex<Option<Vec<(&'static str, RData)>>>>;

struct Server {
    address: SocketAddr,
    records: Records,
    asked: Arc<Mutex<usize>>,
}

const TTL_SECONDS: u32 = 1;

impl Server {
    async fn start() -> Server {
        let socket = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let records = Records::default();
        let asked: Arc<Mutex<usize>> = Arc::default();
        let (script, count) = (records.clone(), asked.clone());
        tokio::spawn(async move {
            let mut buffer = [0; 2048];
            loop {
                let (n, from) = socket.recv_from(&mut buffer).await.unwrap();
                let question = Message::from_vec(&buffer[..n]).unwrap();
                *count.lock().unwrap() += 1;
                let mut answer = Message::new();
                answer.set_id(question.id()).set_message_type(MessageType::Response).set_op_code(OpCode::Query);
                answer.set_recursion_available(true).set_authoritative(true);
                match script.lock().unwrap().as_ref() {
                    None => drop(answer.set_response_code(ResponseCode::ServFail)),
                    Some(records) => {
                        for query in question.queries() {
                            answer.add_query(query.clone());
                            let name = query.name().to_ascii().to_lowercase();
                            for (owner, data) in records {
                                if name.trim_end_matches('.') == *owner && data.record_type() == query.query_type() {
                                    let record = Record::from_rdata(query.name().clone(), TTL_SECONDS, data.clone());
                                    answer.add_answer(record);
                                }
                            }
                        }
                    }
                }
                socket.send_to(&answer.to_vec().unwrap(), from).await.unwrap();
            }
        });
        Server { address, records, asked }
    }

    fn set(&self, records: Option<Vec<(&'static str, RData)>>) {
        *self.records.lock().unwrap() = records;
    }
}

fn a(last: u8) -> RData {
    RData::A(A(Ipv4Addr::new(127, 0, 0, last)))
}

fn srv(target: &str, port: u16) -> RData {
    RData::SRV(SRV::new(0, 0, port, Name::from_ascii(target).unwrap()))
}

fn discovery(server: &Server, how: &str) -> String {
    format!(
        "discovery: {{dns: {{name: gpus.test, {how}, ttl_min: 200ms, ttl_max: 400ms, resolvers: ['{}'], template: {{model: m}}}}}}",
        server.address
    )
}

#[test]
fn srv_records_are_replicas_and_are_asked_again_by_their_ttl() {
    run(async {
        let (one, two) = (Replica::vllm(&["m"]).await, Replica::vllm(&["m"]).await);
        let (p, q) = (one.address.port(), two.address.port());
        let server = Server::start().await;
        server.set(Some(vec![("gpus.test", srv("g1.test.", p)), ("g1.test", a(1)), ("g2.test", a(1))]));
        let kept = keep(&config(&discovery(&server, "srv: true"), ""));
        let (first, second) = (format!("g1.test:{p}"), format!("g2.test:{q}"));
        kept.until_open(&[&first]).await;
        let both = vec![
            ("gpus.test", srv("g1.test.", p)),
            ("gpus.test", srv("g2.test.", q)),
            ("g1.test", a(1)),
            ("g2.test", a(1)),
        ];
        server.set(Some(both));
        kept.until_open(&[&first, &second]).await;
        server.set(Some(vec![("gpus.test", srv("g2.test.", q)), ("g2.test", a(1))]));
        kept.until_open(&[&second]).await;
    });
}

#[test]
fn addresses_of_both_families_are_replicas_at_the_configured_port() {
    run(async {
        let replica = Replica::vllm(&["m"]).await;
        let port = replica.address.port();
        let server = Server::start().await;
        let v6 = RData::AAAA(AAAA(Ipv6Addr::LOCALHOST));
        server.set(Some(vec![("gpus.test", a(1)), ("gpus.test", v6)]));
        let kept = keep(&config(&discovery(&server, &format!("port: {port}")), ""));
        kept.until_gate(&format!("127.0.0.1:{port}"), Gate::Open).await;
        until(|| kept.gate(&format!("[::1]:{port}")).is_some(), || "the IPv6 one".to_owned()).await;
    });
}

#[test]
fn a_failing_name_server_keeps_the_last_good_set_and_says_so() {
    run(async {
        let replica = Replica::vllm(&["m"]).await;
        let port = replica.address.port();
        let server = Server::start().await;
        server.set(Some(vec![("gpus.test", a(1))]));
        let kept = keep(&config(&discovery(&server, &format!("port: {port}")), ""));
        let id = format!("127.0.0.1:{port}");
        kept.until_open(&[&id]).await;
        for down in [None, Some(Vec::new())] {
            server.set(down);
            until(|| kept.fleet.discovery_states() == [("dns:gpus.test".to_owned(), false)], || "a failure".to_owned())
                .await;
            for_a_while(Duration::from_millis(500), || kept.open() == [id.clone()], "the last good set stays").await;
            server.set(Some(vec![("gpus.test", a(1))]));
            until(|| kept.fleet.discovery_states()[0].1, || "it answers again".to_owned()).await;
        }
        assert!(*server.asked.lock().unwrap() >= 4);
    });
}
