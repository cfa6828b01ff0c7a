# One word per task, the same for people and for CI.

# The first Python that will do; `make setup PYTHON=…` takes another.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& echo $$python && break; done)
# Anything pip takes. Installed first, and alone: a bare `torch` among the other requirements would bring its
# newest build with everything for CUDA where a smaller one is at hand.
TORCH ?= torch==2.13.0
MODEL ?= tests/golden/md3-small
DEMO_IMAGE ?= tests/golden/md3-small/image_0_500x400.png

BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: setup proto check test serve demo bench supply clean

# Everything into .venv; nothing to do until pyproject.toml changes.
setup: .venv/installed

.venv/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "needs Python 3.11, 3.12 or 3.13; name one with PYTHON=…" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) $(TORCH)
	$(INSTALL) --editable '.[dev]'
	@touch $@

# The Python messages and stubs, anew from proto/.
proto: setup
	PYTHON=$(BIN)/python sh proto/generate.sh

# Everything that can be said without running: style, types, the wire contract, the freshness of its stubs.
check: setup
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/pyright --warnings
	BUF=$(BIN)/buf PYTHON=$(BIN)/python sh proto/check.sh

test: check
	$(BIN)/python -m pytest

# MODEL is a folder, a file or a name on the hub; ARGS are further options of `kestrel-grpc serve`.
serve: setup
	$(BIN)/kestrel-grpc serve --model $(MODEL) $(ARGS)

# A server on a free port, a question and a search put to it over gRPC, and the server stopped.
demo: setup
	@log=$$(mktemp); run() { echo "\$$ $$*"; "$$@"; }; \
	$(BIN)/kestrel-grpc serve --model $(MODEL) --port 0 --log-level warning >"$$log" & server=$$!; \
	trap 'kill $$server 2>/dev/null; wait $$server; rm -f "$$log"' EXIT; \
	until grep '^kestrel-grpc serves' "$$log"; do kill -0 $$server || exit 1; sleep 0.1; done; \
	address=$$(sed -n 's/^kestrel-grpc serves .* on \([^ ]*\) .*/\1/p' "$$log"); \
	run $(BIN)/kestrel-grpc query $(DEMO_IMAGE) 'What is in this image?' --max-tokens 32 --address $$address && \
	run $(BIN)/kestrel-grpc detect $(DEMO_IMAGE) square --max-objects 3 --draw demo.png --address $$address
	@case $(MODEL) in tests/golden/*) \
		echo "The weights of $(MODEL) are random, so these answers are noise; name a trained model with MODEL=…";; \
	esac

bench: setup
	@for script in bench/*.py; do echo "== $$script"; PYTHONPATH=. $(BIN)/python $$script || exit 1; done

# The versions a deployment runs, with their hashes and licences, and its bill of materials.
supply: setup
	PYTHON=$(BIN)/python sh deploy/supply.sh

clean:
	rm -rf .venv build bench/out *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
