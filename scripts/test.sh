#!/usr/bin/env bash
# Formatting, clippy with warnings denied, and every test, on a machine that has a Rust toolchain, gcc and python3.
# Installs what is missing (scripts/need.sh) and sets up a real llama-server (tests/llama/setup.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export WEIGHBRIDGE_CACHE=${WEIGHBRIDGE_CACHE:-$PWD/target}
export PATH=$WEIGHBRIDGE_CACHE/tools/bin:$PATH

scripts/need.sh test
llama=$(tests/llama/setup.sh)
eval "$llama"

# One line a suite, for the summary: tests that count something worth telling write it here.
export WEIGHBRIDGE_TEST_COUNTS=$WEIGHBRIDGE_CACHE/test-counts
rm -rf "$WEIGHBRIDGE_TEST_COUNTS"
mkdir -p "$WEIGHBRIDGE_TEST_COUNTS"

cargo fmt --check
cargo clippy --locked --all-targets -- -D warnings

log=$WEIGHBRIDGE_CACHE/test.log
cargo test --locked --no-fail-fast 2>&1 | tee "$log"

echo
cat "$WEIGHBRIDGE_TEST_COUNTS"/* 2>/dev/null || true
awk '/^test result: / { passed += $4; failed += $6 } END { printf "%d passed, %d failed\n", passed, failed; exit failed > 0 || passed == 0 }' "$log"
