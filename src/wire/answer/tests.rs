use proptest::prelude::*;

use super::*;

pub(super) fn kind(hide_usage: bool) -> AnswerKind {
    AnswerKind { endpoint: Endpoint::ChatCompletions, sse: true, hide_usage, encoding: None, event_bytes: 10 << 20 }
}

/// Feeds `body` cut at the given sizes (cycled); returns what a client gets, and what was seen.
pub(super) fn run(kind: &AnswerKind, body: &[u8], cuts: &[usize]) -> (Vec<u8>, Progress) {
    let mut reader = AnswerReader::new(kind.clone());
    let mut sent = Vec::new();
    let mut rest = body;
    let mut cuts = cuts.iter().cycle();
    while !rest.is_empty() {
        let cut = rest.len().min(*cuts.next().unwrap());
        sent.extend_from_slice(&reader.push(Bytes::copy_from_slice(&rest[..cut])));
        rest = &rest[cut..];
    }
    sent.extend_from_slice(&reader.finish());
    (sent, reader.progress().clone())
}

pub(super) fn usage(prompt: u64, output: u64) -> Option<Usage> {
    Some(Usage { prompt, output, ..Usage::default() })
}

/// Reads in several chunkings, demands the same of each, and returns it.
pub(super) fn read(kind: &AnswerKind, body: &[u8]) -> (Vec<u8>, Progress) {
    let whole = run(kind, body, &[body.len().max(1)]);
    for cuts in [&[1][..], &[2], &[3], &[7], &[64], &[1, 100], &[200, 3]] {
        assert_eq!(run(kind, body, cuts), whole, "cut at {cuts:?}");
    }
    whole
}

fn untouched(body: &[u8]) -> Progress {
    let (sent, progress) = read(&kind(false), body);
    assert_eq!(sent, body);
    progress
}

macro_rules! case {
    ($name:literal) => {
        include_bytes!(concat!("../../../tests/field_cases/data/", $name)).as_slice()
    };
}

#[test]
fn c001_characters_cut_between_chunks_stay_whole() {
    let progress = untouched(case!("c001-upstream-body.sse"));
    assert_eq!(progress.usage, usage(9, 2));
    assert!(progress.done && progress.finished && !progress.unread);
}

#[test]
fn c002_crlf_and_data_without_a_blank_are_read() {
    assert_eq!(untouched(case!("c002-upstream-body.sse")).usage, usage(5, 2));
}

#[test]
fn c004_data_lines_of_one_event_are_joined() {
    let progress = untouched(case!("c004-upstream-body.sse"));
    assert_eq!(progress.usage, usage(6, 3));
    assert!(!progress.unread);
}

#[test]
fn c005_comments_are_no_data_and_leave_at_once() {
    let progress = untouched(case!("c005-upstream-body.sse"));
    assert_eq!(progress.usage, usage(4, 1));
    assert!(!progress.unread);
    let mut reader = AnswerReader::new(kind(true));
    for part in [": waiting\n", "\n", ":", "\n\n", ": half a com"] {
        assert_eq!(reader.push(Bytes::from(part)), part.as_bytes(), "{part:?}");
    }
}

#[test]
fn c007_an_event_without_its_last_newline_is_evaluated_at_the_end() {
    let progress = untouched(case!("c007-upstream-body.sse"));
    assert_eq!(progress.usage, usage(12, 2));
    assert!(progress.finished && !progress.done && progress.error.is_none());
}

#[test]
fn c009_any_framing_gives_the_same() {
    assert_eq!(untouched(case!("c009-upstream-body.sse")).usage, usage(10, 4));
}

#[test]
fn c011_null_and_empty_usage_are_not_usage() {
    let body = case!("c011-upstream-body.sse");
    let progress = untouched(body);
    assert_eq!(progress.usage, usage(21, 3));
    let before_last = body.windows(5).rposition(|w| w == b"data:").unwrap();
    let before_usage = body[..before_last].windows(5).rposition(|w| w == b"data:").unwrap();
    assert_eq!(untouched(&body[..before_usage]).usage, None);
}

#[test]
fn c012_running_totals_replace_one_another() {
    let body = case!("c012-upstream-body.sse");
    assert_eq!(untouched(body).usage, usage(100, 3));
    let first_two: usize = body.split_inclusive(|&b| b == b'\n').take(4).map(<[u8]>::len).sum();
    let progress = untouched(&body[..first_two]);
    assert_eq!((progress.usage, progress.usage_final, progress.output_tokens), (usage(100, 2), false, 2));
}

