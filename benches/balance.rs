//! What choosing and booking costs: `cargo bench --bench balance`. The figures stand in `docs/performance.md`.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use futures::FutureExt;

use weighbridge::balance::selection::{Directory, PingoraPlacer, refresh};
use weighbridge::balance::{Admission, Ask, Balancer, Gate, Reservation, Settings};
use weighbridge::config::{Balance, BandSpec, Engine, PolicyName, QueueSpec, Regions, ReplicaSpec, ReplicaUrl};
use weighbridge::units::{Band, ManualClock, SystemClock, TenantName, Tokens};
use weighbridge::weigh::{EstimateSource, OutputEstimate};

fn spec(number: usize) -> ReplicaSpec {
    ReplicaSpec {
        id: format!("replica-{number}").into(),
        url: ReplicaUrl {
            https: false,
            h2c: false,
            host: "127.0.0.1".to_owned(),
            port: 8000,
            base_path: String::new(),
        },
        models: vec!["m".into()],
        gpu: None,
        quant: None,
        tokens_per_sec: 1000.0 + (number % 4) as f64 * 500.0,
        prefill_tokens_per_sec: None,
        max_context_tokens: Some(Tokens(128_000)),
        token_capacity: Some(Tokens(10_000_000)),
        max_sequences: 1024,
        region: None,
        engine: Engine::Auto,
        priority_scheduling: false,
        draining: false,
        api_key_file: None,
        tls: None,
        preserve_host: false,
    }
}

fn settings(policy: PolicyName) -> Settings {
    Settings {
        balance: Balance { policy, ..Balance::default() },
        bands: vec![BandSpec {
            queue: QueueSpec { requests: 1_000_000, wait: Duration::from_secs(1_000_000_000) },
            ..BandSpec::default()
        }],
        regions: Regions::default(),
    }
}

fn fleet(policy: PolicyName, replicas: usize) -> Arc<Balancer> {
    let balancer = Balancer::new(settings(policy), Arc::new(SystemClock::new()), 1);
    let specs: Vec<ReplicaSpec> = (0..replicas).map(spec).collect();
    balancer.apply(settings(policy), &specs);
    for replica in balancer.replicas().iter() {
        replica.set_gate(Gate::Open, Duration::ZERO);
    }
    balancer
}

/// The same, called through Pingora's load balancer.
fn through_pingora(balancer: &Arc<Balancer>) {
    let directory = Directory::new(balancer);
    let load_balancer = Arc::new(directory.load_balancer());
    refresh(&load_balancer, &directory).now_or_never().expect("nothing to wait for").expect("a static fleet");
    balancer.set_placer(Box::new(PingoraPlacer { load_balancer, directory }));
}

fn ask(prompt: u64, output: u64) -> Ask {
    Ask {
        model: "m".into(),
        prompt: Tokens(prompt),
        longest: Tokens(prompt),
        must_hold: Tokens(prompt),
        sequences: 1,
        output: OutputEstimate {
            mean: output as f64,
            p50: output,
            p90: output * 2,
            source: EstimateSource::ModelHistory,
            confidence: 0.8,
            tail: Arc::from([]),
        },
        max_tokens: None,
        band: Band(0),
        tenant: None,
        session: None,
        prefix: Arc::from([]),
        prefix_block_tokens: 0,
        stream: true,
        ttft_objective: None,
    }
}

/// `each` reservations on every replica.
fn loaded(balancer: &Arc<Balancer>, each: usize) -> Vec<Reservation> {
    let total = each * balancer.replicas().len();
    (0..total)
        .map(|n| balancer.place_directly(&Arc::new(ask(200 + (n % 7) as u64 * 100, 20 + (n % 11) as u64 * 60)), &[]))
        .map(|placed| placed.expect("there is room"))
        .collect()
}

/// `threads` threads share the iterations: the time for all of them.
fn shared(balancer: &Arc<Balancer>, threads: u64, iterations: u64) -> Duration {
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let ask = Arc::new(ask(300, 200));
                for _ in 0..iterations / threads {
                    drop(black_box(balancer.place(&ask, &[]).expect("there is room")));
                }
            });
        }
    });
    start.elapsed()
}

