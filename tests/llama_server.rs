//! The real part: two genuine llama-servers of unequal speed behind the balancer.
//!
//! `tests/llama/setup.sh` installs the server and the model and prints the two variables that this test needs; `make
//! test` does that. Without them the test fails: it is not skipped.

mod harness;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use harness::balancer::{launch, signal};
use harness::client::{self, Client};
use harness::{End, Running, Setup, files, ms, ports, run, within};
use parking_lot::Mutex;
use serde_json::{Value, json};

const MODEL: &str = "smollm2-135m";

struct Server {
    address: SocketAddr,
    child: Mutex<Child>,
    logs: Arc<Mutex<Vec<String>>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        // A stopped process dies of SIGKILL all the same.
        let mut child = self.child.lock();
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl Server {
    fn start(threads: u32) -> Server {
        let from = |name: &str| {
            std::env::var_os(name).unwrap_or_else(|| {
                panic!("{name} is not set: run `eval \"$(tests/llama/setup.sh)\"` first, or `make test`, which does it")
            })
        };
        let (binary, model) = (from("WEIGHBRIDGE_LLAMA_SERVER"), from("WEIGHBRIDGE_LLAMA_MODEL"));
        let address = ports::free();
        let threads = threads.to_string();
        let mut command = Command::new(binary);
        command
            .arg("-m")
            .arg(model)
            .args(["-a", MODEL, "--host", "127.0.0.1", "--port", &address.port().to_string()])
            .args(["-t", &threads, "-tb", &threads, "-np", "4", "-c", "8192", "--metrics", "--slots", "--props"])
            .args(["--no-webui", "--offline", "--threads-http", "64"])
            // Spinning threads would take the cores from everything else on a small machine.
            .env("OMP_WAIT_POLICY", "passive")
            .stdin(Stdio::null());
        let logs = Arc::new(Mutex::new(Vec::new()));
        let child = Mutex::new(launch(command, &logs));
        Server { address, child, logs }
    }

    async fn wait_ready(&self) {
        let ready = within(Duration::from_secs(120), async || {
            let ended = self.child.lock().try_wait().expect("the child can be asked");
            assert!(ended.is_none(), "llama-server ended ({ended:?}): {}", self.logs.lock().join("\n"));
            match Client::try_connect(self.address).await {
                Ok(_) => client::get(self.address, "/health").await.status == 200,
                Err(_) => false,
            }
        })
        .await;
        assert!(ready, "llama-server is not ready after two minutes");
    }
}

async fn two_servers(more: impl FnOnce(Setup) -> Setup) -> (Server, Server, Running) {
    let (fast, slow) = (Server::start(2), Server::start(1));
    fast.wait_ready().await;
    slow.wait_ready().await;
    let replica = |rate: u32| {
        format!(
            "model: {MODEL}, engine: llamacpp, tokens_per_sec: {rate}, max_context_tokens: 2048, token_capacity: 8192, max_sequences: 4"
        )
    };
    let setup = Setup::new()
        .model(&format!("{{name: {MODEL}, tokenizer: {}}}", files::path("data/smollm2").display()))
        .replica_with("fast", &format!("http://{}", fast.address), &replica(80))
        .replica_with("slow", &format!("http://{}", slow.address), &replica(50));
    let lb = more(setup).start().await;
    (fast, slow, lb)
}

/// A request of the mix, and what its answer must show.
fn mixed(n: u64) -> (&'static str, Value) {
    let words = ["the sea", "a red house", "counting sheep", "why bread rises", "trains in the rain"];
    let text =
        format!("Tell me about {} ({n}). {}", words[n as usize % words.len()], "More, please. ".repeat(n as usize % 7));
    let max = 4 + n % 13;
    let mut body = json!({"model": MODEL, "max_tokens": max, "temperature": 0});
    let path = if n % 4 == 3 {
        body["prompt"] = json!(text);
        "/v1/completions"
    } else {
        body["messages"] = json!([{"role": "user", "content": text}]);
        "/v1/chat/completions"
    };
    if n.is_multiple_of(2) {
        body["stream"] = json!(true);
        if n.is_multiple_of(4) {
            body["stream_options"] = json!({"include_usage": true});
        }
    }
    (path, body)
}

#[test]
fn forty_mixed_requests_through_two_real_servers_are_whole_counted_exactly_and_leave_nothing() {
    run(async {
        let (_fast, _slow, lb) = two_servers(|s| s).await;
        let lb = Arc::new(lb);

        // The balancer's count is the server's, request by request.
        let truth =
            std::fs::read_to_string(files::path("data/wire/llama-server/prompt_tokens.jsonl")).expect("the truth");
        let mut differing = Vec::new();
        let mut compared = 0;
        for line in truth.lines() {
            let row: Value = serde_json::from_str(line).expect("a row");
            let answer = lb.chat(row["request"].to_string().as_bytes()).await;
            assert_eq!(answer.status, 200, "{}: {}", row["name"], answer.text());
            let reported = answer.json()["usage"]["prompt_tokens"].as_u64().expect("usage");
            let counted = answer.prompt_tokens();
            compared += 1;
            if counted != reported || row["prompt_tokens"] != reported {
                differing.push(format!(
                    "{}: counted {counted}, reported {reported}, captured {}",
                    row["name"], row["prompt_tokens"]
                ));
            }
        }
        assert_eq!(compared, 43);
        assert!(differing.is_empty(), "{differing:#?}");
        lb.books().settled().await;

        // Forty mixed ones, eight at a time.
        let next = Arc::new(std::sync::atomic::AtomicU64::new(0));
        let used = Arc::new(Mutex::new(BTreeMap::<String, u64>::new()));
        let tasks: Vec<_> = (0..8)
            .map(|_| {
                let (lb, next, used) = (Arc::clone(&lb), Arc::clone(&next), Arc::clone(&used));
                tokio::spawn(async move {
                    loop {
                        let n = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        if n >= 40 {
                            return;
                        }
                        let (path, body) = mixed(n);
                        let answer = client::post(lb.address, path, body.to_string().as_bytes()).await;
                        assert_eq!((answer.status, answer.end), (200, End::Clean), "{n}: {}", answer.text());
                        *used.lock().entry(answer.replica().to_owned()).or_default() += 1;
                        whole(n, &body, &answer);
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("every answer is complete");
        }
        lb.books().settled().await;
        let used = used.lock().clone();
        assert_eq!(used.len(), 2, "both replicas are used: {used:?}");
        assert_eq!(lb.books().outcome("completed").await, 83);
        let mismatch = lb.books().metric("weighbridge_prompt_count_mismatch_total", &[]).await;
        assert_eq!(mismatch, 0.0, "counts that differ from the server's");
        println!("43 counts equal to llama-server's; 40 mixed requests: {used:?}");
    });
}

fn whole(n: u64, body: &Value, answer: &harness::Answer) {
    if body["stream"] != true {
        let json = answer.json();
        assert!(json["choices"][0]["finish_reason"].is_string(), "{n}: {json}");
        assert!(json["usage"]["completion_tokens"].as_u64() > Some(0), "{n}: {json}");
        assert_eq!(json["usage"]["prompt_tokens"].as_u64(), Some(answer.prompt_tokens()), "{n}");
        return;
    }
    let text = answer.text();
    assert!(text.trim_end().ends_with("data: [DONE]"), "{n}: {text}");
    let chunks: Vec<Value> = text
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .filter(|data| *data != "[DONE]" && *data != "null")
        .map(|data| serde_json::from_str(data).unwrap_or_else(|e| panic!("{n}: {e} in {data}")))
        .collect();
    assert!(chunks.iter().any(|c| c["choices"][0]["finish_reason"].is_string()), "{n}: {text}");
    let usage: Vec<&Value> = chunks.iter().filter(|c| c["usage"].is_object()).collect();
    if body["stream_options"].is_object() {
        let last = usage.last().unwrap_or_else(|| panic!("{n}: usage was asked for: {text}"));
        assert_eq!(last["usage"]["prompt_tokens"].as_u64(), Some(answer.prompt_tokens()), "{n}");
    } else {
        assert!(chunks.iter().all(|c| c["choices"].as_array().is_some_and(|c| !c.is_empty())), "{n}: {text}");
    }
}

#[test]
fn a_frozen_server_is_out_of_rotation_and_holds_nobody_beyond_the_first_byte_limit() {
    run(async {
        const LIMIT: Duration = Duration::from_secs(4);
        let (fast, _slow, lb) = two_servers(|s| {
            s.section("limits", "{first_byte_timeout: 4s, stream_idle_timeout: 4s}")
                .section("health", "{interval: 500ms, timeout: 1s, unhealthy_after: 3, healthy_after: 1}")
        })
        .await;
        let ask = |n: u64| {
            json!({"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": format!("Hi {n}")}]})
                .to_string()
        };
        for n in 0..4 {
            assert_eq!(lb.chat(ask(n).as_bytes()).await.status, 200);
        }
        let pid = fast.child.lock().id();
        signal(pid, "STOP");
        let frozen = Instant::now();
        let books = lb.books();
        let watching = tokio::spawn(async move {
            while books.state("fast").await == "open" {
                tokio::time::sleep(ms(50)).await;
            }
            frozen.elapsed()
        });
        let mut waited = Vec::new();
        for n in 0..60 {
            let start = Instant::now();
            let answer = lb.chat(ask(100 + n).as_bytes()).await;
            waited.push(start.elapsed());
            if answer.status != 200 {
                answer.is_error(504, "first_byte_timeout");
            }
            if watching.is_finished() && n > 12 {
                break;
            }
            tokio::time::sleep(ms(50)).await;
        }
        assert!(watching.is_finished(), "it is taken out");
        let out_after = watching.await.expect("a time");
        // The last data excuses a late probe for a timeout and an interval; then three probes, each of a timeout and an
        // interval. The rest is for a busy machine.
        assert!(out_after < 4 * ms(1500) + Duration::from_secs(3), "out after {out_after:?}");
        let longest = waited.iter().max().expect("some");
        assert!(*longest < LIMIT + Duration::from_secs(2), "a request waited {longest:?}");
        println!(
            "a real llama-server frozen: out after {out_after:.1?}, the longest of {} waits {longest:.1?}",
            waited.len()
        );
        for n in 0..3 {
            assert_eq!(lb.chat(ask(200 + n).as_bytes()).await.replica(), "slow", "the frozen one gets nothing");
        }
        lb.books().settled().await;
        signal(pid, "CONT");
        // Back by its probes, it is tried with one request at a time, and open once that was answered.
        let thawed = Instant::now();
        while lb.books().state("fast").await != "open" {
            assert!(thawed.elapsed() < Duration::from_secs(20), "it is not taken back");
            assert_eq!(lb.chat(ask(300).as_bytes()).await.status, 200);
        }
    });
}
