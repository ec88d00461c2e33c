//! The field cases on templates: rendered text equals the expected files, byte for byte.

use std::sync::Arc;

use super::*;
use crate::config::Engine;
use crate::weigh::draft::render;
use crate::weigh::prompt::Form;
use crate::weigh::template::{RenderError, Templates, WallClock};

fn case(name: &str) -> String {
    std::fs::read_to_string(data("field_cases/data").join(name)).unwrap()
}

/// 2026-02-03 04:05:06, as the cases have it.
fn still() -> WallClock {
    Arc::new(|| chrono::NaiveDate::from_ymd_opt(2026, 2, 3).unwrap().and_hms_opt(4, 5, 6).unwrap())
}

fn rendered_by(template: &str, body: &str, configured: impl Fn(&mut Model)) -> Result<String, RenderError> {
    let specials = vec![("bos_token".to_owned(), "<s>".to_owned()), ("eos_token".to_owned(), "</s>".to_owned())];
    let templates = Templates::new(vec![("default".to_owned(), template.to_owned())], specials, still()).unwrap();
    let mut model = model("m1", TokenizerSource::Approximate);
    configured(&mut model);
    let Form::Chat(chat) = Form::read(&chat(body), &model).unwrap() else { panic!("not read as a conversation") };
    render(*chat, &templates, &model, Engine::Auto, body.len())
}

fn rendered(template: &str, body: &str) -> Result<String, RenderError> {
    rendered_by(&case(template), &case(body), |_| {})
}

#[test]
fn c067_tools_are_printed_as_python_prints_json() {
    assert_eq!(rendered("c067-template.jinja", "c067-request.json").unwrap(), case("c067-expected-render.txt"));
}

#[test]
fn c069_dates_are_local_and_in_any_format_of_strftime() {
    assert_eq!(rendered("c069-template.jinja", "c069-request.json").unwrap(), case("c069-expected-render.txt"));
}

#[test]
fn c071_a_template_s_own_bos_is_the_only_one() {
    assert_eq!(rendered("c071-template.jinja", "c071-request.json").unwrap(), case("c071-expected-render.txt"));
    let templates = data("field_cases/data/c071-template.jinja");
    let mut m1 = model("m1", TokenizerSource::Directory(data("data/smollm2")));
    m1.chat_template = Some(templates);
    let weight = weigh(&weigher(vec![m1]), &chat(&case("c071-request.json"))).unwrap();
    let weight_text = weigh(
        &smollm2(),
        &request(
            Endpoint::Completions,
            // SmolLM2's BOS is `<|im_start|>`; the completion API adds none, since its tokenizer adds none.
            serde_json::json!({"prompt": case("c071-expected-render.txt").replace("<s>", "<|im_start|>")}).to_string(),
        ),
    )
    .unwrap();
    assert_eq!(weight.prompt.tokens, weight_text.prompt.tokens);
}

#[test]
fn c073_a_template_that_raises_is_the_client_s_error_in_its_own_words() {
    for (body, words) in
        [("c073-request-system.json", "no system role here"), ("c073-request-twice.json", "roles must alternate")]
    {
        let error = rendered("c073-template.jinja", body).unwrap_err();
        assert_eq!(error, RenderError::Raised(words.to_owned()));
    }
}

#[test]
fn c075_generation_prompts_and_continued_messages_end_as_the_engine_ends_them() {
    for n in 1..=3 {
        let text = rendered("c075-template.jinja", &format!("c075-request-{n}.json")).unwrap();
        assert_eq!(text, case(&format!("c075-expected-{n}.txt")), "request {n}");
    }
    let model = model("m1", TokenizerSource::Approximate);
    let error = Form::read(&chat(&case("c075-request-4.json")), &model).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("continue_final_message"));
}

#[test]
fn c077_kwargs_reach_the_template_and_replace_nothing_of_the_request() {
    for name in ["off", "default"] {
        let text = rendered("c077-template.jinja", &format!("c077-request-{name}.json")).unwrap();
        assert_eq!(text, case(&format!("c077-expected-{name}.txt")), "{name}");
    }
    let body = r#"{"messages":[{"role":"user","content":"hi"}],
        "chat_template_kwargs":{"messages":[],"tools":[1],"bos_token":"X","add_generation_prompt":false}}"#;
    let plain = r#"{"messages":[{"role":"user","content":"hi"}]}"#;
    for template in ["c077-template.jinja", "c071-template.jinja"] {
        let template = case(template);
        assert_eq!(rendered_by(&template, body, |_| {}), rendered_by(&template, plain, |_| {}));
    }
}

#[test]
fn c077_answers_with_and_without_thinking_have_histories_of_their_own() {
    let mut m1 = model("m1", TokenizerSource::Directory(data("data/smollm2")));
    m1.chat_template = Some(data("field_cases/data/c077-template.jinja"));
    let weigher = weigher(vec![m1]);
    let task = |body: &str| weigh(&weigher, &chat(&case(body))).unwrap().history.task;
    assert_ne!(task("c077-request-off.json"), task("c077-request-default.json"));
}

