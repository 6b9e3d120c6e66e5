# make setup | demo | test | lint | types | bench | protos: the same targets here and in CI.
# Every target makes .venv first where it is missing or older than pyproject.toml.

PY := .venv/bin/python
PYTEST := $(PY) -m pytest
INSTALLED := .venv/.installed
NODE_MODULES := tests/interop/node_modules/.package-lock.json
PEERS_INSTALLED := .venv/.installed-bench
DOCS_INSTALLED := .venv/.installed-docs

help:
	@echo "make setup        make .venv and install everything"
	@echo "make demo         train MNIST on 2 shards and 2 workers"
	@echo "make test         the tests that need no Docker, no browser and no Node"
	@echo "make test-fast    those that take no time"
	@echo "make test-fit     fit on a cluster: scripts, every callback, the notebook"
	@echo "make test-docker  build the image and train on it"
	@echo "make test-launchers  clusters under a real Slurm, under mpirun, in Ray, on Spark, and as pods"
	@echo "make test-versions the oldest and the newest TensorFlow and Keras, and none, in environments of their own"
	@echo "make test-browser look at the dashboard with a real browser"
	@echo "make screenshots  the dashboard's pictures in docs/figures, of a run with four workers"
	@echo "make test-interop let a client of another language speak to a shard"
	@echo "make sim          simulate clusters with faults: make sim SEEDS=100000"
	@echo "make sim-scale    simulate 1000 workers and 100 shards with faults: ten minutes"
	@echo "make chaos        kill real processes: make chaos SCHEDULES=200"
	@echo "make fuzz         hostile input, guided by coverage: make fuzz FUZZ_S=3600; ten minutes"
	@echo "make planted      plant bugs and see every one caught: ten minutes"
	@echo "make mistakes     what users do wrong, and whether they are told so"
	@echo "make keras        what of Keras trains, and what does not"
	@echo "make job-fields   the reference of a job's fields, from the docstring of pserver.Job"
	@echo "make options      the table of all options, from their declarations"
	@echo "make matrix       who may call what, asked of real servers"
	@echo "make soak         ten minutes of training with a kill every ten seconds"
	@echo "make lint types   ruff, mypy"
	@echo "make docs         the documentation as a site in build/docs, links checked"
	@echo "make test-docs    the commands of README, tutorial and how-to pages, as written: minutes"
	@echo "make test-alerts  the alert rules, with Prometheus' promtool"
	@echo "make bench        ours beside TensorFlow, PyTorch and Ray, and the modes: over an hour"
	@echo "make bench-sweep  step time and memory against everything: longer"
	@echo "make bench-scale  one coordinator with 1000 workers, 64 workers on one machine: ten minutes"
	@echo "make protos       generate psrpc/v1 from protos/"
	@echo "make clean        remove what was installed, caches and runs"

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml scripts/setup
	./scripts/setup

demo: $(INSTALLED)
	$(PY) -m coordinator.cli up examples/mnist_dnn.py --shards 2 --workers 2 --mode sync
	@echo 'coordinator is on the PATH after: . .venv/bin/activate'

# On two cores: clusters of tests wait for over a third of their time, for processes and deadlines.
TEST_PROCESSES ?= 3

# Keeps bytecode, whatever the environment says: all test processes load all test modules, and hundreds
# of commands our packages.
test: export PYTHONDONTWRITEBYTECODE =

# tests/conftest.py has the order: by default files with few tests come last, and they are slow.
test: $(INSTALLED)
	$(PYTEST) -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations 30

test-fast: $(INSTALLED)
	$(PYTEST) -m "not docker and not interop and not browser and not fit and not launchers and not docs and not slow"

test-fit: $(INSTALLED)
	$(PYTEST) -n 2 --dist loadfile -m fit tests/e2e

# ARGS="oldest" runs one of them.
test-versions: $(INSTALLED)
	$(PY) scripts/test_versions.py $(ARGS)

test-browser: $(INSTALLED)
	./scripts/setup-browser
	$(PYTEST) -m browser tests/browser

screenshots: $(INSTALLED)
	./scripts/setup-browser
	$(PY) -m tests.browser.screenshots

