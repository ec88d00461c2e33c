//! What weighing costs, all in (parse, render, split, count, estimate, prefix chain), beside a plain encode of the
//! same rendered text by the `tokenizers` library. One thread; medians.
//!
//!     cargo bench --bench weigh
//!     WEIGHBRIDGE_TEMPLATES=~/.cache/weighbridge-templates cargo bench --bench weigh     # after tests/templates/run.sh
//!
//! Without installed tokenizers SmolLM2's, which is in the repository, stands for all.

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use weighbridge::config::{
    Admin, Balance, BandSpec, Config, ContentFormat, Health, Limits, Model, OutputSettings, Regions, Retries, Scrape,
    Shutdown, TokenizerSource, Warmup,
};
use weighbridge::units::{ModelName, SystemClock, Tokens};
use weighbridge::weigh::estimate::{HistoryKey, OutputCaps, Task};
use weighbridge::weigh::{Histories, WeighHints, Weigher};
use weighbridge::wire::{Endpoint, ParseLimits, Request};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn model(name: &str, dir: &Path) -> Model {
    Model {
        name: ModelName::from(name),
        aliases: Vec::new(),
        adapters: Vec::new(),
        tokenizer: TokenizerSource::Directory(dir.to_owned()),
        chat_template: None,
        output: OutputSettings::default(),
        tokens_per_image: Tokens(765),
        content_format: ContentFormat::Auto,
        tools_with_choice_none: true,
    }
}

fn config(models: Vec<Model>) -> Config {
    Config {
        listen: Vec::new(),
        admin: Admin { address: ([127, 0, 0, 1], 0).into(), token_file: None },
        limits: Limits::default(),
        shutdown: Shutdown::default(),
        models,
        replicas: Vec::new(),
        replicas_file: None,
        discovery: None,
        regions: Regions::default(),
        bands: vec![BandSpec::default()],
        tenants: Vec::new(),
        health: Health::default(),
        scrape: Scrape::default(),
        warmup: Warmup::default(),
        retries: Retries::default(),
        balance: Balance::default(),
        answer_headers: true,
    }
}

/// Words of prose; with a name or a number of its own in every twelfth, no two texts are the same.
const WORDS: &str = "the lorry rolled onto weighbridge little after six in morning its tarpaulin still wet from crossing \
nobody office looked up they had seen a hundred like it and kettle was about to boil what makes queue fair some would \
say that whoever came first should be served computers many people at once have borrowed both ideas keep several give \
each share let wait for ever heavy rain is expected across northern valleys tonight gusts near ridge travellers allow \
extra time ferries between islands may cancelled short notice quarterly revenue grew driven mainly by subscription \
renewals segment operating margin declined slightly because restructuring charges currency effects management";

fn prose(rng: &mut SmallRng, bytes: usize) -> String {
    let words: Vec<&str> = WORDS.split_whitespace().collect();
    let mut text = String::with_capacity(bytes + 80);
    let mut line = 0u32;
    while text.len() < bytes {
        if rng.random_ratio(1, 12) {
            text.push_str(&format!("{}_{:x}", words.choose(rng).unwrap_or(&"name"), rng.random::<u16>()));
        } else {
            text.push_str(words.choose(rng).unwrap_or(&"word"));
        }
        line += 1;
        if line.is_multiple_of(14) {
            text.push_str(if rng.random_bool(0.3) { ".\n" } else { ", " });
        } else {
            text.push(' ');
        }
    }
    text
}

fn body(messages: &[(&str, String)]) -> Bytes {
    let messages: Vec<serde_json::Value> =
        messages.iter().map(|(role, text)| serde_json::json!({"role": role, "content": text})).collect();
    Bytes::from(serde_json::json!({"model": "m", "messages": messages, "max_tokens": 300, "stream": true}).to_string())
}

struct Bench {
    weigher: Arc<Weigher>,
    name: ModelName,
    rng: SmallRng,
}

/// Times of one kind of work, sorted.
struct Times(Vec<Duration>);

impl Times {
    fn median(&self) -> Duration {
        self.0[self.0.len() / 2]
    }

    fn low(&self) -> Duration {
        self.0[self.0.len() / 10]
    }
}

