use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::wire::ErrorCode;

const LIMITS: ParseLimits = ParseLimits { json_depth: 128 };

macro_rules! case {
    ($name:literal) => {
        include_bytes!(concat!("../../../tests/field_cases/data/", $name)).as_slice()
    };
}

fn parse(endpoint: Endpoint, body: impl AsRef<[u8]>) -> Result<Request, ApiError> {
    Request::parse(endpoint, Bytes::copy_from_slice(body.as_ref()), &LIMITS)
}

fn chat(body: impl AsRef<[u8]>) -> Request {
    parse(Endpoint::ChatCompletions, body).unwrap()
}

fn completion(body: impl AsRef<[u8]>) -> Request {
    parse(Endpoint::Completions, body).unwrap()
}

/// The field that a 400 names.
fn refused(endpoint: Endpoint, body: impl AsRef<[u8]>) -> Option<String> {
    let error = parse(endpoint, body).expect_err("must be refused");
    assert_eq!(error.code, ErrorCode::InvalidRequest);
    assert!(error.message.len() > 10 && error.message.len() < 300, "{}", error.message);
    error.param
}

fn refused_chat(body: impl AsRef<[u8]>) -> Option<String> {
    refused(Endpoint::ChatCompletions, body)
}

#[test]
fn a_plain_request_is_read() {
    let body = r#"{"model":"m\u0031","messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":7,
        "max_completion_tokens":9,"min_tokens":2,"ignore_eos":true,"n":2,"best_of":3,"priority":-4,"task_type":"code"}"#;
    let request = chat(body);
    assert_eq!(request.model.as_deref(), Some("m1"));
    assert!(request.stream && request.ignore_eos && !request.echo);
    assert_eq!((request.max_tokens, request.min_tokens, request.n), (Some(9), Some(2), 3));
    assert_eq!((request.priority, request.task_type.as_deref()), (Some(-4), Some("code")));
    assert_eq!(request.usage_ask, UsageAsk::NotAsked);
    assert_eq!(request.raw("messages").unwrap(), br#"[{"role":"user","content":"hi"}]"#);
    assert_eq!(request.raw("nothing"), None);
    let field = &request.fields[1];
    assert_eq!(&request.body[field.member.clone()], br#""messages":[{"role":"user","content":"hi"}]"#);
}

#[test]
fn c040_lone_surrogates_are_refused_with_their_field_and_a_pair_is_accepted() {
    assert_eq!(refused_chat(case!("c040-request.json")).as_deref(), Some("messages[0]"));
    assert_eq!(refused_chat(case!("c040-request-tool.json")).as_deref(), Some("messages[0]"));
    let tool = r#"{"messages":[{"role":"user","content":"x"}],"tools":[{"function":{"name":"f\udfff"}}]}"#;
    assert_eq!(refused_chat(tool).as_deref(), Some("tools"));
    chat(case!("c040-request-good.json"));
}

#[test]
fn c042_repeated_keys_are_refused_even_when_spelled_differently() {
    assert_eq!(refused_chat(case!("c042-request.json")).as_deref(), Some("model"));
    assert_eq!(refused_chat(case!("c042-request-stream.json")).as_deref(), Some("stream"));
    let disguised = r#"{"model":"a","messages":[{"role":"user","content":"x"}],"mod\u0065l":"b"}"#;
    assert_eq!(refused_chat(disguised).as_deref(), Some("model"));
}

#[test]
fn c044_deep_nesting_is_refused_with_the_limits_name() {
    for body in [case!("c044-request-3000.json"), case!("c044-request-100k.json")] {
        let error = parse(Endpoint::ChatCompletions, body).unwrap_err();
        assert!(error.message.contains("128") && error.message.contains("json_depth"), "{}", error.message);
    }
    let objects = format!("{{\"x\":{}1{}}}", "{\"a\":".repeat(100_000), "}".repeat(100_000));
    assert!(parse(Endpoint::ChatCompletions, objects).is_err());
}

#[test]
fn c046_a_request_without_messages_is_refused_by_field() {
    assert_eq!(refused_chat(case!("c046-request-1.json")).as_deref(), Some("messages"));
    assert_eq!(refused_chat(case!("c046-request-2.json")).as_deref(), Some("messages"));
    assert_eq!(refused_chat(case!("c046-request-3.json")).as_deref(), Some("messages"));
    assert_eq!(refused_chat(case!("c046-request-4.json")).as_deref(), Some("messages"));
    assert_eq!(refused_chat(case!("c046-request-5.json")).as_deref(), Some("messages[0].role"));
    assert_eq!(refused(Endpoint::Completions, case!("c046-completions-6.json")).as_deref(), Some("prompt"));
    assert_eq!(refused_chat(case!("c046-request-7.json")), None);
    assert_eq!(refused_chat(case!("c046-request-8.json")), None);
}

#[test]
fn wrong_types_are_refused_by_field() {
    for (body, param) in [
        (r#"{"model":5,"messages":[]}"#, "model"),
        (r#"{"messages":["hi"]}"#, "messages[0]"),
        (r#"{"messages":[{"role":"user","content":"a"},{"role":7}]}"#, "messages[1].role"),
        (r#"{"messages":[{"role":"user","content":3}]}"#, "messages[0].content"),
        (r#"{"messages":[{"role":"user","content":{}}]}"#, "messages[0].content"),
        (r#"{"messages":"hi"}"#, "messages"),
        (r#"{"messages":[{"role":"user","content":"a"}],"task_type":[]}"#, "task_type"),
        (r#"{"messages":[{"role":"user","content":"a"}],"n":1025}"#, "n"),
        (r#"{"messages":[{"role":"user","content":"a"}],"best_of":4294967297}"#, "best_of"),
    ] {
        assert_eq!(refused_chat(body).as_deref(), Some(param), "{body}");
    }
    assert_eq!(refused(Endpoint::Rerank, r#"{"query":"q","documents":[]}"#).as_deref(), Some("documents"));
    assert_eq!(refused(Endpoint::Rerank, r#"{"documents":["a"]}"#).as_deref(), Some("query"));
    assert_eq!(refused(Endpoint::Score, r#"{"text_1":"a"}"#).as_deref(), Some("text_2"));
    assert_eq!(refused(Endpoint::Responses, r#"{"input":5}"#).as_deref(), Some("input"));
    assert_eq!(refused(Endpoint::Embeddings, r#"{"input":[]}"#).as_deref(), Some("input"));
    assert_eq!(refused(Endpoint::Embeddings, r#"{"model":"m"}"#).as_deref(), Some("input"));
    assert_eq!(refused(Endpoint::Messages, r#"{"messages":null}"#).as_deref(), Some("messages"));
}

#[test]
fn every_endpoints_own_forms_are_accepted() {
    for (endpoint, body) in [
        (Endpoint::Embeddings, r#"{"input":"a"}"#),
        (Endpoint::Embeddings, r#"{"input":["a","b"]}"#),
        (Endpoint::Embeddings, r#"{"input":[[1],[2,3]]}"#),
        (Endpoint::Embeddings, r#"{"input":[{"text":"a","image":"b"}]}"#),
        (Endpoint::Embeddings, r#"{"messages":[{"role":"user","content":"a"}]}"#),
        (Endpoint::Rerank, r#"{"query":"q","documents":["a",{"text":"b"}]}"#),
        (Endpoint::Rerank, r#"{"query":"q","texts":["a"]}"#),
        (Endpoint::Score, r#"{"text_1":"a","text_2":["b"]}"#),
        (Endpoint::Score, r#"{"queries":"a","documents":["b"]}"#),
        (Endpoint::Classify, r#"{"input":"a"}"#),
        (Endpoint::Responses, r#"{"input":"a"}"#),
        (Endpoint::Responses, r#"{"input":[{"role":"user","content":"a"}]}"#),
        (Endpoint::Messages, r#"{"messages":[{"role":"user","content":[{"type":"text","text":"a"}]}],"max_tokens":5}"#),
        (Endpoint::CountTokens, r#"{"messages":[{"role":"user","content":"a"}]}"#),
        (Endpoint::Tokenize, r#"{"prompt":"a"}"#),
        (Endpoint::Tokenize, r#"{"content":"a"}"#),
        (Endpoint::Tokenize, r#"{"messages":[{"role":"user","content":"a"}]}"#),
        (Endpoint::Detokenize, r#"{"tokens":[1,2]}"#),
        (Endpoint::AudioSpeech, r#"{"input":"a","voice":"x"}"#),
        (Endpoint::Completions, r#"{"prompt_embeds":"AAAA"}"#),
        (Endpoint::ChatCompletions, "\u{feff}{\"messages\":[{\"role\":\"assistant\",\"content\":null}]} "),
    ] {
        assert!(parse(endpoint, body).is_ok(), "{endpoint:?} {body}");
    }
}

#[test]
fn c047_a_clients_template_is_refused_wherever_it_hides() {
    assert_eq!(refused_chat(case!("c047-request.json")).as_deref(), Some("chat_template"));
    chat(case!("c047-request-kwargs.json"));
    let with = |field: &str| format!(r#"{{"messages":[{{"role":"user","content":"x"}}],{field}}}"#);
    assert_eq!(
        refused_chat(with(r#""chat_template_kwargs":{"chat_template":"{{x}}"}"#)).as_deref(),
        Some("chat_template_kwargs.chat_template")
    );
    chat(with(r#""chat_template":null,"chat_template_kwargs":null"#));
    chat(with(r#""chat_template_kwargs":{"enable_thinking":false}"#));
}

#[test]
fn c050_null_is_absent_everywhere() {
    let request = chat(case!("c050-request.json"));
    assert_eq!((request.max_tokens, request.n), (None, 1));
    let request = chat(
        r#"{"model":null,"messages":[{"role":"user","content":"x"}],"stream":null,"stream_options":null,
        "min_tokens":null,"best_of":null,"priority":null,"task_type":null,"ignore_eos":null,"echo":null}"#,
    );
    assert_eq!((request.model, request.stream, request.priority, request.task_type), (None, false, None, None));
}

#[test]
fn c052_a_large_cap_is_read_as_it_is() {
    assert_eq!(chat(case!("c052-request.json")).max_tokens, Some(65535));
}

#[test]
fn c053_a_cap_that_is_no_count_is_no_cap_and_zero_is_zero() {
    assert_eq!(chat(case!("c053-request-0.json")).max_tokens, Some(0));
    for body in [
        case!("c053-request-neg.json"),
        case!("c053-request-float.json"),
        case!("c053-request-str.json"),
        case!("c053-request-bool.json"),
        case!("c053-request-big.json"),
        case!("c053-request-inf.json"),
    ] {
        let request = chat(body);
        assert_eq!(request.max_tokens, None);
        assert_eq!(request.upstream_body(&Edits::default()), body, "forwarded unchanged");
    }
}

#[test]
fn c055_to_c057_every_legal_prompt_is_accepted_and_mixtures_are_refused() {
    completion(case!("c055-completions.json"));
    assert_eq!(completion(case!("c056-completions.json")).n, 2);
    completion(case!("c057-completions.json"));
    for (body, param) in [
        (case!("c055-completions-empty.json"), "prompt"),
        (case!("c056-completions-emptysub.json"), "prompt[1]"),
        (case!("c056-completions-mixed.json"), "prompt[1]"),
        (br#"{"prompt":[[1],"a"]}"#.as_slice(), "prompt[1]"),
        (br#"{"prompt":[[1,"a"]]}"#, "prompt[0][1]"),
        (br#"{"prompt":[1,-2]}"#, "prompt[1]"),
        (br#"{"prompt":[1.5]}"#, "prompt[0]"),
        (br#"{"prompt":[null]}"#, "prompt[0]"),
        (br#"{"prompt":{"a":1}}"#, "prompt"),
        (br#"{"prompt":5}"#, "prompt"),
        (br#"{"prompt":null}"#, "prompt"),
    ] {
        assert_eq!(refused(Endpoint::Completions, body).as_deref(), Some(param), "{}", String::from_utf8_lossy(body));
    }
}

#[test]
fn c058_c059_and_c064_what_is_unknown_passes_unchanged() {
    for body in [case!("c058-request.json"), case!("c059-request.json"), case!("c064-request.json")] {
        assert_eq!(chat(body).upstream_body(&Edits::default()).as_ref(), body);
    }
}

#[test]
fn broken_json_is_refused_with_its_place() {
    let error = parse(Endpoint::ChatCompletions, "{\"messages\":\n [,]}").unwrap_err();
    assert!(error.message.contains("line 2, column 3"), "{}", error.message);
    for body in
        ["{", "{\"a\":1}x", "nul", "\"text\"", "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],}", "{'a':1}"]
    {
        assert!(parse(Endpoint::ChatCompletions, body).is_err(), "{body}");
    }
    let error =
        parse(Endpoint::ChatCompletions, b"{\"messages\":[{\"role\":\"user\",\"content\":\"\xff\"}]}").unwrap_err();
    assert!(error.message.contains("UTF-8 at byte 39"), "{}", error.message);
}

#[test]
fn top_level_members_are_bounded() {
    let many: Vec<String> = (0..=TOP_LEVEL_MEMBERS_MAX).map(|i| format!("\"k{i}\":1")).collect();
    assert!(parse(Endpoint::ChatCompletions, format!("{{{}}}", many.join(","))).is_err());
}

const ASK: Edits =
    Edits { include_usage: true, set_priority: None, remove_priority: false, remove_task_type: false, model: None };

fn asked(body: &str) -> String {
    String::from_utf8(chat(body).upstream_body(&ASK).to_vec()).unwrap()
}

#[test]
fn c021_to_c023_include_usage_is_spliced_into_every_form() {
    assert_eq!(
        asked(std::str::from_utf8(case!("c021-request.json")).unwrap()),
        r#"{"model":"m1","messages":[{"role":"user","content":"hi"}],"stream":true,"stream_options":{"include_usage":true}}"#
    );
    let with = |options: &str| {
        format!(r#"{{"messages":[{{"role":"user","content":"x"}}],"stream":true,"stream_options":{options}}}"#)
    };
    for (options, ask, spliced) in [
        ("null", UsageAsk::NotAsked, r#"{"include_usage":true}"#),
        ("{}", UsageAsk::NotAsked, r#"{"include_usage":true}"#),
        ("{ }", UsageAsk::NotAsked, r#"{"include_usage":true }"#),
        (r#"{"include_usage":false}"#, UsageAsk::NotAsked, r#"{"include_usage":true}"#),
        (r#"{"include_usage" : null, "a":1}"#, UsageAsk::NotAsked, r#"{"include_usage" : true, "a":1}"#),
        (
            r#"{"continuous_usage_stats":false}"#,
            UsageAsk::NotAsked,
            r#"{"include_usage":true,"continuous_usage_stats":false}"#,
        ),
        (r#"{"include_usage":true,"x_unknown":1}"#, UsageAsk::Asked, r#"{"include_usage":true,"x_unknown":1}"#),
        (r#"{"include_usage":"yes"}"#, UsageAsk::Untouched, r#"{"include_usage":true}"#),
        (r#""yes""#, UsageAsk::Untouched, r#""yes""#),
        ("[]", UsageAsk::Untouched, "[]"),
    ] {
        let body = with(options);
        assert_eq!(chat(&body).usage_ask, ask, "{options}");
        assert_eq!(asked(&body), with(spliced), "{options}");
    }
    for (body, ask) in [
        (case!("c022-request.json"), UsageAsk::NotAsked),
        (case!("c023-request-1.json"), UsageAsk::NotAsked),
        (case!("c023-request-2.json"), UsageAsk::NotAsked),
        (case!("c023-request-3.json"), UsageAsk::Asked),
        (case!("c023-request-4.json"), UsageAsk::Untouched),
        (case!("c018-request.json"), UsageAsk::Untouched),
    ] {
        assert_eq!(chat(body).usage_ask, ask);
    }
}

#[test]
fn c065_the_order_of_keys_and_the_white_space_stay() {
    let body = std::str::from_utf8(case!("c065-request.json")).unwrap();
    let spliced = asked(body);
    assert_eq!(spliced.replace(r#","stream_options":{"include_usage":true}"#, ""), body);
    assert_eq!(spliced, asked(body));
}

#[test]
fn members_are_removed_with_exactly_one_comma() {
    let edits = Edits { remove_priority: true, remove_task_type: true, ..Edits::default() };
    for (body, left) in [
        (r#"{"priority":1,"prompt":"a","task_type":"code"}"#, r#"{"prompt":"a"}"#),
        (r#"{"priority":1, "task_type":"code" , "prompt":"a"}"#, r#"{"prompt":"a"}"#),
        (r#"{ "prompt":"a" , "priority":1 , "task_type":"code" }"#, r#"{ "prompt":"a" }"#),
        (r#"{"prompt":"a"}"#, r#"{"prompt":"a"}"#),
    ] {
        assert_eq!(completion(body).upstream_body(&edits), left, "{body}");
    }
    let all = Edits { include_usage: true, set_priority: Some(3), model: Some("x\"y".into()), ..edits };
    assert_eq!(
        completion(r#"{"prompt":"a", "task_type":"code"}"#).upstream_body(&all),
        r#"{"prompt":"a","model":"x\"y","priority":3,"stream_options":{"include_usage":true}}"#
    );
    assert_eq!(
        completion(r#"{"prompt":"a","model":"m","priority":null,"task_type":null}"#).upstream_body(&all),
        r#"{"prompt":"a","model":"x\"y","priority":3,"stream_options":{"include_usage":true}}"#
    );
}

#[test]
fn without_edits_the_body_is_the_very_same() {
    let request = chat(r#"{"messages":[{"role":"user","content":"x"}]}"#);
    let edits = Edits { remove_priority: true, remove_task_type: true, ..Edits::default() };
    assert_eq!(request.upstream_body(&edits).as_ptr(), request.body.as_ptr());
}

#[test]
fn a_forms_model_is_read_and_replaced() {
    let body = Bytes::from("--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--b--\r\n");
    let kind = "multipart/form-data; boundary=b";
    let request = Request::multipart(Endpoint::AudioTranscriptions, kind, body.clone()).unwrap();
    assert_eq!(request.model.as_deref(), Some("whisper"));
    let edits = |model: &str| Edits { model: Some(model.into()), include_usage: true, ..Edits::default() };
    let spliced = request.upstream_body(&edits("big"));
    assert_eq!(spliced, "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nbig\r\n--b--\r\n");
    assert_eq!(request.upstream_body(&edits("a\r\n--b")), body);
    let opaque = Request::opaque(Endpoint::AudioTranscriptions, body.clone(), None);
    assert_eq!(opaque.upstream_body(&edits("big")), body);
}

/// JSON text of any shape, with white space between its tokens.
fn spaced(value: &Value, blanks: &mut dyn Iterator<Item = &'static str>) -> String {
    let mut text = String::new();
    match value {
        Value::Object(members) => {
            text += "{";
            for (index, (key, value)) in members.iter().enumerate() {
                text += if index > 0 { "," } else { "" };
                text += blanks.next().unwrap();
                text += &json!(key).to_string();
                text += blanks.next().unwrap();
                text += ":";
                text += blanks.next().unwrap();
                text += &spaced(value, blanks);
                text += blanks.next().unwrap();
            }
            text += blanks.next().unwrap();
            text += "}";
        }
        Value::Array(items) => {
            let inner: Vec<String> = items.iter().map(|item| spaced(item, blanks)).collect();
            text = format!("[{}]", inner.join(" , "));
        }
        scalar => text = scalar.to_string(),
    }
    text
}

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 20, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map("[a-z\"\\\\é]{0,5}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn a_spliced_body_is_the_same_json_but_for_the_edit(
        members in proptest::collection::vec(
            (prop_oneof![
                Just("model".to_owned()), Just("priority".to_owned()), Just("task_type".to_owned()),
                Just("stream_options".to_owned()), Just("stream".to_owned()), "[a-z]{1,6}",
            ], any_value()),
            0..8,
        ),
        at in 0usize..8,
        include_usage: bool, remove_priority: bool, remove_task_type: bool,
        set_priority in proptest::option::of(any::<i64>()),
        model in proptest::option::of("[a-z\"é\\\\]{0,8}"),
        shift in 0usize..5,
    ) {
        let mut object = serde_json::Map::new();
        for (index, (name, value)) in members.into_iter().enumerate() {
            if index == at {
                object.insert("prompt".into(), json!("p"));
            }
            let value = match (name.as_str(), value) {
                ("model" | "task_type", value) if !value.is_null() => json!("text"),
                ("n" | "best_of", _) => json!(1),
                (_, value) => value,
            };
            object.insert(name, value);
        }
        object.entry("prompt").or_insert(json!("p"));
        let before = Value::Object(object);
        let body = spaced(&before, &mut ["", " ", "\n\t", "", "  "].into_iter().cycle().skip(shift));
        prop_assert_eq!(&serde_json::from_str::<Value>(&body).unwrap(), &before);

        let request = completion(&body);
        let edits = Edits { include_usage, set_priority, remove_priority, remove_task_type, model: model.clone() };
        let spliced = request.upstream_body(&edits);
        let mut wanted = before.as_object().unwrap().clone();
        if let Some(model) = model {
            wanted.insert("model".into(), json!(model));
        }
        match set_priority {
            Some(priority) => { wanted.insert("priority".into(), json!(priority)); }
            None if remove_priority => { wanted.shift_remove("priority"); }
            None => {}
        }
        if remove_task_type {
            wanted.shift_remove("task_type");
        }
        if include_usage {
            let options = wanted.entry("stream_options").or_insert(Value::Null);
            match options {
                Value::Null => *options = json!({"include_usage": true}),
                Value::Object(options) => { options.insert("include_usage".into(), json!(true)); }
                _ => {}
            }
        }
        let found: Value = serde_json::from_slice(&spliced).unwrap();
        prop_assert_eq!(found, Value::Object(wanted));
        prop_assert!(completion(&spliced).fields.len() <= request.fields.len() + 3);
    }

    #[test]
    fn any_bytes_are_parsed_or_refused_without_panic(body in proptest::collection::vec(any::<u8>(), 0..200)) {
        for endpoint in Endpoint::ALL {
            let _ = parse(endpoint, &body);
        }
    }

    #[test]
    fn damaged_requests_are_parsed_or_refused_like_serde_does(at in 0usize..250, byte: u8) {
        let mut body = case!("c064-request.json").to_vec();
        let at = at % body.len();
        body[at] = byte;
        let ours = parse(Endpoint::ChatCompletions, &body);
        if ours.is_ok() {
            prop_assert!(serde_json::from_slice::<Value>(&body).is_ok());
        }
    }
}
