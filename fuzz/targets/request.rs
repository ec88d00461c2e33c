//! Any bytes as a request body: parsed or refused, never a panic; and what is spliced is the same JSON but for the edit.
//!
//! Input: one byte that chooses the endpoint, one that chooses the edits, then the body.

#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use weighbridge::wire::request::Edits;
use weighbridge::wire::{Endpoint, ParseLimits, Request};

const EDITED: [&str; 4] = ["model", "priority", "task_type", "stream_options"];

fuzz_target!(|input: &[u8]| {
    let [endpoint, edits, body @ ..] = input else { return };
    let endpoint = Endpoint::ALL[usize::from(*endpoint) % Endpoint::ALL.len()];
    if endpoint.multipart() {
        let _ = Request::multipart(endpoint, "multipart/form-data; boundary=b", Bytes::copy_from_slice(body));
        return;
    }
    let limits = ParseLimits { json_depth: 64 };
    let request = match Request::parse(endpoint, Bytes::copy_from_slice(body), &limits) {
        Ok(request) => request,
        Err(error) => {
            assert!(error.message.len() < 1000, "an error must not carry a body");
            return;
        }
    };
    assert_eq!(request.upstream_body(&Edits::default()), body);
    let bit = |n: u8| edits >> n & 1 == 1;
    let edits = Edits {
        include_usage: bit(0),
        set_priority: bit(1).then_some(-3),
        remove_priority: bit(2),
        remove_task_type: bit(3),
        model: bit(4).then(|| "an \"alias\"".to_owned()),
    };
    let spliced = request.upstream_body(&edits);
    let again = Request::parse(endpoint, spliced, &limits).expect("a spliced body is as good as the one it came from");
    for field in &request.fields {
        if !EDITED.contains(&field.name.as_str()) {
            assert_eq!(again.raw(&field.name), request.raw(&field.name), "what is not edited stays as it came");
        }
    }
    if let Some(model) = &edits.model {
        assert_eq!(again.model.as_ref(), Some(model));
    }
    // Numbers past f64's range are JSON, but serde_json's tree does not hold them.
    if let Ok(before) = serde_json::from_slice::<Value>(body.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(body)) {
        assert_eq!(before.as_object().map(|object| object.len()), Some(request.fields.len()));
    }
});
