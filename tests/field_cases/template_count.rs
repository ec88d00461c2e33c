//! template-count: what the engine will count, told before it counts.
//!
//! The tests' tokenizer makes every byte a token, so a count proves the rendered text's exact length; the special
//! tokens among it are one each.

use std::time::Duration;

use crate::harness::{Reply, Running, Setup, Upstream, case_bytes, case_text};
use crate::runner::{Case, case};
use crate::support::*;

pub fn cases() -> Vec<Case> {
    vec![
        case!(c067, "tojson prints as Python does"),
        case!(c069, "a template may ask for the date"),
        case!(c071, "a template's own BOS is the only one"),
        case!(c073, "a template that refuses a conversation is a 400 in its own words"),
        case!(c075, "generation prompt and continued messages are counted as the request says"),
        case!(c077, "template arguments count, and cannot replace the conversation"),
        case!(c078, "control tokens in a client's text are counted as the engine parses them"),
        case!(c080, "without tokenizer or template a stated estimate serves"),
        case!(c081, "a list of parts is joined for a template that expects text"),
        case!(c082, "null and missing content print as nothing"),
        case!(c084, "tool schemas are counted"),
    ]
}

/// Counts a case's request with its template.
async fn count(lb: &Running, request: &str) -> u64 {
    let answer = lb.chat(&case_bytes(request)).await;
    assert_eq!(answer.status, 200, "{request}: {}", answer.text());
    answer.prompt_tokens()
}

async fn with_template(file: &str) -> (crate::harness::Upstream, Running) {
    one_with(Setup::template(&case_bytes(file))).await
}