test-docker: $(INSTALLED)
	$(PYTEST) -m docker tests/docker

# The engines share nothing, so two of them run side by side; tests/launchers/conftest.py has the order.
LAUNCHER_TESTS ?= launchers
test-launchers: $(INSTALLED)
	./scripts/setup-launchers
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder --durations 30 -m '$(LAUNCHER_TESTS)' tests/launchers

test-interop: $(INSTALLED) $(NODE_MODULES)
	$(PYTEST) -m interop tests/interop

$(NODE_MODULES): tests/interop/package-lock.json scripts/setup-node
	./scripts/setup-node
	touch $@

SEEDS ?= 2000
sim: $(INSTALLED)
	$(PY) -m tests.sim --seeds 0..$(SEEDS) $(ARGS)

sim-scale: $(INSTALLED)
	$(PY) -m tests.sim_scale $(ARGS)

SCHEDULES ?= 200
chaos: $(INSTALLED)
	$(PY) -m tests.chaos --schedules $(SCHEDULES) $(ARGS)

FUZZ_S ?= 600
fuzz: $(INSTALLED)
	$(PY) -m tests.fuzz all $(FUZZ_S)

planted: $(INSTALLED)
	$(PY) -m tests.planted $(ARGS)

mistakes: $(INSTALLED)
	$(PYTEST) tests/mistakes --report docs/mistakes.md

keras: $(INSTALLED)
	$(PYTEST) tests/keras_api --report docs/keras.md

matrix: $(INSTALLED)
	$(PYTEST) tests/security --report docs/matrix.md

job-fields: $(INSTALLED)
	$(PYTEST) tests/test_job_fields.py --report docs/job-fields.md

options: $(INSTALLED)
	$(PYTEST) tests/psrpc/options/test_declared_once.py -k up_to_date --report docs/options.md

soak: $(INSTALLED)
	$(PY) -m benchmarks.soak $(ARGS)

# A link that leads nowhere is a warning, and -W makes it an error. Hosts elsewhere are not asked.
docs: $(DOCS_INSTALLED)
	rm -rf build/docs
	$(PY) -m sphinx -q -E -W -c docs/site -d build/doctrees . build/docs
	$(PYTEST) -m docs tests/docs/test_site.py
	@echo 'the site begins with build/docs/index.html'

$(DOCS_INSTALLED): $(INSTALLED)
	$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@

test-docs: $(INSTALLED)
	$(PYTEST) -n 2 --durations 0 -m docs tests/docs/test_host.py tests/docs/test_commands.py

test-alerts: $(INSTALLED)
	./scripts/setup-promtool
	.venv/bin/promtool check rules docs/alerts.yml
	.venv/bin/promtool check config --syntax-only docker/prometheus.yml
	.venv/bin/promtool test rules tests/alerts/alerts.test.yml

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(INSTALLED)
	$(PY) -m mypy
	$(PY) -m mypy scripts/generate_protos.py docs/site/conf.py
	$(PY) -m mypy scripts/test_versions.py

# A peer that cannot be installed is shown as missing. ARGS="--only CASE --runs 1" and the like.
bench: $(PEERS_INSTALLED)
	$(PY) -m benchmarks.bench $(ARGS)

bench-sweep: $(INSTALLED)
	$(PY) -m benchmarks.sweep $(ARGS)

bench-scale: $(INSTALLED)
	$(PY) -m benchmarks.scale coordinator
	$(PY) -m benchmarks.scale cluster

$(PEERS_INSTALLED): $(INSTALLED)
	-$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[bench]' && touch $@

protos: $(INSTALLED)
	$(PY) scripts/generate_protos.py

protos-check: $(INSTALLED)
	$(PY) scripts/generate_protos.py --check

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build runs *.egg-info \
		tests/interop/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help setup demo test test-fast test-fit test-browser screenshots test-docker test-interop test-launchers test-versions sim sim-scale chaos fuzz planted mistakes keras matrix job-fields \
	options soak docs test-docs test-alerts lint types bench bench-sweep bench-scale protos protos-check clean