#[test]
fn c014_usage_behind_the_finish_reason_is_read() {
    let progress = untouched(case!("c014-upstream-body.sse"));
    assert_eq!(progress.usage, usage(30, 4));
    assert!(progress.usage_final);
}

#[test]
fn c015_without_usage_every_kind_of_content_counts() {
    let progress = untouched(case!("c015-upstream-body.sse"));
    assert_eq!(progress.usage, None);
    assert_eq!((progress.content_events, progress.output_tokens), (4, 4));
    assert!(progress.done && progress.finished);
}

#[test]
fn c017_cached_tokens_are_part_of_the_prompt() {
    let progress = untouched(case!("c017-upstream-body.sse"));
    assert_eq!(progress.usage, Some(Usage { prompt: 1000, cached_prompt: 960, output: 2, reasoning: 0 }));
}

#[test]
fn c018_and_c152_documents_are_read_and_not_touched() {
    let document = AnswerKind { sse: false, ..kind(false) };
    let (sent, progress) = read(&document, case!("c018-upstream-body.json"));
    assert_eq!(sent, case!("c018-upstream-body.json"));
    assert_eq!(progress.usage, Some(Usage { prompt: 25, cached_prompt: 0, output: 73, reasoning: 70 }));
    assert!(progress.done && progress.finished);
    let (sent, progress) = read(&document, case!("c152-upstream-body.json"));
    assert_eq!(sent, case!("c152-upstream-body.json"));
    assert_eq!(progress.usage, Some(Usage { prompt: 41, cached_prompt: 32, output: 7, reasoning: 0 }));
}

#[test]
fn c020_nulls_in_lists_and_broken_usage_are_survived() {
    let progress = untouched(case!("c020-upstream-body.sse"));
    assert_eq!(progress.usage, usage(5, 2));
    assert_eq!(progress.content_events, 1);
}

#[test]
fn c021_the_usage_chunk_is_hidden_whole_and_the_rest_untouched() {
    let (sent, progress) = read(&kind(true), case!("c021-upstream-body.sse"));
    assert_eq!(sent, case!("c021-expected-downstream.sse"));
    assert_eq!(progress.usage, usage(14, 2));
    assert!(progress.done);
}

#[test]
fn c022_a_refused_usage_chunk_is_counted_and_hidden() {
    let (sent, progress) = read(&kind(true), case!("c022-upstream-body.sse"));
    assert_eq!(progress.usage, usage(40, 9));
    assert!(!String::from_utf8(sent).unwrap().contains("\"choices\":[]"));
}

#[test]
fn c025_a_chunk_with_choices_is_never_dropped() {
    let (sent, progress) = read(&kind(true), case!("c025-upstream-a.sse"));
    assert_eq!(progress.usage, usage(75, 31));
    assert!(!String::from_utf8(sent).unwrap().contains("timings"));
    let (sent, progress) = read(&kind(true), case!("c025-upstream-b.sse"));
    assert_eq!(sent, case!("c025-upstream-b.sse"));
    assert_eq!(progress.usage, usage(20, 6));
}

#[test]
fn c027_an_error_in_the_stream_is_seen_and_not_forgotten_at_done() {
    let progress = untouched(case!("c027-upstream-body.sse"));
    assert_eq!(progress.error.as_deref(), Some("engine died"));
    assert_eq!((progress.content_events, progress.done), (2, true));
}

#[test]
fn c028_a_stream_without_done_ends_finished() {
    let progress = untouched(case!("c028-upstream-body.sse"));
    assert_eq!(progress.usage, usage(6, 1));
    assert!(progress.finished && !progress.done && progress.error.is_none());
}

#[test]
fn c031_the_code_of_an_error_is_never_a_result() {
    let body = std::str::from_utf8(case!("c031-upstream-body.sse")).unwrap();
    for event in body.split_inclusive("\n\n").filter(|event| event.contains("error")) {
        assert_eq!(untouched(event.as_bytes()).error.as_deref(), Some("x"), "{event}");
    }
}

#[test]
fn c032_usage_at_the_end_of_a_large_document_is_found_and_no_byte_waits() {
    let list = "0.125,".repeat(50_000);
    let body = format!(
        "{{\"object\":\"list\",\"data\":[{{\"index\":0,\"embedding\":[{list}0.5]}}],\"model\":\"m1\",\
         \"usage\":{{\"prompt_tokens\":512,\"total_tokens\":512}}}}"
    );
    let mut reader = AnswerReader::new(AnswerKind { sse: false, endpoint: Endpoint::Embeddings, ..kind(false) });
    for chunk in body.as_bytes().chunks(1000) {
        let chunk = Bytes::copy_from_slice(chunk);
        assert_eq!(reader.push(chunk.clone()).as_ptr(), chunk.as_ptr());
    }
    assert!(reader.finish().is_empty());
    assert_eq!(reader.progress().usage, usage(512, 0));
    assert!(reader.progress().done);
}

