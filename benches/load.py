#!/usr/bin/env python3
"""oha against the balancer before four simulated replicas of unequal speed, one policy after another.

Every policy gets fresh replicas, a fresh balancer and the same mix at the same open-loop rate: half short
classifications, chats, code, and a few very long prompts (the `article` mix of `weighbridge simulate`), many of them
declaring a max_tokens far above what they use. The table shows what the clients waited. All on loopback; every process
started here is ended here; a run is bounded by --seconds and --patience.

    make load
    make load LOAD_ARGS='--policies token-load,least-requests --load 0.9 --seconds 60 --json'
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

SPEEDS = [1.0, 1.0, 0.6, 0.3]

# Of the simulated engine (`weighbridge sim-replica`, speed 1): a step of BASE + SEQUENCE × sequences + CONTEXT × tokens
# of context, PREFILL for a prompt token, all in milliseconds.
BASE_MS, SEQUENCE_MS, CONTEXT_MS, PREFILL_MS, SEQUENCES = 18.0, 0.25, 0.0001, 0.06, 48

# (share, prompt tokens, output tokens, sigma of both, system text): medians of lognormals.
MIX = [
    (0.50, 50, 6, 0.3, "Answer with one label: positive, negative or neutral."),
    (0.365, 440, 400, 0.6, "You are a helpful assistant."),
    (0.13, 1350, 700, 0.6, "You write code. Answer with a code block."),
    (0.005, 32000, 3900, 0.3, "Summarise the document."),
]


def say(text):
    print(text, file=sys.stderr, flush=True)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_bodies(count, rng, stream):
    """Request bodies, and the mean milliseconds one takes of an engine of speed 1 that is busy with full batches."""
    words = "the balance of a token and its weight before every answer a model gives to you".split()
    bodies, cost_ms = [], 0.0
    kinds = rng.choices(MIX, [kind[0] for kind in MIX], k=count)
    for _, prompt_median, output_median, sigma, system in kinds:
        prompt = max(8, round(prompt_median * rng.lognormvariate(0, sigma)))
        output = max(1, round(output_median * rng.lognormvariate(0, sigma)))
        prompt = min(prompt, 100_000)
        body = {
            "model": "sim",
            "stream": stream,
            "messages": [
                {"role": "system", "content": system},
                # Common words are one token each.
                {"role": "user", "content": f"{rng.randrange(10**6)} " + " ".join(rng.choices(words, k=prompt))},
            ],
            "max_tokens": 4096 if rng.random() < 0.5 else min(4096, output * 2),
            "sim_output_tokens": output,
        }
        bodies.append(json.dumps(body))
        step_ms = BASE_MS / SEQUENCES + SEQUENCE_MS + CONTEXT_MS * (prompt + output / 2)
        cost_ms += PREFILL_MS * prompt * (1 + prompt / 2 / 32_768) + output * step_ms
    return bodies, cost_ms / count


class Processes:
    """Started processes; all are ended on leaving."""

    def __init__(self, log):
        self.running, self.log = [], open(log, "ab")

    def start(self, *command):
        self.running.append(
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.running:
            process.kill()
        for process in self.running:
            process.wait()
        self.log.close()


def wait_until_ready(url, seconds):
    until = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (OSError, urllib.error.URLError) as error:
            if time.monotonic() > until:
                raise SystemExit(f"{url} did not become ready within {seconds} s: {error}")
        time.sleep(0.1)


def run_policy(policy, options, bodies_file, rate, work):
    ports = [free_port() for _ in SPEEDS]
    listen, admin = free_port(), free_port()
    log = work / f"{policy}.log"
    config = {
        "listen": [{"address": f"127.0.0.1:{listen}"}],
        "admin": {"address": f"127.0.0.1:{admin}"},
        "models": [{"name": "sim", "tokenizer": options.tokenizer}],
        "replicas": [
            {
                "id": f"speed-{speed}-{index}",
                "url": f"http://127.0.0.1:{port}",
                "model": "sim",
                "engine": "vllm",
                "tokens_per_sec": round(900 * speed * options.speed),
                "max_context_tokens": 131072,
                "token_capacity": 256000,
                "max_sequences": SEQUENCES,
            }
            for index, (speed, port) in enumerate(zip(SPEEDS, ports))
        ],
        # Deep enough that nobody is refused: policies are compared by what clients wait.
        "bands": [{"name": "all", "share": 1.0, "queue": {"requests": 100000, "wait": "600s"}, "default": True}],
        "warmup": {"ramp": "1s"},
        "balance": {"policy": policy},
    }
    config_file = work / f"{policy}.yaml"
    config_file.write_text(json.dumps(config))  # JSON is YAML
    with Processes(log) as processes:
        for speed, port in zip(SPEEDS, ports):
            processes.start(
                options.binary, "sim-replica", "--listen", f"127.0.0.1:{port}",
                "--speed", str(speed * options.speed), "--max-sequences", str(SEQUENCES),
            )
        for port in ports:
            wait_until_ready(f"http://127.0.0.1:{port}/health", 20)
        processes.start(options.binary, "serve", "--config", str(config_file))
        wait_until_ready(f"http://127.0.0.1:{admin}/readyz", 30)
        time.sleep(1.5)  # the ramp of fresh replicas
        say(f"{policy}: {rate:.1f} requests/s for {options.seconds} s, then until the last is answered")
        command = [
            options.oha, "--no-tui", "--output-format", "json", "-z", f"{options.seconds}s", "-q", f"{rate:.3f}",
            "--latency-correction", "-w", "-c", str(options.connections), "-t", f"{options.patience}s",
            "-m", "POST", "-T", "application/json", "-Z", str(bodies_file),
            f"http://127.0.0.1:{listen}/v1/chat/completions",
        ]
        output = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=options.seconds + options.patience + 60
        )
        if output.returncode != 0:
            raise SystemExit(f"oha failed: {output.stderr.strip()}; logs in {log}")
        result = json.loads(output.stdout)
        with urllib.request.urlopen(f"http://127.0.0.1:{admin}/metrics", timeout=5) as answer:
            metrics = answer.read().decode()
    left = sum(
        float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("weighbridge_replica_projected_tokens{")
    )
    percentiles = result["latencyPercentiles"]
    statuses = result["statusCodeDistribution"]
    return {
        "policy": policy,
        "requests": sum(statuses.values()),
        "failed": sum(count for status, count in statuses.items() if status != "200")
        + sum(result["errorDistribution"].values()),
        "requests_per_s": result["summary"]["requestsPerSec"],
        "mean_s": result["summary"]["average"],
        "p50_s": percentiles["p50"],
        "p90_s": percentiles["p90"],
        "p99_s": percentiles["p99"],
        "booked_tokens_left": left,
    }


def main():
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=str(root / "target/release/weighbridge"))
    parser.add_argument("--oha", default="oha")
    parser.add_argument("--policies", default="round-robin,least-tokens,token-load")
    parser.add_argument("--load", type=float, default=0.8, help="share of what the fleet can finish (default 0.8)")
    parser.add_argument("--seconds", type=int, default=40, help="sending, per policy (default 40)")
    parser.add_argument("--patience", type=int, default=180, help="longest a request may take (default 180 s)")
    parser.add_argument("--speed", type=float, default=4.0, help="of all replicas, times 1, 1, 0.6 and 0.3 (default 4)")
    parser.add_argument("--connections", type=int, default=600)
    parser.add_argument("--stream", action="store_true", help="ask for streams; times are still to the last byte")
    parser.add_argument("--seed", type=int, default=1)
    tokenizer = root / "tests/data/smollm2"
    parser.add_argument("--tokenizer", default=str(tokenizer) if tokenizer.is_dir() else "approximate")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    bodies, cost_ms = make_bodies(2000, random.Random(options.seed), options.stream)
    rate = options.load * sum(SPEEDS) * options.speed * 1000 / cost_ms
    rows = []
    with tempfile.TemporaryDirectory(prefix="weighbridge-load-") as directory:
        work = Path(directory)
        bodies_file = work / "bodies.jsonl"
        bodies_file.write_text("\n".join(bodies) + "\n")
        for policy in options.policies.split(","):
            rows.append(run_policy(policy, options, bodies_file, rate, work))

    if options.json:
        print(json.dumps({"load": options.load, "rate": rate, "speeds": SPEEDS, "policies": rows}, indent=2))
    else:
        print(f"four replicas of speed 1, 1, 0.6, 0.3 (× {options.speed:g}), {rate:.1f} requests/s = {options.load:.0%} of capacity")
        print(f"{'policy':<16}{'requests':>9}{'failed':>8}{'mean s':>9}{'p50 s':>9}{'p90 s':>9}{'p99 s':>9}")
        for row in rows:
            print(
                f"{row['policy']:<16}{row['requests']:>9}{row['failed']:>8}{row['mean_s']:>9.2f}"
                f"{row['p50_s']:>9.2f}{row['p90_s']:>9.2f}{row['p99_s']:>9.2f}"
            )
    if any(row["failed"] or row["booked_tokens_left"] for row in rows):
        raise SystemExit("requests failed, or tokens stayed booked")


if __name__ == "__main__":
    os.environ.setdefault("LC_ALL", "C.UTF-8")
    main()
