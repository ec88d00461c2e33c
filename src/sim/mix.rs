//! Built-in traffic: what is asked, how long the answers truly are, and who follows whom.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::draw::{exponential, lognormal, normal};
use super::engine::{BLOCK_TOKENS, EngineShape};
use crate::units::Band;
use crate::weigh::estimate::Task;

/// One request to come. Its true output length is known to the simulated engine and to the oracle alone.
#[derive(Clone, Debug, PartialEq)]
pub struct SimRequest {
    /// Seconds from the start at which it arrives, or, with `after`, would arrive if nothing held it up.
    pub at: f64,
    /// Index of the request whose answer it needs: it arrives no sooner than `think` seconds after that one ended.
    pub after: Option<usize>,
    /// Seconds between that answer and this request.
    pub think: f64,
    /// Prompt tokens.
    pub prompt: u32,
    /// Tokens of the answer.
    pub output: u32,
    /// What the client declares as `max_tokens`.
    pub max_tokens: Option<u32>,
    pub task: Task,
    /// An index into the bands of the run.
    pub band: Band,
    pub tenant: Option<&'static str>,
    pub session: Option<u64>,
    pub prefix: Prefix,
}

/// What a prompt's leading blocks are, without listing them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prefix {
    /// Names the part shared between conversations (a system prompt, a set of tools).
    pub shared: u64,
    /// Its length in tokens.
    pub shared_tokens: u32,
    /// Names the conversation.
    pub own: u64,
    /// Tokens that an earlier turn of the conversation holds: what a warm cache would not compute again.
    pub earlier_tokens: u32,
}

impl Prefix {
    /// Chained hashes of the whole blocks of `tokens` tokens.
    pub fn hashes(&self, tokens: u32) -> Arc<[u64]> {
        let shared = self.shared_tokens / BLOCK_TOKENS;
        (0..tokens / BLOCK_TOKENS)
            .map(|i| mix64(if i < shared { self.shared } else { self.own }, u64::from(i)))
            .collect()
    }
}

fn mix64(seed: u64, i: u64) -> u64 {
    let mut z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ i.wrapping_add(1).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The built-in mixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mix {
    /// Half 50-token classifications, the rest chat, code, and a few 32k-token completions; half of the clients
    /// declare `max_tokens` 4,096 whatever they need.
    Article,
    /// Multi-turn conversations over a few shared system prompts.
    Chat,
    /// Tool loops: very long prompts that grow a little each turn, short answers.
    Agents,
    /// Short prompts, heavy-tailed answers.
    Reasoning,
    /// Interactive tenants beside a batch tenant's flood.
    Tenants,
    /// The article's mix with shorter answers, so that half a minute shows it.
    Demo,
}

impl Mix {
    /// All of them.
    pub const ALL: [Mix; 6] = [Mix::Article, Mix::Chat, Mix::Agents, Mix::Reasoning, Mix::Tenants, Mix::Demo];

    /// As written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Mix::Article => "article",
            Mix::Chat => "chat",
            Mix::Agents => "agents",
            Mix::Reasoning => "reasoning",
            Mix::Tenants => "tenants",
            Mix::Demo => "demo",
        }
    }

    /// Requests that keep a fleet of four busy for about ten minutes at 90% load.
    pub fn usual_requests(self) -> usize {
        match self {
            Mix::Article => 8_000,
            Mix::Chat => 8_000,
            Mix::Agents => 6_000,
            Mix::Reasoning => 1_500,
            Mix::Tenants => 8_000,
            Mix::Demo => 20_000,
        }
    }
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Mix {
    type Err = String;

    fn from_str(text: &str) -> Result<Mix, String> {
        Mix::ALL
            .into_iter()
            .find(|m| m.name() == text)
            .ok_or_else(|| format!("unknown mix `{text}`: expected one of {}", Mix::ALL.map(Mix::name).join(", ")))
    }
}

/// How much of which traffic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Traffic {
    pub mix: Mix,
    pub requests: usize,
    pub seed: u64,
    /// Share of what the fleet can finish.
    pub load: f64,
    /// Of the mix `tenants`: the batch tenant's load by itself, the interactive tenants keeping their part of `load`.
    pub flood: Option<f64>,
}

/// The interactive tenants' part of the load in the mix `tenants`.
pub const INTERACTIVE_PART: f64 = 0.4;

