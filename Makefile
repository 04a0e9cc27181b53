# `make` lists the targets, with the text beside each.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Modules that `make` imports are kept compiled.
unexport PYTHONDONTWRITEBYTECODE

# Containers often set PYTHONDONTWRITEBYTECODE. Each process would then compile torch and Flower anew, so the
# installation compiles them, on all cores and without their tests. A file of another Python is passed over.
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/tests/'

.DEFAULT_GOAL := help
.PHONY: help install lock protocol demo serve-demo test test-all lint docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/'

install: $(VENV)/installed ## make .venv with all that tests and benchmarks need

# The variables bound what builds this package too, which `--constraint` does not. Older pips know the first alone.
$(VENV)/installed $(VENV)/demo: export PIP_CONSTRAINT = constraints.txt
$(VENV)/installed $(VENV)/demo: export PIP_BUILD_CONSTRAINT = constraints.txt
$(VENV)/installed: EXTRA = test
$(VENV)/demo: EXTRA = serve
$(VENV)/installed $(VENV)/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[$(EXTRA)]'
	$(COMPILE) $(VENV)/lib vfl_flower strategies vfl_attacks || true
	touch $@

# The demos need no tools of tests.
DEMO := $(if $(wildcard $(VENV)/installed),$(VENV)/installed,$(VENV)/demo)

# Linux (x86-64) and Python 3.11, as deploy/README.md says. Elsewhere the same versions of packages are installed.
LOCK = UV_CUSTOM_COMPILE_COMMAND='make lock' $(BIN)/uv pip compile --quiet --upgrade --no-annotate \
	--python-version 3.11 --python-platform x86_64-manylinux_2_28 --resolution $(RESOLUTION)

# `lowest-direct` takes the oldest versions that pyproject.toml permits.
RESOLUTION ?= highest

lock: $(BIN)/uv ## resolve the newest dependencies into constraints.txt and deploy/requirements.txt
	$(LOCK) pyproject.toml --extra test -o constraints.txt
	echo 'hatchling>=1.27' | $(LOCK) pyproject.toml - --extra serve -c constraints.txt --generate-hashes \
		-o deploy/requirements.txt

$(BIN)/uv:
	$(MAKE) install

protocol: install ## renew the digest beside the protocol's version; VERSION=next: also count on
	$(BIN)/python -m tests.protocol $(VERSION)

demo: $(DEMO) ## train on handwritten digits with four parties, by `vfl demo`
	$(BIN)/vfl demo

serve-demo: $(DEMO) ## train a model, serve it, and ask for 1,000 scores, by examples/serve_scores.py
	$(BIN)/python examples/serve_scores.py

# The tests often wait for processes and clocks. `make lint` takes the processor then, and its output comes last.
WITH_LINT = log=$$(mktemp); $(MAKE) --no-print-directory lint > "$$log" 2>&1 & \
	$(BIN)/python -m pytest -q $(1); tests=$$?; wait $$!; lint=$$?; \
	cat "$$log"; rm -f "$$log"; exit $$((tests | lint))

test: install ## run the tests, and check types and style meanwhile
	@$(call WITH_LINT)

test-all: install ## and those that take longer, for every night
	@$(call WITH_LINT,-m "nightly or not nightly" --hypothesis-profile nightly)

lint: install ## ruff, mypy, the import contract, and the prose check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.prose

docs: install ## build the site, offline, into docs/_build/html
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs docs/_build/html
	@echo "The site is docs/_build/html/index.html"

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache *.egg-info build docs/_build
