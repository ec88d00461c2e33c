//! What a configuration accepts, and how it says no.

use std::path::Path;
use std::time::Duration;

use super::*;
use crate::units::Tokens;

const GOOD: &str = "\
listen: [{address: 127.0.0.1:8080}]
models: [{name: m, tokenizer: approximate}]
replicas:
  - {id: a, url: 'http://127.0.0.1:9001', model: m}
";

fn faults(text: &str) -> Vec<ConfigError> {
    parse(text, Path::new("")).expect_err("the text is faulty").0
}

/// The one fault of `text`, as it is shown.
fn fault(text: &str) -> String {
    let all = faults(text);
    assert_eq!(all.len(), 1, "{all:#?}");
    all[0].to_string()
}

fn with(more: &str) -> String {
    format!("{GOOD}{more}")
}

#[test]
fn the_least_configuration_has_every_default() {
    let config = parse(GOOD, Path::new("")).unwrap();
    assert_eq!(config.limits, Limits::default());
    assert_eq!(config.bands, vec![BandSpec::default()]);
    assert_eq!(config.admin.address.to_string(), "127.0.0.1:9090");
    assert_eq!(config.replicas[0].max_sequences, 256);
    assert!(config.answer_headers && config.tenants.is_empty());
}

#[test]
fn the_example_is_accepted_and_every_key_in_it_is_meant() {
    let config = load(Path::new("conf/weighbridge.yaml")).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(config.replicas[0].token_capacity, Some(Tokens(400_000)));
    assert_eq!(config.bands[2].share, 0.7);
    assert_eq!(config.retries.budget, 0.1);
    assert_eq!(config.limits, Limits::default());
    assert_eq!(config.health, Health::default());
}

#[test]
fn a_fault_names_file_line_path_and_what_is_allowed() {
    assert_eq!(
        fault(&with("limits: {connections: many}\n")),
        "config:5: limits.connections: found `many`; allowed: a whole number from 1 to 10000000"
    );
}

#[test]
fn an_unknown_key_is_a_fault_that_names_the_nearest() {
    let text = GOOD.replace("url:", "urll:");
    let all = faults(&text);
    assert!(all.iter().any(|e| e.line == Some(4) && e.problem.contains("did you mean `url`?")), "{all:#?}");
    assert!(fault(&with("limts: {}\n")).contains("did you mean `limits`?"));
}

#[test]
fn every_fault_is_reported_not_only_the_first() {
    let all = faults(
        "listen: [{address: here}]\nmodels: [{name: m}]\nreplicas: [{id: a, model: n}]\nbands: [{name: x, share: 2}]\n",
    );
    let paths: Vec<&str> = all.iter().map(|e| e.path.as_str()).collect();
    assert_eq!(paths, ["listen[0].address", "models[0]", "replicas[0]", "replicas[0].model", "bands[0].share"]);
    assert_eq!(all.iter().map(|e| e.line.unwrap()).collect::<Vec<_>>(), [1, 2, 3, 3, 4]);
}

#[test]
fn a_replica_with_an_unknown_model_names_both_and_the_nearest() {
    let text = "listen: [{address: 127.0.0.1:1}]\nmodels: [{name: llama-3-70b, tokenizer: approximate}]\nreplicas:\n  - id: gpu-3\n    url: http://h\n    model: lama-3-70b\n";
    let said = fault(text);
    for part in ["config:6:", "gpu-3", "`lama-3-70b`", "did you mean `llama-3-70b`?"] {
        assert!(said.contains(part), "{said}");
    }
}

#[test]
fn names_clash_only_once_in_models_aliases_and_adapters() {
    let text = GOOD.replace(
        "[{name: m, tokenizer: approximate}]",
        "[{name: m, tokenizer: approximate, aliases: [x]}, {name: n, tokenizer: approximate, aliases: [m], adapters: [x]}]",
    );
    assert_eq!(faults(&text).len(), 2, "{:#?}", faults(&text));
}

#[test]
fn duplicate_replicas_are_faults() {
    let text = with("  - {id: a, url: 'http://127.0.0.1:9002', model: m}\n");
    assert!(fault(&text).contains("replica id `a` is given twice"));
    let text = with("  - {id: b, url: 'http://127.0.0.1:9001/', model: m}\n");
    assert!(fault(&text).contains("replica url"));
}