#[test]
fn c036_a_compressed_stream_is_read_from_a_copy() {
    let body = case!("c036-upstream.sse.gz");
    for cut in [1, 10, body.len()] {
        let gzip = AnswerKind { encoding: Some("gzip".into()), ..kind(true) };
        let (sent, progress) = run(&gzip, body, &[cut]);
        assert_eq!(sent, body);
        assert_eq!(progress.usage, usage(33, 1), "cut {cut}");
        assert!(progress.done && !progress.unread);
    }
}

const TWO_EVENTS: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hi\"}}]}\n\ndata: {\"choices\":[],\
    \"usage\":{\"prompt_tokens\":3,\"completion_tokens\":1}}\n\ndata: [DONE]\n\n";

fn encoders() -> Vec<(&'static str, Vec<u8>, Vec<u8>)> {
    use std::io::Write;
    // Each coding of the first event flushed, then of the rest: what a server that compresses a stream sends.
    let (first, rest) = TWO_EVENTS.split_at(TWO_EVENTS.find("\n\n").unwrap() + 2);
    let mut made = Vec::new();
    macro_rules! encode {
        ($name:literal, $encoder:expr) => {{
            let mut encoder = $encoder;
            encoder.write_all(first.as_bytes()).unwrap();
            encoder.flush().unwrap();
            let head = encoder.get_ref().clone();
            encoder.write_all(rest.as_bytes()).unwrap();
            let whole = encoder.finish().unwrap();
            made.push(($name, head.clone(), whole[head.len()..].to_vec()));
        }};
    }
    let level = flate2::Compression::fast();
    encode!("gzip", flate2::write::GzEncoder::new(Vec::new(), level));
    encode!("deflate", flate2::write::ZlibEncoder::new(Vec::new(), level));
    encode!("zstd", zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap());
    let mut encoder = brotli::CompressorWriter::new(Vec::new(), 4096, 1, 20);
    encoder.write_all(first.as_bytes()).unwrap();
    encoder.flush().unwrap();
    let head = encoder.get_ref().clone();
    encoder.write_all(rest.as_bytes()).unwrap();
    let whole = encoder.into_inner();
    made.push(("br", head.clone(), whole[head.len()..].to_vec()));
    made
}

#[test]
fn each_coding_is_decoded_as_far_as_it_was_flushed() {
    for (name, head, rest) in encoders() {
        let mut reader = AnswerReader::new(AnswerKind { encoding: Some(name.into()), ..kind(false) });
        assert_eq!(reader.push(Bytes::from(head.clone())), head);
        assert_eq!(reader.progress().content_events, 1, "{name}: the first event must be seen before the second");
        assert_eq!(reader.push(Bytes::from(rest.clone())), rest);
        reader.finish();
        assert_eq!(reader.progress().usage, usage(3, 1), "{name}");
        assert!(reader.progress().done && !reader.progress().unread, "{name}");
    }
}

#[test]
fn a_coding_that_is_unknown_or_broken_passes_unread() {
    for (name, bytes) in [("compress", "xx"), ("gzip", "not gzip at all"), ("zstd", "not zstd"), ("br", "\u{1}\u{2}zz")]
    {
        let mut reader = AnswerReader::new(AnswerKind { encoding: Some(name.into()), ..kind(false) });
        assert_eq!(reader.push(Bytes::from(bytes)), bytes.as_bytes());
        assert_eq!(reader.push(Bytes::from("more")), "more".as_bytes());
        reader.finish();
        assert!(reader.progress().unread, "{name}");
    }
}

#[test]
fn a_bomb_in_an_answer_is_given_up_on() {
    use std::io::Write;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    for _ in 0..64 {
        encoder.write_all(&vec![b' '; 1 << 20]).unwrap();
    }
    let bomb = Bytes::from(encoder.finish().unwrap());
    let mut reader = AnswerReader::new(AnswerKind { encoding: Some("gzip".into()), ..kind(false) });
    assert_eq!(reader.push(bomb.clone()), bomb);
    assert!(reader.progress().unread);
}