fn times(n: usize, mut work: impl FnMut() -> Duration) -> Times {
    let mut times: Vec<Duration> = (0..n).map(|_| work()).collect();
    times.sort();
    Times(times)
}

impl Bench {
    fn weigh(&self, body: Bytes) -> (Duration, u64, String) {
        let hints = WeighHints::default();
        let begun = Instant::now();
        let limits = ParseLimits { json_depth: 128 };
        let request = Request::parse(Endpoint::ChatCompletions, body, &limits).expect("a body made here");
        let weight = self.weigher.weigh_here(&self.name, &request, &hints).expect("a conversation made here");
        let spent = begun.elapsed();
        assert!(weight.prompt.exact());
        (spent, weight.prompt.tokens.0, self.weigher.rendered(&self.name, &request, &hints).unwrap_or_default())
    }

    /// A plain encode of the whole text, and the counting of it by known segments with 800 new bytes behind.
    fn plain(&self, text: &str, more: &str) -> (Duration, Duration) {
        let (_, loaded) = self.weigher.loaded(&self.name).expect("loaded");
        let tokenizer = loaded.tokenizer().expect("a tokenizer");
        let longer = format!("{text}{more}");
        let begun = Instant::now();
        black_box(tokenizer.count_cached(&longer, self.weigher.cache()));
        let counting = begun.elapsed();
        let begun = Instant::now();
        black_box(tokenizer.count(text));
        (begun.elapsed(), counting)
    }

    /// Weighs bodies of `make`, each after `before` was weighed, and prints a row.
    fn row(
        &mut self,
        what: &str,
        n: usize,
        claim: Option<Duration>,
        mut make: impl FnMut(&mut SmallRng) -> (Option<Bytes>, Bytes),
    ) {
        let mut tokens = 0;
        let (mut plain, mut counting) = (Vec::new(), Vec::new());
        let all = times(n, || {
            let (before, body) = make(&mut self.rng);
            if let Some(before) = before {
                self.weigh(before);
            }
            let (spent, counted, text) = self.weigh(body);
            tokens = counted;
            let more = prose(&mut self.rng, 800);
            let (whole, by_segments) = self.plain(&text, &more);
            plain.push(whole);
            counting.push(by_segments);
            spent
        });
        plain.sort();
        counting.sort();
        // Gemma's tokenizer splits no words and has thousands of added tokens; nothing is claimed of it.
        let claim = claim.filter(|_| self.name.as_str() != "gemma3");
        let claim = claim.map_or(String::new(), |claim| format!("  claim < {} µs", claim.as_micros()));
        println!(
            "{:<10} {:<46} {:>7} tokens  {:>8.1} µs (p10 {:>8.1})  known segments and 800 new bytes {:>6.1} µs  plain encode {:>8.1} µs{claim}",
            self.name,
            what,
            tokens,
            all.median().as_secs_f64() * 1e6,
            all.low().as_secs_f64() * 1e6,
            counting[counting.len() / 2].as_secs_f64() * 1e6,
            plain[plain.len() / 2].as_secs_f64() * 1e6,
        );
    }

    fn conversations(&mut self) {
        let micros = |n| Some(Duration::from_micros(n));
        self.row("new 200-token chat message", 400, micros(100), |rng| (None, body(&[("user", prose(rng, 800))])));
        // 15,000 tokens of which 20 turns were seen, and the last is new.
        for (what, turns, each, claim) in
            [("21 turns, 20 seen", 20, 3300, micros(300)), ("100k-token agent, one new turn", 80, 5600, micros(10_000))]
        {
            let mut seen = Vec::new();
            for i in 0..turns {
                seen.push((if usize::is_multiple_of(i, 2) { "user" } else { "assistant" }, prose(&mut self.rng, each)));
            }
            let before = body(&seen);
            let mut first = true;
            self.row(what, 100, claim, |rng| {
                let mut now = seen.clone();
                now.push(("user", prose(rng, 800)));
                let before = std::mem::take(&mut first).then(|| before.clone());
                (before, body(&now))
            });
        }
        self.row("cold 32k-token prompt", 30, micros(2000), |rng| (None, body(&[("user", prose(rng, 142_000))])));
        self.row("cold 128k-token prompt", 15, micros(8000), |rng| (None, body(&[("user", prose(rng, 570_000))])));
    }