#[test]
fn no_replicas_at_all_is_a_fault_but_discovery_is_enough() {
    let none = GOOD.lines().take(2).collect::<Vec<_>>().join("\n");
    assert!(fault(&none).contains("no replicas"));
    assert!(fault(&format!("{none}\nreplicas: []\n")).contains("no replicas"));
    let dns = format!("{none}\ndiscovery: {{dns: {{name: gpus.local, port: 8000, template: {{model: m}}}}}}\n");
    let Some(Discovery::Dns(found)) = parse(&dns, Path::new("")).unwrap().discovery else { panic!("dns") };
    assert_eq!((found.port, found.ttl_min, found.template.models.len()), (Some(8000), Duration::from_secs(1), 1));
}

#[test]
fn exactly_one_band_is_the_default() {
    assert!(fault(&with("bands: [{name: a}, {name: b}]\n")).contains("no band has `default: true`"));
    assert!(
        fault(&with("bands: [{name: a, default: true}, {name: b, default: true}]\n")).contains("a, b are all default")
    );
    assert!(parse(&with("bands: [{name: a}]\n"), Path::new("")).unwrap().bands[0].default);
    for share in ["0", "1.01", "-1", "120%", ".nan"] {
        assert!(
            fault(&with(&format!("bands: [{{name: a, share: {share}}}]\n"))).contains("a share above 0 to 1"),
            "{share}"
        );
    }
}

#[test]
fn a_missing_or_empty_key_file_is_a_fault_at_start() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("empty"), " \n").unwrap();
    std::fs::write(dir.path().join("key"), "k\n").unwrap();
    let at = |file: &str| {
        parse(&with(&format!("tenants: [{{name: t, key_file: {file}}}]\n")), dir.path()).map_err(|e| e.to_string())
    };
    assert!(at("absent").unwrap_err().contains("cannot read"));
    assert!(at("empty").unwrap_err().contains("is empty"));
    assert_eq!(at("key").unwrap().tenants[0].key_file, dir.path().join("key"));
}

#[test]
fn the_admin_address_is_loopback_or_has_a_token() {
    assert!(fault(&with("admin: {address: 0.0.0.0:9090}\n")).contains("not loopback"));
    assert!(parse(&with("admin: {address: '[::1]:9090'}\n"), Path::new("")).is_ok());
}

#[test]
fn empty_and_broken_files_are_faults() {
    assert!(fault("").contains("empty"));
    assert!(fault("# nothing\n").contains("mapping"));
    assert!(fault("groups:\n  - name: m1\n   replicas: [\n").contains("config:"));
    assert!(load(Path::new("absent.yaml")).unwrap_err().to_string().contains("cannot read"));
    assert!(!faults(&with("models: []\n")).is_empty(), "a key given twice");
}

#[test]
fn a_tokenizer_that_is_not_there_is_a_fault() {
    let dir = tempfile::tempdir().unwrap();
    let text = GOOD.replace("approximate", "tok");
    assert!(parse(&text, dir.path()).unwrap_err().to_string().contains("is no directory"));
    std::fs::create_dir(dir.path().join("tok")).unwrap();
    assert!(parse(&text, dir.path()).unwrap_err().to_string().contains("holds no tokenizer.json"));
    std::fs::write(dir.path().join("tok/tokenizer.json"), "{}").unwrap();
    assert!(parse(&text, dir.path()).is_ok());
}

#[test]
fn times_and_sizes_are_written_as_people_write_them() {
    let text = with(
        "limits: {body_bytes: 64MiB, header_bytes: 1000, keepalive: 1m 30s}\nregions: {local: eu, distance: {us: 90ms}}\n",
    );
    let config = parse(&text, Path::new("")).unwrap();
    assert_eq!(config.limits.body_bytes, 64 << 20);
    assert_eq!(config.limits.header_bytes, 1000);
    assert_eq!(config.limits.keepalive, Duration::from_secs(90));
    assert_eq!(config.regions.distance["us"], Duration::from_millis(90));
    assert!(fault(&with("limits: {keepalive: 30}\n")).contains("with its unit"));
}

#[test]
fn a_replicas_file_is_read_and_its_faults_name_it() {
    let dir = tempfile::tempdir().unwrap();
    let text = format!("{}\nreplicas_file: list.yaml\n", GOOD.lines().take(2).collect::<Vec<_>>().join("\n"));
    std::fs::write(dir.path().join("list.yaml"), "- {id: a, url: 'http://h', model: m}\n").unwrap();
    assert_eq!(parse(&text, dir.path()).unwrap().replicas.len(), 1);
    std::fs::write(dir.path().join("list.yaml"), "- {id: a, url: 'http://h', model: m}\n- {id: b, url: h, model: m}\n")
        .unwrap();
    let said = parse(&text, dir.path()).unwrap_err().to_string();
    assert!(said.contains("list.yaml:2: [1].url: `h` has no scheme"), "{said}");
    std::fs::write(dir.path().join("list.yaml"), "").unwrap();
    assert!(parse(&text, dir.path()).unwrap_err().to_string().contains("empty"));
}