#[test]
fn chunks_leave_as_the_very_same_bytes() {
    for hide in [false, true] {
        let mut reader = AnswerReader::new(kind(hide));
        for part in TWO_EVENTS.split_inclusive("\n\n").filter(|part| !(hide && part.contains("usage"))) {
            let chunk = Bytes::copy_from_slice(part.as_bytes());
            let sent = reader.push(chunk.clone());
            assert_eq!((sent.as_ptr(), sent.len()), (chunk.as_ptr(), chunk.len()));
        }
    }
}

#[test]
fn a_usage_chunk_at_either_end_of_a_chunk_is_sliced_off_without_a_copy() {
    let whole = Bytes::from(TWO_EVENTS);
    let end = TWO_EVENTS.find("data: [DONE]").unwrap();
    let mut reader = AnswerReader::new(kind(true));
    let sent = reader.push(whole.slice(..end));
    assert_eq!(sent.as_ptr(), whole.as_ptr());
    assert_eq!(sent.len(), TWO_EVENTS.find("\n\n").unwrap() + 2);
}

#[test]
fn content_flows_at_once_even_inside_an_event_while_usage_is_hidden() {
    let mut reader = AnswerReader::new(kind(true));
    let head = "data: {\"id\":\"x\",\"choices\":[{\"delta\":{\"content\":\"a";
    assert_eq!(reader.push(Bytes::from(head)), head.as_bytes());
    assert_eq!(reader.push(Bytes::from("bc")), "bc".as_bytes());
    assert_eq!(reader.push(Bytes::from("\"}}]}\n\n")), "\"}}]}\n\n".as_bytes());
    assert_eq!(reader.progress().content_events, 1);
    assert!(reader.push(Bytes::from("data: {\"id\":\"x\",\"choi")).is_empty());
    assert!(reader.push(Bytes::from("ces\":[")).is_empty());
    let rest = "{\"delta\":{\"content\":\"d\"}}]}\n\n";
    let held = "data: {\"id\":\"x\",\"choices\":[";
    assert_eq!(reader.push(Bytes::from(rest)), [held, rest].concat().as_bytes());
}

#[test]
fn text_that_talks_of_choices_is_not_mistaken_for_them() {
    let body = "data: {\"x\":\"\\\"choices\\\":[{\",\"choices\":[],\"usage\":{\"prompt_tokens\":3}}\n\n";
    let (sent, progress) = read(&kind(true), body.as_bytes());
    assert!(sent.is_empty());
    assert_eq!(progress.usage, usage(3, 0));
}

#[test]
fn a_hidden_chunk_goes_with_its_blank_line_in_every_line_ending() {
    for newline in ["\n", "\r\n", "\r"] {
        let body = TWO_EVENTS.replace('\n', newline);
        let events: Vec<&str> = body.split_inclusive(&newline.repeat(2)).collect();
        let (sent, _) = read(&kind(true), body.as_bytes());
        assert_eq!(String::from_utf8(sent).unwrap(), [events[0], events[2]].concat(), "{newline:?}");
    }
}

#[test]
fn a_held_chunk_that_is_no_usage_is_released_at_the_end() {
    let half = "data: {\"id\":\"x\",\"obj";
    let (sent, progress) = read(&kind(true), half.as_bytes());
    assert_eq!(sent, half.as_bytes());
    assert!(progress.unread);
    let usage_chunk = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3}}";
    let (sent, progress) = read(&kind(true), usage_chunk.as_bytes());
    assert!(sent.is_empty());
    assert_eq!(progress.usage, usage(3, 0));
}

#[test]
fn events_past_the_bound_pass_unread_and_the_next_ones_are_read() {
    let small = AnswerKind { event_bytes: 1000, ..kind(false) };
    for hide_usage in [false, true] {
        let kind = AnswerKind { hide_usage, ..small.clone() };
        let big = format!("data: {{\"id\":\"{}\"}}\n\n", "x".repeat(5000));
        let body = format!("{big}data: {{\"choices\":[{{\"delta\":{{\"content\":\"a\"}}}}]}}\n\n");
        let (sent, progress) = read(&kind, body.as_bytes());
        assert_eq!(sent, body.as_bytes());
        assert_eq!((progress.unread, progress.content_events), (true, 1));
    }
}

#[test]
fn what_is_held_back_is_bounded() {
    let mut reader = AnswerReader::new(kind(true));
    let mut sent = reader.push(Bytes::from("data: {\"id\":\"")).len();
    for _ in 0..100 {
        sent += reader.push(Bytes::from("x".repeat(1000))).len();
    }
    assert_eq!(sent, 13 + 100_000, "a long event must not wait for its end");
}

