//! Coverage, adaptation, restarts and traces.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::config::{Model, OutputSettings, TokenizerSource};
use crate::units::{ModelName, TenantName};

fn key(task: Task) -> HistoryKey {
    HistoryKey { tenant: None, model: ModelName::from("m"), task }
}

/// Log-normal lengths: the shape of published traces.
fn length(rng: &mut SmallRng, median: f64, sigma: f64) -> u64 {
    let (u, v): (f64, f64) = (rng.random_range(1e-12..1.0), rng.random());
    let normal = (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos();
    ((median * (sigma * normal).exp()) as u64).clamp(1, 1_000_000)
}

/// Share of answers at or below the predicted p90, over `answers` of them.
fn coverage(h: &Histories, key: &HistoryKey, rng: &mut SmallRng, median: f64, sigma: f64, answers: usize) -> f64 {
    let mut under = 0;
    for _ in 0..answers {
        let predicted = h.estimate(key, &OutputCaps::default());
        let actual = length(rng, median, sigma);
        under += usize::from(actual <= predicted.p90);
        h.settle(key, &predicted, actual);
    }
    under as f64 / answers as f64
}

#[test]
fn p90_covers_85_to_95_percent_after_500_answers_a_task_and_again_1000_after_a_shift() {
    let mut rng = SmallRng::seed_from_u64(7);
    let histories = Histories::default();
    let tasks = [(Task::Chat, 250.0, 1.0), (Task::Code, 700.0, 0.8), (Task::Reasoning, 2500.0, 1.2)];
    for (task, median, sigma) in tasks {
        coverage(&histories, &key(task), &mut rng, median, sigma, 500);
        let settled = coverage(&histories, &key(task), &mut rng, median, sigma, 1500);
        println!("{task:?}: p90 covers {:.1}% of 1,500 answers after the first 500", settled * 100.0);
        assert!((0.85..=0.95).contains(&settled), "{task:?}: {settled}");
    }
    for (task, median, sigma) in tasks {
        coverage(&histories, &key(task), &mut rng, median * 4.0, sigma, 1000);
        let recovered = coverage(&histories, &key(task), &mut rng, median * 4.0, sigma, 1000);
        println!("{task:?}: {:.1}% from 1,000 answers after they became four times as long", recovered * 100.0);
        assert!((0.85..=0.95).contains(&recovered), "{task:?} longer: {recovered}");
        coverage(&histories, &key(task), &mut rng, median / 3.0, sigma, 1000);
        let recovered = coverage(&histories, &key(task), &mut rng, median / 3.0, sigma, 1000);
        println!("{task:?}: {:.1}% from 1,000 answers after they became a twelfth as long", recovered * 100.0);
        assert!((0.85..=0.95).contains(&recovered), "{task:?} shorter: {recovered}");
    }
}

#[test]
fn answers_that_end_at_one_cap_are_all_under_the_prediction() {
    let histories = Histories::default();
    for i in 0..500u32 {
        histories.observe(&key(Task::Chat), if i.is_multiple_of(4) { 32_000 } else { 500 });
    }
    assert!(histories.estimate(&key(Task::Chat), &OutputCaps::default()).p90 >= 32_000);
}

#[test]
fn a_shifting_mix_of_tasks_moves_no_task_s_own_history() {
    let mut rng = SmallRng::seed_from_u64(11);
    let histories = Histories::default();
    let mut under = [0usize; 2];
    let mut answers = [0usize; 2];
    for i in 0..6000 {
        // The share of code falls from nine tenths to one tenth on the way.
        let code = rng.random::<f64>() < 0.9 - 0.8 * f64::from(i) / 6000.0;
        let (task, median) = if code { (Task::Code, 900.0) } else { (Task::Classification, 60.0) };
        let predicted = histories.estimate(&key(task), &OutputCaps::default());
        let actual = length(&mut rng, median, 0.9);
        let which = usize::from(code);
        if histories.samples(&ModelName::from("m"), Some(task), None) >= 500 {
            answers[which] += 1;
            under[which] += usize::from(actual <= predicted.p90);
        }
        histories.settle(&key(task), &predicted, actual);
    }
    for which in 0..2 {
        let share = under[which] as f64 / answers[which] as f64;
        println!("shifting mix, {}: {:.1}%", ["classification", "code"][which], share * 100.0);
        assert!((0.85..=0.95).contains(&share), "{which}: {share}");
    }
}

#[test]
fn the_best_history_with_enough_answers_is_used() {
    let histories = Histories::default();
    let legal = HistoryKey { tenant: Some(TenantName::from("legal")), ..key(Task::Chat) };
    let source = |key: &HistoryKey| histories.estimate(key, &OutputCaps::default()).source;
    assert_eq!(source(&legal), EstimateSource::Heuristic);
    for _ in 0..99 {
        histories.observe(&legal, 40);
    }
    assert_eq!(source(&legal), EstimateSource::Heuristic);
    histories.observe(&key(Task::Chat), 40);
    assert_eq!(source(&legal), EstimateSource::TaskHistory);
    assert_eq!(source(&key(Task::Code)), EstimateSource::ModelHistory);
    histories.observe(&legal, 40);
    assert_eq!(source(&legal), EstimateSource::TenantHistory);
    let estimate = histories.estimate(&legal, &OutputCaps::default());
    assert_eq!((estimate.p50, estimate.p90, estimate.confidence), (40, 40, 0.8));
}

#[test]
fn ignore_eos_is_exact_and_min_tokens_floors() {
    let histories = Histories::default();
    let caps = OutputCaps { max_tokens: Some(77), ignore_eos: true, ..OutputCaps::default() };
    assert_eq!(histories.estimate(&key(Task::Chat), &caps), OutputEstimate::exact(77));
    let caps = OutputCaps { min_tokens: 5000, ..OutputCaps::default() };
    let estimate = histories.estimate(&key(Task::Classification), &caps);
    assert!(estimate.mean >= 5000.0 && estimate.p50 >= 5000);
    let caps = OutputCaps { window_left: Some(0), ..OutputCaps::default() };
    assert_eq!(histories.estimate(&key(Task::Chat), &caps).mean, 0.0);
}

#[test]
fn calibration_counts_what_fell_under_the_predictions() {
    let histories = Histories::default();
    let predicted = OutputEstimate { p50: 10, p90: 20, ..OutputEstimate::exact(10) };
    for actual in [5, 10, 15, 25] {
        histories.settle(&key(Task::Chat), &predicted, actual);
    }
    let calibration = &histories.calibration()[0];
    assert_eq!((calibration.answers, calibration.under_p50, calibration.under_p90), (4, 2, 3));
    assert_eq!(calibration.ratios.iter().sum::<u64>(), 4);
}

fn model(path: &std::path::Path) -> Model {
    Model {
        name: ModelName::from("m"),
        aliases: Vec::new(),
        adapters: Vec::new(),
        tokenizer: TokenizerSource::Approximate,
        chat_template: None,
        output: OutputSettings { percentile: 90, history: Some(path.to_owned()) },
        tokens_per_image: crate::units::Tokens(765),
        content_format: crate::config::ContentFormat::Auto,
        tools_with_choice_none: true,
    }
}

#[test]
fn histories_survive_a_restart_and_a_damaged_file_is_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let models = [model(&dir.path().join("state").join("m.json"))];
    let before = Histories::default();
    let mut rng = SmallRng::seed_from_u64(3);
    for _ in 0..300 {
        before.observe(
            &HistoryKey { tenant: Some(TenantName::from("t")), ..key(Task::Code) },
            length(&mut rng, 400.0, 1.0),
        );
    }
    before.save(&models).unwrap();
    let after = Histories::default();
    after.load(&models);
    // The last curve before the restart was drawn a few answers earlier than the one after it.
    let read = |h: &Histories| h.estimate(&key(Task::Code), &OutputCaps::default());
    let (left, right) = (read(&before), read(&after));
    assert_eq!(right.source, EstimateSource::TaskHistory);
    assert!((left.mean / right.mean - 1.0).abs() < 0.1, "{} {}", left.mean, right.mean);
    let path = models[0].output.history.clone().unwrap();
    let text = std::fs::read(&path).unwrap();
    std::fs::write(&path, &text[..text.len() / 2]).unwrap();
    let damaged = Histories::default();
    damaged.load(&models);
    assert_eq!(read(&damaged).source, EstimateSource::Heuristic);
}