#[test]
fn an_advertisement_fills_up_from_the_template_and_may_name_no_files() {
    let none = GOOD.lines().take(2).collect::<Vec<_>>().join("\n");
    let text = format!(
        "{none}\ndiscovery: {{etcd: {{endpoints: ['http://e:2379'], prefix: /r/, template: {{model: m, tokens_per_sec: 7}}}}}}\n"
    );
    let config = parse(&text, Path::new("")).unwrap();
    let Some(Discovery::Etcd(etcd)) = &config.discovery else { panic!("etcd") };
    let reader = ReplicaReader::new(&etcd.template, config.models.iter().map(|m| m.name.clone()).collect());
    let spec = reader.advertised("gpu-1", r#"{"url": "http://h:1", "token_capacity": 5}"#, "etcd").unwrap();
    assert_eq!((spec.id.as_str(), spec.tokens_per_sec, spec.token_capacity), ("gpu-1", 7.0, Some(Tokens(5))));
    assert_eq!(reader.advertised("gpu-1", "http://h:2", "etcd").unwrap().url.port, 2);
    assert!(reader.advertised("x", r#"{"url": "http://h:1", "api_key_file": "/etc/shadow"}"#, "etcd").is_err());
    assert!(reader.advertised("x", r#"{"url": "http://h:1", "model": "other"}"#, "etcd").is_err());
}

#[test]
fn the_digest_compares_by_name_and_shows_what_a_reload_would_change() {
    let old = digest(&parse(&with("limits: {keepalive: 60s}\n"), Path::new("")).unwrap());
    let new =
        with("  - {id: b, url: 'http://127.0.0.1:9002', model: m}\nlimits: {keepalive: 90s}\n").replace("9001", "9003");
    let new = digest(&parse(&new, Path::new("")).unwrap());
    let shown: Vec<String> = diff(&old, &new).iter().map(Change::to_string).collect();
    assert_eq!(shown.len(), 3, "{shown:#?}");
    assert_eq!(shown[0], r#"~ limits.keepalive: "1m" -> "1m 30s""#);
    assert_eq!(shown[1], r#"~ replicas.a.url: "http://127.0.0.1:9001" -> "http://127.0.0.1:9003""#);
    assert!(shown[2].starts_with("+ replicas.b: {"), "{}", shown[2]);
    assert!(diff(&new, &new).is_empty());
}

/// c114
#[test]
fn a_bad_edit_is_refused_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.yaml");
    let edits = [
        "groups:\n  - name: m1\n   replicas: [\n".to_owned(),
        "groups:\n  - name: m1\n    replicsa: [{url: 'http://127.0.0.1:9001'}]\n".to_owned(),
        String::new(),
        GOOD.replace("url:", "urll:"),
        GOOD.replace("model: m", "model: m2"),
        GOOD.replace("approximate", "no/such/directory"),
        with("  - {id: a, url: 'http://127.0.0.1:9001', model: m}\n"),
        GOOD.lines().take(2).collect::<Vec<_>>().join("\n") + "\nreplicas: []\n",
    ];
    for text in edits {
        std::fs::write(&path, &text).unwrap();
        let errors = load(&path).expect_err(&text);
        let said = errors.to_string();
        assert!(said.contains("c.yaml"), "{said}");
        assert!(text.is_empty() || errors.0.iter().any(|e| e.line.is_some()), "{said}");
    }
    std::fs::remove_file(&path).unwrap();
    assert!(load(&path).is_err());
    std::fs::write(&path, GOOD).unwrap();
    assert!(load(&path).is_ok(), "the next good file is taken");
}

mod any_text {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn never_panics(text in "(?s)[a-z:\\[\\]{}#&*!|>'\"%@`,\\-? \n\t0-9.]{0,200}") {
            let _ = super::parse(&text, std::path::Path::new("/nonexistent"));
        }

        #[test]
        fn never_panics_where_values_are_odd(key in "listen|admin|limits|shutdown|models|replicas|regions|bands|tenants|health|scrape|warmup|retries|balance|discovery", value in "\\[\\]|\\{\\}|~|-1|1e999|\\[\\{\\}\\]|\\[\\[\\]\\]|\\{name: 1\\}|'x'|\\[\\{name: \\[\\]\\}\\]|!tag x|\\{1: 2\\}") {
            let _ = super::parse(&format!("{key}: {value}\n"), std::path::Path::new("/nonexistent"));
        }
    }
}