#[test]
fn a_byte_order_mark_before_the_first_event_is_no_part_of_it() {
    let body = ["\u{feff}", TWO_EVENTS].concat();
    assert_eq!(untouched(body.as_bytes()).content_events, 1);
}

#[test]
fn a_role_alone_is_no_content_and_token_ids_count_each() {
    let events = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n\
        data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":null}}]}\n\n\
        data: null\n\n\
        data: {\"choices\":[{\"delta\":{\"content\":\"\"},\"token_ids\":[1,2,3]}]}\n\n\
        data: {\"choices\":[{\"text\":\"a\",\"token_ids\":null},{\"text\":\"b\"}]}\n\n";
    let progress = untouched(events.as_bytes());
    assert_eq!((progress.content_events, progress.output_tokens, progress.unread), (3, 5, false));
}

#[test]
fn half_characters_and_rubbish_never_stop_the_reading() {
    let events = "data: {\"choices\":[{\"delta\":{\"content\":\"\\ud83d\"}}]}\n\ndata: {oops\n\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":1}}\n\n";
    let progress = untouched(events.as_bytes());
    assert_eq!((progress.content_events, progress.usage, progress.unread), (1, usage(3, 1), true));
}

proptest! {
    #[test]
    fn any_bytes_in_any_chunking_pass_unchanged_and_read_the_same(
        parts in proptest::collection::vec(
            prop_oneof![
                Just("data: {\"choices\":[{\"delta\":{\"content\":\"é漢\"}}]}".to_owned()),
                Just("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":1}}".to_owned()),
                Just("\n".to_owned()), Just("\r\n".to_owned()), Just("\r".to_owned()), Just("\n\n".to_owned()),
                Just(": ping".to_owned()), Just("data".to_owned()), Just("data: [DONE]".to_owned()),
                Just("\u{feff}".to_owned()), Just("event: error".to_owned()), "[a-z:{}\"\\[\\] ]{0,12}",
            ],
            0..20,
        ),
        cuts in proptest::collection::vec(1usize..40, 1..6),
    ) {
        let body = parts.concat().into_bytes();
        let (sent, progress) = run(&kind(false), &body, &cuts);
        prop_assert_eq!(&sent, &body);
        prop_assert_eq!(&progress, &run(&kind(false), &body, &[body.len().max(1)]).1);
        prop_assert_eq!(&progress, &run(&kind(true), &body, &cuts).1);
        let tight = AnswerKind { event_bytes: 50, ..kind(false) };
        prop_assert_eq!(&run(&tight, &body, &cuts).0, &body);
    }

    #[test]
    fn hiding_takes_out_exactly_the_usage_chunks_in_any_chunking(
        events in proptest::collection::vec(
            prop_oneof![
                Just("data: {\"choices\":[{\"delta\":{\"content\":\"é漢\"}}]}"),
                Just("data:{\"usage\":{\"prompt_tokens\":3},\"choices\" : [ ] }"),
                Just("event: x\ndata: {\"choices\":[],\ndata: \"usage\":{\"prompt_tokens\":3}}"),
                Just("data: {\"choices\":[],\"usage\":null}"),
                Just(": ping"),
                Just("data: [DONE]"),
                Just(""),
            ],
            0..12,
        ),
        newline in prop_oneof![Just("\n"), Just("\r\n"), Just("\r")],
        cuts in proptest::collection::vec(1usize..60, 1..6),
    ) {
        let write = |events: &[&str]| -> String {
            events.iter().map(|event| format!("{event}\n\n").replace('\n', newline)).collect()
        };
        let shown: Vec<&str> = events.iter().copied().filter(|event| !event.contains("prompt_tokens")).collect();
        let (sent, progress) = run(&kind(true), write(&events).as_bytes(), &cuts);
        prop_assert_eq!(String::from_utf8(sent).unwrap(), write(&shown));
        prop_assert_eq!(progress.usage.is_some(), shown.len() < events.len());
    }

    #[test]
    fn documents_read_the_same_in_any_chunking(
        body in r#"[ ]?\{("(usage|error|a)":(\{"(prompt_tokens|x)":[0-9]{1,3}\}|"[\\"a]{0,4}"|\[1,\{\}\]|null),?){0,4}\}?"#,
        cut in 1usize..20,
    ) {
        let document = AnswerKind { sse: false, ..kind(false) };
        let (sent, progress) = run(&document, body.as_bytes(), &[cut]);
        prop_assert_eq!(sent, body.as_bytes());
        prop_assert_eq!(progress, run(&document, body.as_bytes(), &[body.len().max(1)]).1);
    }
}