/// Work of `requests` on one engine of speed 1, in seconds of that engine when it is busy and every prefix is reused.
pub fn work_seconds(shape: &EngineShape, requests: &[SimRequest]) -> f64 {
    let shape = EngineShape { speed: 1.0, ..shape.clone() };
    let batch = saturated_batch(&shape, requests);
    requests.iter().map(|r| cost(&shape, batch, r)).sum()
}

/// Sequences that a busy engine runs at a time: all of its places, or as many as memory holds.
fn saturated_batch(shape: &EngineShape, requests: &[SimRequest]) -> f64 {
    let (mut held, mut tokens) = (0.0, 0.0);
    for r in requests {
        // A shared system prompt is held once for all.
        let own = r.prompt - r.prefix.shared_tokens.min(r.prompt);
        held += f64::from(r.output) * (f64::from(own) + f64::from(r.output) / 2.0);
        tokens += f64::from(r.output);
    }
    (shape.kv_tokens() as f64 / (held / f64::max(tokens, 1.0))).clamp(1.0, f64::from(shape.max_sequences))
}

fn cost(shape: &EngineShape, batch: f64, r: &SimRequest) -> f64 {
    let context = f64::from(r.prompt) + f64::from(r.output) / 2.0;
    let cached = r.prefix.earlier_tokens.min(r.prompt);
    let step = (shape.base_ms / batch + shape.sequence_ms + shape.context_ms * context) / 1000.0;
    shape.prefill_seconds(cached, r.prompt) + f64::from(r.output) * step
}

/// Draws a mix's requests, in order of arrival, at a load of a fleet whose speeds add up to `speeds`.
pub fn generate(traffic: &Traffic, shape: &EngineShape, speeds: f64) -> Vec<SimRequest> {
    let mut rng = SmallRng::seed_from_u64(traffic.seed.wrapping_mul(0x5851_f42d_4c95_7f2d) ^ traffic.mix as u64);
    let wanted = traffic.requests.max(1);
    match traffic.mix {
        Mix::Article => {
            let requests = one_shots(wanted, &mut rng, article);
            spread(&mut rng, requests, traffic.load, shape, speeds)
        }
        Mix::Demo => {
            let requests = one_shots(wanted, &mut rng, demo);
            spread(&mut rng, requests, traffic.load, shape, speeds)
        }
        Mix::Reasoning => {
            let requests = one_shots(wanted, &mut rng, reasoning);
            spread(&mut rng, requests, traffic.load, shape, speeds)
        }
        Mix::Chat => spread_sessions(&mut rng, wanted, &CHAT, traffic.load, shape, speeds),
        Mix::Agents => spread_sessions(&mut rng, wanted, &AGENTS, traffic.load, shape, speeds),
        Mix::Tenants => tenants(&mut rng, traffic, shape, speeds),
    }
}

fn one_shots(count: usize, rng: &mut SmallRng, one: fn(&mut SmallRng) -> SimRequest) -> Vec<SimRequest> {
    (0..count)
        .map(|_| {
            let mut request = one(rng);
            request.prefix.own = rng.random();
            request
        })
        .collect()
}

/// Gives requests Poisson arrivals over the time in which the fleet would have that load.
fn spread(
    rng: &mut SmallRng,
    mut requests: Vec<SimRequest>,
    load: f64,
    shape: &EngineShape,
    speeds: f64,
) -> Vec<SimRequest> {
    let seconds = work_seconds(shape, &requests) / (load * speeds);
    let mut at: Vec<f64> = requests.iter().map(|_| rng.random::<f64>() * seconds).collect();
    at.sort_by(f64::total_cmp);
    requests.iter_mut().zip(at).for_each(|(r, at)| r.at = at);
    requests
}

fn request(prompt: u32, output: u32, task: Task) -> SimRequest {
    SimRequest {
        at: 0.0,
        after: None,
        think: 0.0,
        prompt,
        output,
        max_tokens: None,
        task,
        band: Band(0),
        tenant: None,
        session: None,
        prefix: Prefix::default(),
    }
}

/// The longest prompt and answer drawn, so that any of them fits a window of 131,072.
const PROMPT_MAX: u32 = 100_000;
const OUTPUT_MAX: u32 = 16_384;
/// What many clients declare as `max_tokens`, whatever they need.
const DECLARED: u32 = 4_096;