#[test]
fn c078_control_tokens_in_text_count_as_the_server_counts_them() {
    let weight = weigh(&smollm2(), &chat(&case("c078-request.json"))).unwrap();
    assert!(weight.prompt.exact());
    let body: serde_json::Value = serde_json::from_str(&case("c078-request.json")).unwrap();
    assert!(body["messages"][0]["content"].as_str().unwrap().contains("<|im_end|>"));
}

#[test]
fn c080_a_model_without_a_template_is_estimated_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(data("data/smollm2/tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    let weigher = weigher(vec![model("m1", TokenizerSource::Directory(dir.path().to_owned()))]);
    let weight = weigh(&weigher, &chat(&case("c080-request.json"))).unwrap();
    assert!(!weight.prompt.exact());
    assert!(weight.prompt.tokens.0 > 0);
}

#[test]
fn c081_parts_become_text_for_templates_that_print_text_and_the_yaml_decides_otherwise() {
    let text = rendered("c081-template-string.jinja", "c081-request.json").unwrap();
    assert_eq!(text, case("c081-expected-string.txt"));
    let looping = "{% for m in messages %}{% for c in m.content %}[{{ c.text }}]{% endfor %}{% endfor %}";
    assert_eq!(rendered_by(looping, &case("c081-request.json"), |_| {}).unwrap(), "[one][two]");
    let kept = rendered_by(&case("c081-template-string.jinja"), &case("c081-request.json"), |model| {
        model.content_format = ContentFormat::Parts;
    });
    assert!(kept.unwrap().contains("[{'type': 'text', 'text': 'one'}"));
}

#[test]
fn c082_null_content_prints_as_nothing() {
    assert_eq!(rendered("c082-template.jinja", "c082-request.json").unwrap(), case("c082-expected-render.txt"));
}

#[test]
fn c047_a_template_that_never_ends_is_stopped_and_a_client_s_own_refused() {
    let parsed = Request::parse(
        Endpoint::ChatCompletions,
        Bytes::from(case("c047-request.json")),
        &ParseLimits { json_depth: 128 },
    );
    assert_eq!(parsed.unwrap_err().param.as_deref(), Some("chat_template"));
    let stopped = rendered("c047-template.jinja", "c047-request-kwargs.json").unwrap_err();
    assert!(matches!(stopped, RenderError::Failed(_)), "{stopped:?}");
}

#[test]
fn c084_tools_count_and_the_switch_for_tool_choice_none_is_the_model_s() {
    let template = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ messages[0].content }}";
    let body = case("c084-request.json");
    let with = rendered_by(template, &body, |_| {}).unwrap();
    assert!(with.len() > 30 * 200);
    let none = body.replacen('{', "{\"tool_choice\":\"none\",", 1);
    assert_eq!(rendered_by(template, &none, |_| {}).unwrap(), with);
    assert_eq!(rendered_by(template, &none, |model| model.tools_with_choice_none = false).unwrap(), "hi");
    assert_eq!(rendered_by(template, &case("c084-request-functions.json"), |_| {}).unwrap(), "hi");
}

#[test]
fn c058_c059_media_cost_a_bounded_figure_wherever_they_stand() {
    let weigher = smollm2();
    let one = weigh(&weigher, &chat(&case("c058-request.json"))).unwrap();
    assert!(!one.prompt.exact());
    assert!((765..900).contains(&one.prompt.tokens.0), "{}", one.prompt.tokens);
    let several = weigh(&weigher, &chat(&case("c059-request.json"))).unwrap();
    assert!((765..10_000).contains(&several.prompt.tokens.0), "{}", several.prompt.tokens);
}

#[test]
fn c058_a_large_image_does_not_trip_the_window() {
    let base64 = "A".repeat(3_400_000);
    let body = format!(
        r#"{{"messages":[{{"role":"user","content":[{{"type":"text","text":"what"}},{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{base64}"}}}}]}}]}}"#
    );
    let hints = WeighHints { window: Some(Tokens(8192)), ..WeighHints::default() };
    let weight = smollm2().weigh_here(&ModelName::from("m1"), &chat(&body), &hints).unwrap();
    assert!(weight.prompt.tokens.0 < 1000);
}

#[test]
fn named_templates_are_chosen_by_the_request_s_tools() {
    let named = vec![("default".to_owned(), "plain".to_owned()), ("tool_use".to_owned(), "tools".to_owned())];
    let templates = Templates::new(named, Vec::new(), still()).unwrap();
    assert_eq!(templates.render(false, Vec::new(), 10).unwrap(), "plain");
    assert_eq!(templates.render(true, Vec::new(), 10).unwrap(), "tools");
}

#[test]
fn generation_blocks_print_nothing_of_their_own() {
    let template = "{% for m in messages %}\n{% generation %}\n{{ m.content }}\n{%- endgeneration %}\n{% endfor %}";
    let body = r#"{"messages":[{"role":"user","content":"hi"}]}"#;
    assert_eq!(rendered_by(template, body, |_| {}).unwrap(), "hi");
}
