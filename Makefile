# What a person types. Everything longer than a line stands in scripts/.

SHELL := /bin/bash
.DEFAULT_GOAL := help

TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
CACHE := $(or $(WEIGHBRIDGE_CACHE),$(CURDIR)/target)
export WEIGHBRIDGE_CACHE := $(CACHE)
export PATH := $(CACHE)/tools/bin:$(PATH)
BINARY := $(TARGET_DIR)/release/weighbridge

PREFIX ?= /usr
DESTDIR ?=
SYSCONFDIR ?= /etc

.PHONY: help
help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

.PHONY: demo
demo: build ## the main job with nothing to set up: a simulated fleet, the balancer, traffic, a live table
	$(BINARY) demo

.PHONY: build
build: ## the release binary
	@scripts/need.sh build
	cargo build --release --locked --bin weighbridge

.PHONY: test
test: ## formatting, clippy, every test, a real llama-server among them
	@scripts/test.sh

.PHONY: fmt
fmt: ## formats the code
	cargo fmt

.PHONY: lint
lint: ## formatting and clippy, warnings denied
	@scripts/need.sh build
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings

.PHONY: bench
bench: ## every benchmark; docs/performance.md tells what each claims
	@scripts/need.sh build
	cargo bench --locked

.PHONY: load
load: build ## oha against four simulated replicas of unequal speed: least-tokens beside round-robin
	@scripts/need.sh load
	python3 benches/load.py --binary $(BINARY) $(LOAD_ARGS)

.PHONY: live
live: build ## what a newcomer gets: cold, nothing told, beside everything told and the virtual clock (an hour)
	@scripts/need.sh build
	python3 benches/live.py --binary $(BINARY) $(LIVE_ARGS)

SECONDS ?= 600
SEED ?= 1
.PHONY: chaos
chaos: ## ten minutes of everything going wrong at once, over real sockets (SECONDS=, SEED=)
	@scripts/need.sh test
	WEIGHBRIDGE_CHAOS_SECONDS=$(SECONDS) WEIGHBRIDGE_CHAOS_SEED=$(SEED) cargo test --locked --test chaos -- --nocapture

.PHONY: fuzz
fuzz: ## every fuzz target for a minute, from a corpus of the field cases
	@scripts/need.sh fuzz
	fuzz/run 60

FIGURES := c058 c086 c094 c130 c137 c149

.PHONY: figures
figures: build ## what the tests scale down or loosen, in full: an idle machine, the release binary (half an hour)
	@scripts/need.sh test
	WEIGHBRIDGE_FULL_FIGURES=1 WEIGHBRIDGE_BINARY=$(abspath $(BINARY)) cargo test --locked --test field_cases -- $(FIGURES)

.PHONY: nightly
nightly: test figures chaos soak templates fuzz deny deb ## all of it

.PHONY: templates
templates: ## templates and counts of six model families against Python's transformers (installs 300 MB)
	@scripts/need.sh test
	tests/templates/run.sh $(CACHE)/templates

SOAK_SECONDS ?= 900

.PHONY: soak
soak: ## fifteen minutes of ordinary churn on a release build: memory flat, nothing booked, no descriptor kept
	@scripts/need.sh build
	WEIGHBRIDGE_SOAK_SECONDS=$(SOAK_SECONDS) cargo test --release --locked --test soak -- --nocapture

.PHONY: deny
deny: ## licences, bans and sources of every dependency
	@scripts/need.sh deny
	cargo deny --locked check licenses bans sources

.PHONY: install
install: build ## the binary, unit, sysusers, tmpfiles and an example configuration, under DESTDIR and PREFIX
	DESTDIR="$(DESTDIR)" PREFIX="$(PREFIX)" SYSCONFDIR="$(SYSCONFDIR)" scripts/install.sh $(BINARY)

.PHONY: deb
deb: build ## a Debian package, checked
	@scripts/need.sh deb
	scripts/check-deb.sh "$$(cargo deb --locked --no-build)"

.PHONY: clean
clean: ## removes what was built
	cargo clean