/// Of a kind of request: its part of all, median and σ of prompt and answer, task.
type Kind = (f64, (f64, f64), (f64, f64), Task);

const ARTICLE: [Kind; 4] = [
    (0.5, (50.0, 0.3), (6.0, 0.3), Task::Classification),
    (0.365, (440.0, 0.6), (400.0, 0.6), Task::Chat),
    (0.13, (1_350.0, 0.5), (700.0, 0.5), Task::Code),
    (0.005, (32_000.0, 0.3), (3_900.0, 0.3), Task::Summary),
];

const DEMO: [Kind; 4] = [
    (0.5, (50.0, 0.3), (6.0, 0.3), Task::Classification),
    (0.365, (300.0, 0.6), (100.0, 0.6), Task::Chat),
    (0.12, (900.0, 0.5), (180.0, 0.5), Task::Code),
    (0.015, (9_000.0, 0.3), (450.0, 0.3), Task::Summary),
];

fn article(rng: &mut SmallRng) -> SimRequest {
    of_kinds(rng, &ARTICLE)
}

fn demo(rng: &mut SmallRng) -> SimRequest {
    of_kinds(rng, &DEMO)
}

fn of_kinds(rng: &mut SmallRng, kinds: &[Kind]) -> SimRequest {
    let mut place: f64 = rng.random();
    let declares = rng.random_bool(0.5);
    let kind = kinds.iter().find(|kind| {
        place -= kind.0;
        place < 0.0
    });
    let &(_, prompt, output, task) = kind.unwrap_or(&kinds[0]);
    let mut r =
        request(lognormal(rng, prompt.0, prompt.1, PROMPT_MAX), lognormal(rng, output.0, output.1, OUTPUT_MAX), task);
    if declares {
        r.max_tokens = Some(DECLARED);
        r.output = r.output.min(DECLARED);
    }
    r
}

fn reasoning(rng: &mut SmallRng) -> SimRequest {
    request(lognormal(rng, 150.0, 0.7, PROMPT_MAX), lognormal(rng, 1_500.0, 1.0, OUTPUT_MAX), Task::Reasoning)
}

/// What conversations of one kind are like: medians and σ of lognormals, in tokens, and means in turns and seconds.
struct Conversation {
    shared: &'static [u32],
    opening: (f64, f64),
    turn: (f64, f64),
    answer: (f64, f64),
    turns: f64,
    think: f64,
    task: Task,
}

const CHAT: Conversation = Conversation {
    shared: &[256, 640, 1_024, 1_792],
    opening: (120.0, 0.9),
    turn: (60.0, 0.8),
    answer: (280.0, 0.7),
    turns: 6.0,
    think: 20.0,
    task: Task::Chat,
};

const AGENTS: Conversation = Conversation {
    shared: &[4_096, 6_144],
    opening: (3_500.0, 0.8),
    turn: (450.0, 0.9),
    answer: (60.0, 0.7),
    turns: 8.0,
    think: 1.5,
    task: Task::Tools,
};

/// Turns of one conversation, with their times counted from its start.
fn conversation(rng: &mut SmallRng, kind: &Conversation, out: &mut Vec<SimRequest>, room: usize) {
    let session: u64 = rng.random();
    let shared = rng.random_range(0..kind.shared.len());
    let shared_tokens = kind.shared[shared];
    // Users differ: a terse one's answers are short throughout.
    let habit = (0.3 * normal(rng)).exp();
    let turns = 1 + exponential(rng, kind.turns - 0.5) as usize;
    let mut context = shared_tokens;
    let mut at = 0.0;
    let first = out.len();
    for turn in 0..turns.min(room) {
        let (median, sigma) = if turn == 0 { kind.opening } else { kind.turn };
        let earlier = context;
        context += lognormal(rng, median, sigma, 30_000);
        let output = lognormal(rng, kind.answer.0 * habit, kind.answer.1, 4_096);
        if context + output > PROMPT_MAX {
            break;
        }
        let think = if turn == 0 { 0.0 } else { exponential(rng, kind.think) };
        at += think;
        out.push(SimRequest {
            at,
            after: (turn > 0).then(|| first + turn - 1),
            think,
            session: Some(session),
            prefix: Prefix {
                shared: shared as u64 + 1,
                shared_tokens,
                own: session,
                earlier_tokens: earlier / BLOCK_TOKENS * BLOCK_TOKENS,
            },
            ..request(context, output, kind.task)
        });
        context += output;
        // An unhurried answer's time: what a lightly loaded engine takes.
        at += 0.1 + f64::from(output) * 0.022;
    }
}

