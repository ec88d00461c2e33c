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

cargo fmt --check
cargo clippy --locked --all-targets -- -D warnings

log=$WEIGHBRIDGE_CACHE/test.log
failed=0
cargo test --locked --no-fail-fast 2>&1 | tee "$log" || failed=1

# What came of it, in a few lines at the end.
echo
grep -E '^(FAILED |test .* \.\.\. FAILED$|field cases: )' "$log" || true
awk '/^test result: / { passed += $4; failed += $6 } END { printf "%d passed, %d failed\n", passed, failed; exit failed > 0 || passed == 0 }' "$log"
exit "$failed"
