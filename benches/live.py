#!/usr/bin/env python3
"""What a newcomer gets: the real `serve`, live, from a cold start, with nothing told and every setting at its default.

One trace of each cell (mix, fleet, load) is played over sockets by `simulate --live` before fresh simulated replicas,
some of which stream one token an event and some eight, against

  default         the balancer told nothing but the replicas' addresses
  told            the same, told every replica's speed, sequences and memory
  least-requests  the policy of that name, told nothing
  nginx           least_conn, where nginx is installed and --modes names it

and, on the virtual clock, by `simulate` itself ("predicted": the same trace, policy token-load, everything told). Replicas
and traffic are --pace times faster than real ones; times are reported in the traffic's own seconds. All on loopback;
every process started here is ended here.

    make live
    make live LIVE_ARGS='--mixes article --fleets unequal --loads 0.9 --seconds 120'

With --check the exit status says whether every cell keeps the bounds: default at most 1.10 times told, told at most 1.15
times predicted, and default never behind least-requests, each for E2E mean, E2E p99 and TTFT p99. A time to first token
below --floor seconds counts as that much: nobody waits for it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from load import Processes, free_port, say, wait_until_ready

FLEETS = {"equal": [1.0, 1.0, 1.0, 1.0], "unequal": [1.0, 1.0, 0.6, 0.3]}
# Requests that keep four replicas of speed 1 busy for ten minutes at 90% load (`Mix::usual_requests`).
TEN_MINUTES = {"article": 8000, "chat": 8000, "agents": 6000, "reasoning": 1500, "tenants": 8000}
# Of a simulated replica of speed 1 (`EngineShape::default`).
DECODE, PREFILL, SEQUENCES, KV_TOKENS, WINDOW = 909, 16_667, 48, 256_000, 131_072
FIGURES = ["mean", "e2e_p99", "ttft_p99"]
BOUNDS = {"told": 1.15, "default": 1.10}


def configuration(mode, listen, admin, ports, speeds, pace):
    replicas = [{"id": f"r{i + 1}", "url": f"http://127.0.0.1:{port}", "model": "sim"} for i, port in enumerate(ports)]
    if mode == "told":
        for replica, speed in zip(replicas, speeds):
            replica |= {
                "tokens_per_sec": round(DECODE * speed * pace),
                "prefill_tokens_per_sec": round(PREFILL * speed * pace),
                "max_sequences": SEQUENCES,
                "token_capacity": KV_TOKENS,
                "max_context_tokens": WINDOW,
            }
    config = {
        "listen": [{"address": f"127.0.0.1:{listen}"}],
        "admin": {"address": f"127.0.0.1:{admin}"},
        "models": [{"name": "sim", "tokenizer": "replica"}],
        "replicas": replicas,
    }
    if mode == "least-requests":
        config["balance"] = {"policy": "least-requests"}
    return json.dumps(config)  # JSON is YAML


def nginx_configuration(work, listen, ports):
    servers = " ".join(f"server 127.0.0.1:{port};" for port in ports)
    return f"""worker_processes 1; daemon off; pid {work}/nginx.pid; error_log {work}/nginx.log;
events {{ worker_connections 8192; }}
http {{ access_log off; client_body_temp_path {work}; proxy_temp_path {work}; fastcgi_temp_path {work};
  uwsgi_temp_path {work}; scgi_temp_path {work}; client_max_body_size 64m; client_body_buffer_size 4m;
  upstream replicas {{ least_conn; {servers} keepalive 256; }}
  server {{ listen 127.0.0.1:{listen} backlog=4096; location / {{ proxy_pass http://replicas; proxy_http_version 1.1;
    proxy_set_header Connection ""; proxy_buffering off; proxy_read_timeout 600s; }} }} }}