/// Conversations that start evenly over the time in which the fleet would have that load. The last ones go on past
/// it, and the first ones find cold caches, as after a deployment.
fn spread_sessions(
    rng: &mut SmallRng,
    wanted: usize,
    kind: &Conversation,
    load: f64,
    shape: &EngineShape,
    speeds: f64,
) -> Vec<SimRequest> {
    let mut all = Vec::with_capacity(wanted);
    let mut bounds = Vec::new();
    while all.len() < wanted {
        let from = all.len();
        conversation(rng, kind, &mut all, wanted - from);
        bounds.push((from, all.len()));
    }
    let seconds = work_seconds(shape, &all) / (load * speeds);
    for (from, to) in bounds {
        let start = rng.random::<f64>() * seconds;
        all[from..to].iter_mut().for_each(|r| r.at += start);
    }
    in_order(all)
}

/// Sorts by arrival and renames `after` accordingly.
fn in_order(requests: Vec<SimRequest>) -> Vec<SimRequest> {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by(|&a, &b| requests[a].at.total_cmp(&requests[b].at).then(a.cmp(&b)));
    let mut place = vec![0; order.len()];
    for (new, &old) in order.iter().enumerate() {
        place[old] = new;
    }
    let mut sorted: Vec<SimRequest> = order.iter().map(|&old| requests[old].clone()).collect();
    for r in &mut sorted {
        r.after = r.after.map(|old| place[old]);
    }
    sorted
}

fn interactive(rng: &mut SmallRng) -> SimRequest {
    const TENANTS: [&str; 3] = ["legal", "support", "search"];
    let tenant = TENANTS[rng.random_range(0..TENANTS.len())];
    let r = request(lognormal(rng, 400.0, 0.7, PROMPT_MAX), lognormal(rng, 180.0, 0.6, OUTPUT_MAX), Task::Chat);
    SimRequest { tenant: Some(tenant), ..r }
}

fn batch(rng: &mut SmallRng) -> SimRequest {
    let r = request(lognormal(rng, 2_000.0, 0.5, PROMPT_MAX), lognormal(rng, 350.0, 0.4, OUTPUT_MAX), Task::Summary);
    SimRequest { tenant: Some("nightly"), band: Band(1), ..r }
}

fn tenants(rng: &mut SmallRng, traffic: &Traffic, shape: &EngineShape, speeds: f64) -> Vec<SimRequest> {
    let calm = INTERACTIVE_PART * traffic.load;
    let flood = traffic.flood.unwrap_or(traffic.load - calm);
    // Both parts over the same time: their numbers follow from their mean work.
    let sample = |rng: &mut SmallRng, one: fn(&mut SmallRng) -> SimRequest| {
        let requests = one_shots(1_000, rng, one);
        work_seconds(shape, &requests) / 1_000.0
    };
    // One stream of draws for each part: the interactive requests are the same with any flood.
    let (mut calm_rng, mut flood_rng) = (SmallRng::seed_from_u64(rng.random()), SmallRng::seed_from_u64(rng.random()));
    let per_second = calm * speeds / sample(&mut calm_rng, interactive);
    let flood_per_second = flood * speeds / sample(&mut flood_rng, batch);
    let usual = (traffic.load - calm) * speeds / sample(&mut flood_rng, batch);
    let seconds = traffic.requests as f64 / (per_second + usual);
    let count = |rate: f64| (rate * seconds).round() as usize;
    let requests = one_shots(count(per_second).max(1), &mut calm_rng, interactive);
    let mut all = spread(&mut calm_rng, requests, calm, shape, speeds);
    if flood > 0.0 {
        let requests = one_shots(count(flood_per_second).max(1), &mut flood_rng, batch);
        all.extend(spread(&mut flood_rng, requests, flood, shape, speeds));
    }
    in_order(all)
}

#[cfg(test)]
mod tests;