#[test]
fn traces_of_each_known_shape_teach() {
    let learn = |text: &str| {
        let histories = Histories::default();
        let learned = learn::learn(&histories, &ModelName::from("m"), text.as_bytes());
        (histories, learned)
    };
    let (h, learned) = learn(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50.95,396,109\n",
    );
    assert_eq!(learned.unwrap().answers, 2);
    assert_eq!(h.samples(&ModelName::from("m"), Some(Task::Chat), None), 2);
    let (_, learned) = learn(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n",
    );
    assert_eq!(learned.unwrap(), learn::Learned { answers: 1, skipped: 1 });
    let (h, learned) = learn(
        "{\"model\":\"m\",\"task\":\"code\",\"tenant\":\"legal\",\"output_tokens\":50,\"outcome\":\"completed\"}\n{\"model\":\"other\",\"output_tokens\":9}\n{\"model\":\"m\",\"output_tokens\":9,\"outcome\":\"client_gone\"}\nnot json\n",
    );
    assert_eq!(learned.unwrap(), learn::Learned { answers: 1, skipped: 3 });
    assert_eq!(h.samples(&ModelName::from("m"), Some(Task::Code), Some(&TenantName::from("legal"))), 1);
    let (_, learned) = learn("a,b\n1,2\n");
    assert!(learned.unwrap_err().contains("no column of output tokens"));
}

#[test]
fn what_remains_is_read_between_the_tail_s_points() {
    let tail = Arc::from([(0, 100.0), (100, 80.0), (200, 200.0)]);
    let estimate = OutputEstimate { tail, ..OutputEstimate::exact(100) };
    assert_eq!(estimate.remaining(0), 100.0);
    assert_eq!(estimate.remaining(50), 90.0);
    assert_eq!(estimate.remaining(150), 140.0);
    assert_eq!(estimate.remaining(5000), 200.0);
}

#[test]
fn an_exact_answer_has_nothing_left_at_its_end() {
    let estimate = OutputEstimate::exact(40);
    assert_eq!(estimate.remaining(10), 30.0);
    assert_eq!(estimate.remaining(40), 0.0);
    assert_eq!(estimate.remaining(41), 0.0);
}
