# One word per task, the same for people and for CI.

# The first Python that will do; `make setup PYTHON=…` takes another.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null \
	&& echo $$python && break; done)
# Anything pip takes. Installed first, and alone: a bare `torch` among the other requirements would bring its
# newest build with everything for CUDA where a smaller one is at hand.
TORCH ?= torch==2.13.0

BIN := .venv/bin
# Of what pip would compile, a sixth is ever imported; Python compiles that itself, unless it may not write it down.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)

.PHONY: help setup setup-server sizes proto format check test test-fast tests test-clients test-page test-languages test-ray docs fuzz \
	serve demo attacks quality train bench supply dist clean

help: ## Print these commands
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1\t\2/p' Makefile | expand -t 18

# What serves models, into .venv; nothing to do until pyproject.toml changes.
setup-server: .venv/server ## Install what serves models into .venv

.venv/server: pyproject.toml clients/python/pyproject.toml
	@test -n "$(PYTHON)" || { echo "needs Python 3.11 to 3.14; name one with PYTHON=…" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "setup: a newer pip, which needs half the time, and what builds the packages"
	$(INSTALL) --quiet --upgrade pip setuptools
	@echo "setup: PyTorch, the largest part"
	$(INSTALL) $(TORCH)
	@echo "setup: the two packages, and what they need"
	$(INSTALL) --no-build-isolation --editable clients/python --editable '.[server]'
	@touch $@

# The same with the tools of the tests.
setup: .venv/installed ## Install everything into .venv, also the tools of the tests

.venv/installed: .venv/server
	@echo "setup: the tools of the tests"
	$(INSTALL) --no-build-isolation --editable clients/python --editable '.[dev]'
	@touch $@

# Downloads each kind of installation; ARGS names some of them, such as "client base".
sizes: setup-server ## Install the client, the commands and the server anew, and print what each weighs
	$(BIN)/python -m tools.install_sizes --torch '$(TORCH)' $(ARGS)

# The Python messages and stubs, anew from proto/.
proto: setup ## Generate the Python messages and stubs anew from proto/
	PYTHON=$(BIN)/python sh proto/generate.sh

# Sort imports, and lay out all Python as the check wants it.
format: setup ## Sort imports and lay out all Python
	$(BIN)/ruff check --quiet --select I --fix
	$(BIN)/ruff format --quiet

# Everything that can be said without running: style, types, the wire contract, the freshness of its stubs.
check: setup ## Check style, types, the wire contract and its stubs
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/pyrefly check --summary=none
	BUF=$(BIN)/buf PYTHON=$(BIN)/python sh proto/check.sh

# More at a time with WORKERS=…
WORKERS ?= 2
test: check tests ## Check, then run all tests

tests: setup ## Run all tests, without the checks
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

# What needs neither a model nor a process of its own, for use after each change.
FAST := tests/runtime/api tests/runtime/scheduling tests/runtime/adapters tests/runtime/memory tests/runtime/constraints \
	tests/server/access tests/server/config tests/server/calls tests/server/telemetry tests/server/frontends tests/client \
	tests/tools tests/test_architecture.py tests/test_contributing.py tests/test_docs.py tests/test_vocabulary.py
test-fast: setup ## Run the tests that need neither a model nor a process of their own, in under two minutes
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(FAST)

# Clients that others have written, each in an environment of its own: those of CI, all with ALL=1, one with ARGS=openai;
# NEWEST=1 takes the newest packages. Before them, manifests whose schemas are packages for Node.js.
test-clients: setup ## Run clients that others have written: all with ALL=1, one of them with ARGS=openai
	$(BIN)/python -m tests.deploy
	$(BIN)/python -m tests.clients $(ARGS)

# The page in Chromium, which Debian's package manager installs where it is missing; ARGS are options of pytest.
test-page: setup ## Use the page in Chromium
	$(BIN)/python -m tests.page $(ARGS)

# The examples in Go, TypeScript, Java and C++, with compilers and libraries of Debian; one of them with ARGS=go.
test-languages: setup ## Build and run the examples in Go, TypeScript, Java and C++; one of them with ARGS=go
	$(BIN)/python -m tests.languages $(ARGS)

# The application for Ray Serve, with Ray in an environment of its own; ARGS are options of pytest.
test-ray: setup ## Run the application for Ray Serve, in an environment of its own
	$(BIN)/python -m tests.ray $(ARGS)

# The documentation as a site of static files in build/site, a check of all its links, and the tutorials as written.
docs: setup ## Build the documentation site, check its links, run the tutorials
	GRPC_VERBOSITY=NONE NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	$(BIN)/python -m pytest tests/site/built_site.py tests/site/tutorials.py

# Ten minutes of CPU for requests, images and frames that nobody meant well; another length with CPU_SECONDS=…
CPU_SECONDS ?= 600
fuzz: setup ## Send hostile requests, images and frames for ten minutes of processor time
	$(BIN)/python -m tests.fuzzing $(CPU_SECONDS)

# The built-in model unless ARGS says otherwise; ARGS are options of `kestrel-grpc serve`.
serve: setup-server ## Serve the built-in model, or what ARGS says
	$(BIN)/kestrel-grpc serve $(ARGS)

# A server on a free port, all five skills asked over gRPC about one picture, and what was found drawn on it.
demo: setup-server ## Serve the built-in model, ask it for all skills, draw demo.png
	$(BIN)/kestrel-grpc demo

# Attacks on servers of our own, and what others notice of them. ARGS are options of bench/attacks.
attacks: setup ## Attack servers of our own, and measure what others notice
	$(BIN)/python -m bench.attacks $(ARGS)

# How well a model sees: held-out scenes asked over gRPC. ARGS are options of bench/quality.py.
quality: setup ## Measure how well a model sees
	$(BIN)/python -m bench.quality $(ARGS)

# The whole recipe of the built-in model, for one GPU; goes on where it stopped.
train: setup ## Train the built-in model, on one GPU
	$(BIN)/python -m training all

bench: setup ## Run three measurements that need no GPU
	@for name in first_answer frontend features; do echo "== $$name"; $(BIN)/python -m bench.$$name || exit 1; done

# The versions a deployment runs, with their hashes and licences, and its bill of materials.
supply: setup ## Write the locked versions, their licences and the bill of materials
	PYTHON=$(BIN)/python sh deploy/supply.sh

# The wheels and source distributions of both packages, checked as an index would check them, in dist/.
dist: setup ## Build and check the wheels and source distributions
	PYTHON=$(BIN)/python sh deploy/dist.sh

clean: ## Remove all that these commands have made
	rm -rf .venv build dist bench/out *.egg-info
	rm -rf clients/*/build clients/*/gen clients/go/vendor clients/typescript/dist clients/typescript/node_modules
	find . -name __pycache__ -prune -exec rm -rf {} +