    /// What a hundred agents cost that send a new turn each within the same second: every conversation is its own, and
    /// its first 80 turns were seen. CPU time of this thread, so that other load on the machine does not count.
    fn a_hundred_agents(&mut self) {
        let mut bodies = Vec::new();
        for _ in 0..100 {
            let mut turns: Vec<(&str, String)> =
                (0..80).map(|i| (if i % 2 == 0 { "user" } else { "assistant" }, prose(&mut self.rng, 5600))).collect();
            self.weigh(body(&turns));
            turns.push(("user", prose(&mut self.rng, 800)));
            bodies.push(body(&turns));
        }
        let hints = WeighHints::default();
        let begun = cpu_time();
        let mut tokens = 0;
        for body in bodies {
            let limits = ParseLimits { json_depth: 128 };
            let request = Request::parse(Endpoint::ChatCompletions, body, &limits).expect("a body made here");
            let weight = self.weigher.weigh_here(&self.name, &request, &hints).expect("a conversation made here");
            assert!(weight.prompt.exact());
            tokens += weight.prompt.tokens.0;
        }
        let spent = cpu_time() - begun;
        println!(
            "{:<10} 100 requests a second of agents, {} tokens each, one new turn: {:.1}% of a core  claim < 100%",
            self.name,
            tokens / 100,
            spent.as_secs_f64() * 100.0,
        );
    }

    fn hostile(&mut self) {
        for (what, text) in [
            ("1 MB of one letter", "a".repeat(1 << 20)),
            ("1 MB of spaces", " ".repeat(1 << 20)),
            ("1 MB of Han without breaks", "汉字系统测试内容".repeat((1 << 20) / 24)),
            ("1 MB of combining marks", "e\u{301}\u{302}".repeat((1 << 20) / 5)),
        ] {
            let mut i = 0;
            self.row(what, 3, None, |_| {
                i += 1;
                (None, body(&[("user", format!("{i}{text}"))]))
            });
        }
    }
}

/// CPU time of this thread, by Linux's scheduler.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("a Linux machine");
    Duration::from_nanos(stat.split(' ').next().and_then(|n| n.parse().ok()).expect("nanoseconds"))
}

fn estimates() {
    let histories = Histories::default();
    let key = HistoryKey { tenant: Some("t".into()), model: ModelName::from("m"), task: Task::Chat };
    let mut rng = SmallRng::seed_from_u64(1);
    for _ in 0..5000 {
        histories.observe(&key, rng.random_range(1..3000));
    }
    let caps = OutputCaps { max_tokens: Some(1000), ..OutputCaps::default() };
    const TURNS: u32 = 1000;
    let each = |work: &mut dyn FnMut()| {
        times(50, || {
            let begun = Instant::now();
            (0..TURNS).for_each(|_| work());
            begun.elapsed() / TURNS
        })
    };
    let estimate = each(&mut || {
        black_box(histories.estimate(&key, &caps));
    });
    let observe = each(&mut || histories.observe(&key, 500));
    println!("an output estimate {:?} (claim < 2 µs), learning an answer {:?}", estimate.median(), observe.median());
}

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let installed = std::env::var_os("WEIGHBRIDGE_TEMPLATES").map(PathBuf::from);
    let models = match &installed {
        Some(cache) => ["llama3", "qwen3", "gpt-oss", "gemma3"].map(|name| model(name, &cache.join(name))).to_vec(),
        None => vec![model("smollm2", &root.join("tests/data/smollm2"))],
    };
    let names: Vec<ModelName> = models.iter().map(|model| model.name.clone()).collect();
    let weigher = Weigher::new(&config(models), Arc::new(Histories::default()), None, Arc::new(SystemClock::new()));
    while !weigher.ready() {
        std::thread::sleep(Duration::from_millis(20));
    }
    for name in names {
        let mut bench = Bench { weigher: Arc::clone(&weigher), name, rng: SmallRng::seed_from_u64(42) };
        bench.conversations();
        bench.a_hundred_agents();
        bench.hostile();
    }
    estimates();
}
