#!/usr/bin/env bash
# Installs what this machine lacks for a task, and says what it does: scripts/need.sh build|test|load|fuzz|deb|deny ...
#
# Assumed: Debian or a relative, a Rust toolchain, python3 with pip. As root missing packages are installed; as another
# user they are named, with the command that installs them. Tools that Cargo builds go into a cache of our own.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${WEIGHBRIDGE_CACHE:-$root/target}
tools=$cache/tools
PATH=$tools/bin:$PATH

say() { echo "need: $*" >&2; }
fail() { say "$*"; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

apt_updated=
apt_update() {
  [ -z "$apt_updated" ] || return 0
  apt_updated=yes
  if [ "$(id -u)" = 0 ]; then apt-get -qq update >&2 || say "apt-get update failed; going on with the lists at hand"; fi
}

# Debian packages for what is missing, in one go.
apt_need() {
  [ $# -gt 0 ] || return 0
  have apt-get || fail "please install: $* (or your system's packages of that name)"
  [ "$(id -u)" = 0 ] || fail "missing: $*. Install with: sudo apt-get install $*"
  say "installing $*"
  apt_update
  DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends "$@" >&2 </dev/null ||
    fail "apt-get install $* failed"
}

# A tool that Cargo builds. Minutes of work, once.
cargo_need() {
  local command=$1 crate=$2 version=$3
  have "$command" && return 0
  say "building $crate $version with cargo (some minutes, once; kept in $tools)"
  CARGO_TARGET_DIR=$cache/tools-build nice cargo install --quiet --locked --root "$tools" "$crate@$version" >&2 </dev/null ||
    fail "cargo install $crate failed"
  rm -rf "$cache/tools-build"
}

# etcd's binaries from Debian's package without installing it: an installed one would start a service.
etcd_need() {
  have etcd && return 0
  have apt-get && have dpkg-deb || fail "please put an etcd binary on the PATH (3.4 or later)"
  say "unpacking etcd-server into $tools"
  local work
  work=$(mktemp -d)
  (
    cd "$work"
    chmod 755 .
    apt-get -qq download etcd-server >&2 2>/dev/null || { apt_update; apt-get -qq download etcd-server >&2; }
    dpkg-deb --extract etcd-server_*.deb unpacked
  ) || { rm -rf "$work"; fail "apt-get could not download etcd-server"; }
  mkdir -p "$tools/bin"
  cp "$work"/unpacked/usr/bin/etcd* "$tools/bin/"
  rm -rf "$work"
}

need_build() {
  have cargo || fail "no Rust toolchain: see https://rustup.rs (1.89 or later)"
  local missing=()
  have cc || missing+=(gcc libc6-dev)
  have make || missing+=(make)
  have cmake || missing+=(cmake)   # zlib-ng, which Pingora compiles, is configured by cmake
  apt_need "${missing[@]}"
}

need_test() {
  need_build
  have python3 || apt_need python3 python3-pip
  python3 -m pip --version >/dev/null 2>&1 || apt_need python3-pip
  local missing=()
  ldconfig -p 2>/dev/null | grep -q 'libgomp\.so\.1' || missing+=(libgomp1)      # llama-server's threads
  ldconfig -p 2>/dev/null | grep -q 'libstdc++\.so\.6' || missing+=(libstdc++6)
  have systemd-analyze || missing+=(systemd)                                    # checks the unit
  have curl || missing+=(curl)                                                  # asks the service that the unit starts
  apt_need "${missing[@]}"
  etcd_need
}

need_load() { need_build; cargo_need oha oha 1.16.0; }
need_deb() { need_build; cargo_need cargo-deb cargo-deb 3.8.0; }
need_fuzz() {
  need_build
  have c++ || apt_need g++
  cargo_need cargo-fuzz cargo-fuzz 0.13.2
}
need_deny() { need_build; cargo_need cargo-deny cargo-deny 0.20.2; }

[ $# -gt 0 ] || fail "usage: scripts/need.sh build|test|load|fuzz|deb|deny ..."
for task in "$@"; do
  declare -F "need_$task" >/dev/null || fail "unknown task: $task"
  "need_$task"
done
