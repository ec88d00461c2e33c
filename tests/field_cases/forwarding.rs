//! forwarding: the client's own bytes, but for the few splices that were decided.

use crate::harness::case_bytes;
use crate::runner::{Case, case};
use crate::support::*;

pub fn cases() -> Vec<Case> {
    vec![
        case!(c064, "unknown members reach the replica unchanged"),
        case!(c065, "key order and spelling survive the one splice, the same each time"),
    ]
}

async fn c064() {
    let (a, lb) = one().await;
    assert_eq!(lb.chat(&case_bytes("c064-request.json")).await.status, 200);
    same_bytes(&a.only().body, &case_bytes("c064-request.json"));
    // Odd but legal spelling is kept: spaces, escapes, numbers as written, an empty key, a large exponent.
    let odd = b" {\n\t\"messages\" : [ {\"role\":\"\\u0075ser\",\"content\":\"a\\/b\"} ] , \"\": 1.0e0, \"model\":\"m1\",\"seed\":123456789012345678901234567890 } \r\n";
    assert_eq!(lb.chat(odd).await.status, 200);
    same_bytes(&a.seen()[1].body, odd);
    lb.books().settled().await;
}

async fn c065() {
    let (a, lb) = one().await;
    let body = case_bytes("c065-request.json");
    lb.chat(&body).await;
    lb.chat(&body).await;
    let seen = a.seen();
    same_bytes(&seen[1].body, &seen[0].body);
    only_added(&seen[0].body, &body, "\"stream_options\":{\"include_usage\":true}");
    // Where the body has odd spaces, or nothing else in it that could take a comma.
    for spelled in [
        "{ \"stream\" : true , \"model\" : \"m1\" , \"messages\" : [ { \"role\" : \"user\" , \"content\" : \"}\" } ] }\n",
        "{\"model\":\"m1\",\"messages\":[{\"role\":\"user\",\"content\":\"\\\"}{\"}],\"stream\":true}",
    ] {
        lb.chat(spelled.as_bytes()).await;
        let sent = a.seen().pop().expect("a request").body;
        assert_eq!(
            serde_json::from_slice::<serde_json::Value>(&sent).expect("JSON")["stream_options"]["include_usage"],
            true
        );
        only_added(&sent, spelled.as_bytes(), "\"stream_options\":{\"include_usage\":true}");
    }
    lb.books().settled().await;
}

/// `sent` is `original` with `member` and one comma added at one place.
fn only_added(sent: &[u8], original: &[u8], member: &str) {
    let sent = String::from_utf8(sent.to_vec()).expect("UTF-8");
    let at = sent.find(member).unwrap_or_else(|| panic!("no {member} in {sent}"));
    let (before, after) = (&sent[..at], &sent[at + member.len()..]);
    let without = match (before.strip_suffix(','), after.strip_prefix(',')) {
        (_, Some(after)) => format!("{before}{after}"),
        (Some(before), _) => format!("{before}{after}"),
        _ => panic!("no comma beside the member: {sent}"),
    };
    same_bytes(without.as_bytes(), original);
}
