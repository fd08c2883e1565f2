# Begin with `make demo` or `make test`. All but bench-tools, bench-peers and clean set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

SECONDS ?= 60
BENCH := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kelvin-bench
TOOLS := $(BENCH)/tools

export OMP_NUM_THREADS = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: install demo test deep long attack drills fuzz test-ten lint types layers mutants bench-tools bench-peers clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo 'Installing about 180 packages, 2 GB, into $(VENV): this takes one to five minutes.'
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[runtime,onnx,s3,signing,tensorizer,telemetry,test,demo]'
	touch $@

demo: $(STAMP)
	$(BIN)/python -m examples.demo

test: $(STAMP) lint types layers
	$(BIN)/pytest

deep: $(STAMP)
	$(BIN)/pytest -m "deep and not long" $$(grep -rl --include='test_*.py' 'mark\.deep' tests)

long: $(STAMP)
	$(BIN)/pytest -m long $$(grep -rl --include='test_*.py' 'mark\.long' tests)

attack: $(STAMP)
	$(BIN)/pytest -n 4 --timeout 600 -m "deep or not deep" tests/attack

drills: $(STAMP)
	$(BIN)/python -m tests.drills
	KELVIN_TEST_KILLS=100 $(BIN)/pytest -n 2 --timeout 3000 -m "deep or not deep" tests/kelvin/cli/artifacts/test_push_killed.py tests/weightcache/test_crash.py
	KELVIN_TEST_KILLS=30 $(BIN)/pytest -n 0 --timeout 3000 -m "deep or not deep" tests/drills/test_first_start.py
	KELVIN_TEST_KILLS=200 $(BIN)/pytest -n 0 --timeout 3000 -m "deep or not deep" tests/weightcache/test_crash_load.py

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(TARGETS)

test-ten: $(STAMP)
	$(BIN)/python -m tests.repeat_suite

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports

mutants: $(STAMP)
	$(BIN)/mutmut run

# Debian's wrk and nginx for `kelvin bench front`, unpacked and not installed (coldstart_bench/harness/front_tools.py looks there).
bench-tools:
	mkdir -p $(TOOLS)/debs
	cd $(TOOLS)/debs && apt-get download wrk libluajit-5.1-2 nginx
	for deb in $(TOOLS)/debs/*.deb; do dpkg -x $$deb $(TOOLS); done

# What others put in front of models, each in an environment of its own (coldstart_bench/harness/front_tools.py looks there).
bench-peers:
	$(PYTHON) -m venv $(BENCH)/peers/ray
	$(BENCH)/peers/ray/bin/pip install --quiet 'ray[serve]==2.60.0' 'aiohttp==3.14.5'
	$(PYTHON) -m venv $(BENCH)/peers/litellm
	$(BENCH)/peers/litellm/bin/pip install --quiet 'litellm[proxy]==1.106.2'

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis mutants