"""


def simulate(options, cell, *more):
    mix, fleet, load = cell
    speeds = FLEETS[fleet]
    requests = round(TEN_MINUTES[mix] * sum(speeds) / 4 * load / 0.9 * options.seconds / 600)
    command = [
        options.binary, "simulate", "--mix", mix, "--fleet", ",".join(map(str, speeds)), "--load", str(load),
        "--requests", str(requests), "--seed", str(options.seed), "--one-band", "--json", *more,
    ]
    output = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=3600)
    if output.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed: {output.stderr.strip()}")
    if output.stderr.strip():
        say(output.stderr.strip())
    row = json.loads(output.stdout)["policies"][0]
    return {
        "mean": row["e2e_ms"]["mean"] / 1000,
        "e2e_p99": row["e2e_ms"]["p99"] / 1000,
        "ttft_p50": row["ttft_ms"]["p50"] / 1000,
        "ttft_p99": row["ttft_ms"]["p99"] / 1000,
        "goodput": row["goodput"],
        "requests": row["requests"],
        "lost": row["refused"] + row["failed"],
    }


def play(options, cell, mode, work):
    speeds = FLEETS[cell[1]]
    ports, listen, admin = [free_port() for _ in speeds], free_port(), free_port()
    log = work / f"{'-'.join(map(str, cell))}-{mode}.log"
    with Processes(log) as processes:
        for i, (speed, port) in enumerate(zip(speeds, ports)):
            processes.start(
                options.binary, "sim-replica", "--listen", f"127.0.0.1:{port}", "--speed", str(speed * options.pace),
                "--tokens-per-event", str(options.events[i % len(options.events)]), "--seed", str(i + 1),
            )
        for port in ports:
            wait_until_ready(f"http://127.0.0.1:{port}/health", 20)
        file = work / f"{mode}.conf"
        if mode == "nginx":
            file.write_text(nginx_configuration(work, listen, ports))
            processes.start("nginx", "-c", str(file))
            wait_until_ready(f"http://127.0.0.1:{listen}/health", 20)
        else:
            file.write_text(configuration(mode, listen, admin, ports, speeds, options.pace))
            processes.start(options.binary, "serve", "--config", str(file))
            wait_until_ready(f"http://127.0.0.1:{admin}/readyz", 30)
        return simulate(options, cell, "--live", f"http://127.0.0.1:{listen}", "--pace", str(options.pace))


def floored(row, figure, floor):
    return max(row[figure], floor) if figure.startswith("ttft") else row[figure]


def judge(rows, floor):
    """What of a cell does not keep the bounds."""
    faults = []
    for mode, base in (("default", "told"), ("told", "predicted"), ("default", "least-requests")):
        if mode not in rows or base not in rows:
            continue
        bound = 1.0 if base == "least-requests" else BOUNDS[mode]
        for figure in FIGURES:
            ratio = floored(rows[mode], figure, floor) / max(floored(rows[base], figure, floor), 1e-9)
            # Against another policy a tie is no loss: the same run twice differs by some percent.
            if ratio > bound * (1.03 if base == "least-requests" else 1.0):
                faults.append(f"{mode} {figure} is {ratio:.2f} x {base} (at most {bound:.2f})")
    faults.extend(f"{mode}: {row['lost']} requests were not answered" for mode, row in rows.items() if row["lost"])
    return faults


def show(cells, modes):
    print("| mix | fleet | load | " + " | ".join(modes) + " |")
    print("|---" * (3 + len(modes)) + "|")
    for (mix, fleet, load), rows in cells:
        shown = []
        for mode in modes:
            row = rows[mode]
            lost = f", {row['lost']} lost" if row["lost"] else ""
            shown.append(f"{row['mean']:.1f} / {row['e2e_p99']:.0f} / {row['ttft_p99']:.2f}{lost}")
        print(f"| {mix} | {fleet} | {load:.0%} | " + " | ".join(shown) + " |")


def main():
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")
    parser.add_argument("--binary", default=str(root / "target/release/weighbridge"))
    parser.add_argument("--mixes", type=words, default=["article", "chat", "agents", "tenants"])
    parser.add_argument("--fleets", type=words, default=["equal", "unequal"])
    parser.add_argument("--loads", type=lambda text: [float(load) for load in words(text)], default=[0.6, 0.9])
    parser.add_argument("--modes", type=words, default=["default", "told", "least-requests"])
    parser.add_argument("--seconds", type=float, default=300, help="of traffic, in its own time (default 300)")
    parser.add_argument("--pace", type=float, default=5.0, help="times faster than real replicas (default 5)")
    parser.add_argument("--events", type=lambda text: [int(n) for n in words(text)], default=[8, 1],
                        help="tokens an event of the replicas in turn (default 8,1)")
    parser.add_argument("--floor", type=float, default=0.5, help="seconds to a first token that nobody minds (default 0.5)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound is not kept")
    options = parser.parse_args()
    if "nginx" in options.modes and not shutil.which("nginx"):
        raise SystemExit("nginx is not installed: leave it out of --modes, or install it (Debian: nginx-light)")

    modes = ["predicted", *options.modes]
    order = [(mix, fleet, load) for mix in options.mixes for fleet in options.fleets for load in options.loads]
    cells, faults = [], []
    with tempfile.TemporaryDirectory(prefix="weighbridge-live-") as directory:
        work = Path(directory)
        for number, cell in enumerate(order, 1):
            rows = {"predicted": simulate(options, cell, "--policy", "token-load")}
            for mode in options.modes:
                say(f"cell {number} of {len(order)}: {cell[0]}, {cell[1]} fleet, load {cell[2]:.0%}: {mode}")
                rows[mode] = play(options, cell, mode, work)
            cells.append((cell, rows))
            faults.extend(f"{cell[0]} {cell[1]} {cell[2]:.0%}: {fault}" for fault in judge(rows, options.floor))

    if options.json:
        rows = [{"mix": c[0], "fleet": c[1], "load": c[2], **rows} for c, rows in cells]
        print(json.dumps({"pace": options.pace, "seconds": options.seconds, "cells": rows, "faults": faults}, indent=2))
    else:
        print("E2E mean / E2E p99 / TTFT p99, in seconds of the traffic")
        show(cells, modes)
        for fault in faults:
            print(fault)
    if options.check and faults:
        raise SystemExit(1)


if __name__ == "__main__":
    os.environ.setdefault("LC_ALL", "C.UTF-8")
    main()