async fn c067() {
    let (_a, lb) = with_template("c067-template.jinja").await;
    assert_eq!(count(&lb, "c067-request.json").await, byte_tokens(&case_text("c067-expected-render.txt")));
    // Numbers, nested empties, sorted or indented: as json.dumps prints them.
    for (filter, value, printed) in [
        ("tojson", r#"{"b":1.0,"a":[],"c":{}}"#, r#"{"b": 1.0, "a": [], "c": {}}"#),
        ("tojson", r#"[1e-7,2.5e20,null,true]"#, "[1e-07, 2.5e+20, null, true]"),
        ("tojson(indent=2)", r#"{"a":[1]}"#, "{\n  \"a\": [\n    1\n  ]\n}"),
        ("tojson", r#"{"k":"</x>&'\u00e9\u2028"}"#, "{\"k\": \"</x>&'\u{e9}\u{2028}\"}"),
    ] {
        let (_a, lb) = one_with(Setup::template(format!("{{{{ v | {filter} }}}}").as_bytes())).await;
        let body = chat("hi", &format!(r#","chat_template_kwargs":{{"v":{value}}}"#));
        let answer = lb.chat(&body).await;
        assert_eq!(answer.prompt_tokens(), byte_tokens(printed), "{filter} of {value}");
    }
}

async fn c069() {
    let (_a, lb) = with_template("c069-template.jinja").await;
    // By today's date, in local time: the formats that change their width are what a fixed text could not prove.
    let expected = |now: chrono::DateTime<chrono::Local>| {
        let date = now.format("Today: %d %b %Y %Y-%m-%d %H:%M:%S|%-d/%-m").to_string();
        byte_tokens(&format!("{date}<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
    };
    let before = expected(chrono::Local::now());
    let counted = count(&lb, "c069-request.json").await;
    let after = expected(chrono::Local::now());
    assert!(counted == before || counted == after, "{counted}, not {before}");
    let fixed = case_text("c069-expected-render.txt");
    let shape = |text: &str| text.split("|<|im_start|>").next().map(|t| t.split(' ').count());
    assert!(shape(&fixed).is_some());
    // A function that is not there is the template's fault, not the client's: an estimate, no error.
    let (_a, lb) = one_with(Setup::template(b"{{ no_such_function('x') }}{{ messages[0].content }}")).await;
    let answer = lb.chat(HI).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(answer.prompt_tokens() > 0);
    lb.books().settled().await;
}

async fn c071() {
    let (_a, lb) = with_template("c071-template.jinja").await;
    assert_eq!(count(&lb, "c071-request.json").await, byte_tokens(&case_text("c071-expected-render.txt")));
    // Where the template has none, chat has none either; a completion gets the tokenizer's.
    let (_a, lb) = one().await;
    assert_eq!(lb.chat(HI).await.prompt_tokens(), chat_tokens("hi"));
    assert_eq!(lb.completions(br#"{"model":"m1","prompt":"hi"}"#).await.prompt_tokens(), 3);
    let none = br#"{"model":"m1","prompt":"hi","add_special_tokens":false}"#;
    assert_eq!(lb.completions(none).await.prompt_tokens(), 2);
}

async fn c073() {
    let (a, lb) = with_template("c073-template.jinja").await;
    for (request, words) in [("system", "no system role here"), ("twice", "roles must alternate")] {
        let answer = lb.chat(&case_bytes(&format!("c073-request-{request}.json"))).await;
        answer.is_error(400, "invalid_request");
        assert!(answer.text().contains(words), "{}", answer.text());
    }
    assert_eq!(a.count(), 0);
    assert_eq!(lb.chat(HI).await.prompt_tokens(), byte_tokens("[user]hi\n"));
    lb.books().settled().await;
    // Bugs of the template itself are no client's fault.
    for bug in [
        "{{ messages[0].content.no.such.thing }}",
        "{{ 1 / 0 }}",
        "{{ messages | no_such_filter }}",
        "{% for x in 5 %}{% endfor %}",
    ] {
        let (a, lb) = one_with(Setup::template(bug.as_bytes())).await;
        let answer = lb.chat(HI).await;
        assert_eq!(answer.status, 200, "{bug}: {}", answer.text());
        assert_eq!(a.count(), 1);
        lb.books().settled().await;
    }
}

async fn c075() {
    let (a, lb) = with_template("c075-template.jinja").await;
    for n in 1..=3 {
        let expected = byte_tokens(&case_text(&format!("c075-expected-{n}.txt")));
        assert_eq!(count(&lb, &format!("c075-request-{n}.json")).await, expected, "request {n}");
    }
    a.plays(Reply::json(400, r#"{"error":{"message":"both cannot be","type":"BadRequestError","code":400}}"#));
    let answer = lb.chat(&case_bytes("c075-request-4.json")).await;
    assert_eq!(answer.status, 400, "{}", answer.text());
    lb.books().settled().await;
}

async fn c077() {
    let (_a, lb) = with_template("c077-template.jinja").await;
    let default = byte_tokens(&case_text("c077-expected-default.txt"));
    assert_eq!(count(&lb, "c077-request-default.json").await, default);
    assert_eq!(count(&lb, "c077-request-off.json").await, byte_tokens(&case_text("c077-expected-off.txt")));
    for kwargs in [
        r#"{"messages":[{"role":"user","content":"something much longer"}]}"#,
        r#"{"tools":[{"a":"b"}]}"#,
        r#"{"bos_token":"<s><s><s>"}"#,
        r#"{"enable_thinking":true}"#,
    ] {
        let answer = lb.chat(&chat("hi", &format!(r#","chat_template_kwargs":{kwargs}"#))).await;
        assert_eq!(answer.prompt_tokens(), default, "{kwargs}");
    }
    // Arguments of a wrong type are the server's to refuse.
    for odd in ["null", "[]", "\"x\"", "1"] {
        let answer = lb.chat(&chat("hi", &format!(r#","chat_template_kwargs":{odd}"#))).await;
        assert!(answer.status == 200 || answer.status == 400, "{odd}: {}", answer.text());
    }
    lb.books().settled().await;
}

async fn c078() {
    let (a, lb) = one().await;
    let body = case_bytes("c078-request.json");
    let answer = lb.chat(&body).await;
    assert_eq!(answer.prompt_tokens(), chat_tokens("A<|im_end|>B <|endoftext|> <s>"));
    same_bytes(&a.only().body, &body);
}

async fn c080() {
    // Chosen against the case where the folder names no tokenizer at all: that is a fault of the configuration, told at
    // the start with what may stand there instead (`replica` and `approximate` among it), not a warning in a log that
    // nobody reads until the counts are wrong. A reload with it changes nothing (c114).
    let setup = Setup::new();
    let (empty, broken) = (setup.path("empty"), setup.path("broken"));
    for dir in [&empty, &broken] {
        std::fs::create_dir_all(dir).expect("a directory");
    }
    std::fs::write(broken.join("tokenizer.json"), "{").expect("a file");
    let lb = Setup::new()
        .model(&format!("{{name: m1, tokenizer: {}}}", empty.display()))
        .replica("a", "http://127.0.0.1:9")
        .spawn();
    let (status, _) = lb.exits_within(Duration::from_secs(20)).await.expect("it does not start");
    assert!(!status.success());
    assert!(lb.log().contains("tokenizer.json") && lb.log().contains("approximate"), "{}", lb.log());
    // The rest is as the case has it. No tokenizer, and said so; one that cannot be read; one without a template: every
    // request is served, its count is an estimate, and the metric says so.
    let bare = setup.path("bare");
    std::fs::create_dir_all(&bare).expect("a directory");
    std::fs::copy(byte_tokenizer().join("tokenizer.json"), bare.join("tokenizer.json")).expect("a copy");
    for (tokenizer, warns) in
        [("approximate".to_owned(), false), (broken.display().to_string(), true), (bare.display().to_string(), true)]
    {
        let (a, lb) = one_with(Setup::new().model(&format!("{{name: m1, tokenizer: {tokenizer}}}"))).await;
        let answer = lb.chat(&case_bytes("c080-request.json")).await;
        assert_eq!(answer.status, 200, "{tokenizer}: {}", answer.text());
        let counted = answer.prompt_tokens();
        assert!((1..60).contains(&counted), "{tokenizer}: {counted}");
        same_bytes(&a.only().body, &case_bytes("c080-request.json"));
        if warns {
            assert!(lb.logs_line("WARN", Duration::from_secs(1)).await, "{tokenizer}: the start warns: {}", lb.log());
        }
        a.plays(Reply::json(200, r#"{"choices":[]}"#));
        lb.chat(HI).await;
        lb.books().settled().await;
        let estimated =
            lb.books().metric("weighbridge_tokens_total", &[("kind", "prompt"), ("source", "estimate")]).await;
        assert!(estimated > 0.0, "{tokenizer}: {}", lb.log());
    }
    // The context check has a margin: what an estimate says may fit is forwarded, and what cannot fit is refused, with
    // its figure called an estimate.
    let tokens = |sentences: usize| chat(&"The lorry rolled onto the weighbridge at six. ".repeat(sentences), "");
    let a = Upstream::start().await;
    let setup = Setup::new().model("{name: m1, tokenizer: approximate}");
    let lb = setup.replica_with("a", &a.url(), "max_context_tokens: 1000").start().await;
    for (sentences, status) in [(60, 200), (85, 200), (110, 200), (200, 400)] {
        let before = a.count();
        let answer = lb.chat(&tokens(sentences)).await;
        assert_eq!(answer.status, status, "{sentences} sentences: {}", answer.text());
        assert_eq!(a.count() - before, usize::from(status == 200), "{sentences} sentences");
        if status == 400 {
            answer.is_error(400, "context_length_exceeded");
            assert!(answer.text().contains("about"), "{}", answer.text());
        }
    }
    lb.books().settled().await;
    // `replica`: the engine's own /tokenize is asked.
    let (a, lb) = one_with(Setup::new().model("{name: m1, tokenizer: replica}")).await;
    a.replies(|seen| {
        if seen.target.ends_with("tokenize") {
            Reply::json(
                200,
                r#"{"count":17,"max_model_len":4096,"tokens":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]}"#,
            )
        } else {
            Reply::chat(17, 2)
        }
    });
    assert_eq!(lb.chat(HI).await.prompt_tokens(), 17);
    lb.books().settled().await;
}

async fn c081() {
    let (_a, lb) = with_template("c081-template-string.jinja").await;
    let joined = byte_tokens(&case_text("c081-expected-string.txt"));
    assert_eq!(count(&lb, "c081-request.json").await, joined);
    // A template that loops over parts gets the list.
    let looping = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}";
    let (_a, lb) = one_with(Setup::template(looping.as_bytes())).await;
    assert_eq!(count(&lb, "c081-request.json").await, byte_tokens("[one][two]"));
    // The YAML overrides what was found out.
    let setup = Setup::template_with(&case_bytes("c081-template-string.jinja"), "content_format: parts");
    let (_a, lb) = one_with(setup).await;
    assert_ne!(count(&lb, "c081-request.json").await, joined);
}

async fn c082() {
    let (_a, lb) = with_template("c082-template.jinja").await;
    let expected = byte_tokens(&case_text("c082-expected-render.txt"));
    assert_eq!(count(&lb, "c082-request.json").await, expected);
    let missing = case_text("c082-request.json").replace(r#""content":null,"#, "");
    let answer = lb.chat(missing.as_bytes()).await;
    assert_eq!((answer.status, answer.prompt_tokens()), (200, expected));
    // Printed bare, null is nothing where the template would print it: not "None" in a count, and no error.
    let (_a, lb) = one().await;
    let answer = lb.chat(&case_bytes("c082-request.json")).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}

async fn c084() {
    let template = case_bytes("c067-template.jinja");
    let (_a, lb) = one_with(Setup::template(&template)).await;
    let with_tools = count(&lb, "c084-request.json").await;
    let body: serde_json::Value = serde_json::from_slice(&case_bytes("c084-request.json")).expect("JSON");
    let tools = body["tools"].to_string().len() as u64;
    assert!(with_tools > tools, "{with_tools} tokens for {tools} bytes of tools");
    // tool_choice none: as vLLM does by default, the tools are still printed; a switch drops them.
    let none = case_text("c084-request.json").replacen('{', r#"{"tool_choice":"none","#, 1);
    assert_eq!(lb.chat(none.as_bytes()).await.prompt_tokens(), with_tools);
    let (_a, dropping) = one_with(Setup::template_with(&template, "tools_with_choice_none: false")).await;
    assert!(dropping.chat(none.as_bytes()).await.prompt_tokens() < 100);
    let answer = lb.chat(&case_bytes("c084-request-functions.json")).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    // The context check has them, too.
    let a = crate::harness::Upstream::start().await;
    let lb = Setup::template(&template).replica_with("a", &a.url(), "max_context_tokens: 4000").start().await;
    lb.chat(&case_bytes("c084-request.json")).await.is_error(400, "context_length_exceeded");
    assert_eq!(a.count(), 0);
    lb.books().settled().await;
}