fn choose_and_book(c: &mut Criterion) {
    let mut group = c.benchmark_group("choose+book+release");
    for (policy, replicas) in [
        (PolicyName::LeastTokens, 16),
        (PolicyName::LeastTokens, 1024),
        (PolicyName::TokenLoad, 16),
        (PolicyName::TokenLoad, 1024),
    ] {
        let name = format!("{policy:?}/{replicas} replicas");
        let balancer = fleet(policy, replicas);
        let _load = loaded(&balancer, 16);
        group.bench_function(format!("{name}/1 thread"), |b| b.iter_custom(|n| shared(&balancer, 1, n)));
        group.bench_function(format!("{name}/2 threads"), |b| b.iter_custom(|n| shared(&balancer, 2, n)));
        through_pingora(&balancer);
        group.bench_function(format!("{name}/select_with/1 thread"), |b| b.iter_custom(|n| shared(&balancer, 1, n)));
        group.bench_function(format!("{name}/select_with/2 threads"), |b| b.iter_custom(|n| shared(&balancer, 2, n)));
    }
    group.finish();
}

fn score(c: &mut Criterion) {
    let mut group = c.benchmark_group("score, 64 reservations a replica");
    for replicas in [16, 1024] {
        let balancer = fleet(PolicyName::TokenLoad, replicas);
        let _load = loaded(&balancer, 64);
        let plain = ask(300, 200);
        group.bench_function(format!("{replicas} replicas"), |b| b.iter(|| balancer.cheapest(black_box(&plain))));
        let chain: Arc<[u64]> = (1..=2048u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        let long = Ask { prefix: chain.clone(), prefix_block_tokens: 16, ..ask(32_768, 200) };
        // Several replicas hold some of it.
        let _held: Vec<Reservation> = (0..6)
            .map(|n| Ask { prefix: chain[..(n + 1) * 300].into(), ..long.clone() })
            .map(|ask| balancer.place_directly(&Arc::new(ask), &[]).expect("there is room"))
            .collect();
        group.bench_function(format!("{replicas} replicas, 32k-token prompt's prefix"), |b| {
            b.iter(|| balancer.cheapest(black_box(&long)))
        });
    }
    group.finish();
}

fn queue(c: &mut Criterion) {
    let mut group = c.benchmark_group("queue");
    for waiting in [100, 100_000] {
        let balancer = Balancer::new(settings(PolicyName::TokenLoad), ManualClock::new(), 1);
        balancer.apply(settings(PolicyName::TokenLoad), &[ReplicaSpec { max_sequences: 1, ..spec(0) }]);
        balancer.replicas()[0].set_gate(Gate::Open, Duration::ZERO);
        let _running = balancer.place_directly(&Arc::new(ask(100, 100)), &[]).expect("it is idle");
        let asks: Vec<Arc<Ask>> = (0..1000)
            .map(|n| Arc::new(Ask { tenant: Some(TenantName::from(format!("tenant-{n}"))), ..ask(300, 200) }))
            .collect();
        let _tickets: Vec<Admission> =
            (0..waiting).map(|n| balancer.admit(asks[n % asks.len()].clone(), Box::new(drop))).collect();
        let mut turn = 0;
        group.bench_function(format!("enter and leave, {waiting} waiting"), |b| {
            b.iter(|| {
                turn += 1;
                drop(black_box(balancer.admit(asks[turn % asks.len()].clone(), Box::new(drop))));
            })
        });
    }
    // Served one by one: each release places the next in turn.
    group.bench_function("100,000 served, each", |b| {
        b.iter_custom(|n| {
            let n = n.clamp(1, 100_000);
            let balancer = Balancer::new(settings(PolicyName::TokenLoad), ManualClock::new(), 1);
            balancer.apply(settings(PolicyName::TokenLoad), &[ReplicaSpec { max_sequences: 1, ..spec(0) }]);
            balancer.replicas()[0].set_gate(Gate::Open, Duration::ZERO);
            let running = balancer.place_directly(&Arc::new(ask(100, 100)), &[]).expect("it is idle");
            let ask = Arc::new(ask(300, 200));
            let _tickets: Vec<Admission> = (0..100_000).map(|_| balancer.admit(ask.clone(), Box::new(drop))).collect();
            let start = Instant::now();
            drop(running);
            start.elapsed().mul_f64(n as f64 / 100_000.0)
        })
    });
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
    targets = choose_and_book, score, queue
}
criterion_main!(benches);
