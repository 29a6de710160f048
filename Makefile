# Two commands are enough on a fresh machine with Python, pip and make:
#   make demo   make test
# Optional: make docs (the documentation as a site)   make test-browser (the pages in a real browser)
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
.PHONY: demo deploy flower test fuzz test-deploy test-flower test-wheel test-browser lint types tests docs bench clean

.venv/user: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e .
	touch $@

.venv/dev: .venv/user
	$(PIP) -e .[dev,deploy,flower]
	touch $@

.venv/browser: .venv/dev
	$(PIP) -e .[browser]
	touch $@

# The transports of `defedavg deploy`, in a checkout: gRPC, and Flower.
deploy: .venv/user
	$(PIP) -e .[deploy]

flower: .venv/user
	$(PIP) -e .[flower]

demo: .venv/user
	$(BIN)/defedavg demo

test: lint types tests

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev
	$(BIN)/mypy

# Prints the coverage of src/ in one line, and fails below `fail_under` in pyproject.toml. The property tests of planning and algorithms and
# the long runs of convergence are pure Python, which tracing slows down three to six times on Python 3.11: they run untraced, so the
# figure is a lower bound.
UNTRACED := tests/training/test_convergence.py tests/algorithms tests/planning
tests: .venv/dev
	$(BIN)/python -m pytest $(UNTRACED)
	$(BIN)/python -m pytest --cov --cov-report= $(addprefix --ignore=,$(UNTRACED))

# Random and damaged input on the command line, 400 new examples per test instead of the 12 of `make test`: half an hour.
fuzz: .venv/dev
	DEFEDAVG_FUZZ=400 $(BIN)/python -m pytest tests/cli/test_fuzz.py

# Real server and client processes, over gRPC and Flower: minutes, half of them spent waiting, so three tests at a time share two cores.
# Only their folder: to collect the other tests takes every worker eleven seconds.
DEPLOYMENTS := 3
test-deploy: .venv/dev
	$(BIN)/python -m pytest -n $(DEPLOYMENTS) -m "deploy and not long" --durations=0 tests/deploy

# All deployments over Flower, also those that take minutes each: repeated kills of its processes, and `deploy local` resumed.
test-flower: .venv/dev
	$(BIN)/python -m pytest -n $(DEPLOYMENTS) -m deploy --durations=0 tests/deploy/flower

# The wheel in an empty environment, away from the source tree: a minute or two, mostly spent installing PyTorch.
test-wheel: .venv/dev
	$(BIN)/python .ci/test_wheel.py

# Needs Debian's chromium; installs it if it is missing and this is permitted, otherwise the tests are skipped.
test-browser: .venv/browser
	command -v chromium >/dev/null || { apt-get update -q && apt-get install -y -q --no-install-recommends chromium fonts-dejavu-core; } || true
	$(BIN)/python -m pytest -n 1 -rs tests/report/test_browser.py tests/adviser/test_advice_browser.py

docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open in a browser: site/index.html (search needs a web server; see docs/install.md)"

bench: .venv/user
	$(BIN)/python benchmarks/plan.py

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
