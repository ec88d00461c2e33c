#!/usr/bin/env python3
"""Makes the tables of docs/balancing.md: every mix, fleet and load, every policy, means over seeds.

    scripts/compare.py [--binary target/release/weighbridge] [--seeds 20] [--requests 3000] [--mix article,chat]
                       [--load 0.7,0.9] [--policy NAME,...] [-- further options of simulate]

Deterministic: the same seeds give the same table on every machine. In each cell the policies stand in the order given;
bold where the first is not above least requests, power of two and round robin.
"""

import argparse
import json
import subprocess
import sys

OTHERS = {"least-requests", "power-of-two", "round-robin"}
FIGURES = [("TTFT p99", "ttft_ms", "p99"), ("E2E mean", "e2e_ms", "mean"), ("E2E p99", "e2e_ms", "p99")]


def simulate(args, mix, fleet, load):
    command = [
        args.binary, "simulate", "--mix", mix, "--fleet", fleet, "--load", load, "--requests", str(args.requests),
        "--seeds", str(args.seeds), "--policy", args.policy, "--json", *args.further,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)["policies"]


def cell(policies, spread, figure):
    values = [policy[spread][figure] / 1000 for policy in policies]
    digits = 2 if max(values) < 10 else 1
    shown = [f"{value:.{digits}f}" for value in values]
    others = [value for policy, value in zip(policies, values) if policy["name"] in OTHERS]
    if others and values[0] <= min(others):
        shown[0] = f"**{shown[0]}**"
    return " / ".join(shown)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/weighbridge")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--mix", default="article,chat,agents,reasoning,tenants")
    parser.add_argument("--fleet", default="equal,unequal")
    parser.add_argument("--load", default="0.7,0.9")
    parser.add_argument("--policy", default="token-load,least-tokens,least-requests,power-of-two,round-robin,oracle")
    parser.add_argument("further", nargs="*", help="further options of simulate, after --")
    args = parser.parse_args()
    print("| mix | fleet, load | " + " | ".join(f"{name}, s" for name, _, _ in FIGURES) + " |")
    print("|---|---|" + "---|" * len(FIGURES))
    for mix in args.mix.split(","):
        for fleet in args.fleet.split(","):
            for load in args.load.split(","):
                policies = simulate(args, mix, fleet, load)
                cells = [cell(policies, spread, figure) for _, spread, figure in FIGURES]
                print(f"| {mix} | {fleet} {load} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
