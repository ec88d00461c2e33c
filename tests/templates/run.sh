#!/usr/bin/env bash
# Compares templates and counts of six model families with Python's transformers on 1,000 conversations.
# Needs python3 with venv, npm, and the package registries; keeps what it installs in CACHE (300 MB).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/weighbridge-templates}
python3 "$here/generate.py" "$cache"
cd "$here/../.."
WEIGHBRIDGE_TEMPLATES=$cache cargo test --test templates -- --nocapture
