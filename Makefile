# Two commands do everything on a fresh machine with Python, pip and make:
#   make demo   make test
# and, where wanted: make docs (the documentation as a site)   make test-browser (the pages in a real browser)
PYTHON ?= python3
BIN := .venv/bin
.PHONY: demo test test-deploy test-browser lint types tests docs bench clean

.venv/user: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/dev: .venv/user
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .[dev,flower]
	touch $@

.venv/browser: .venv/dev
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .[browser]
	touch $@

demo: .venv/user
	$(BIN)/defedavg demo

test: lint types tests

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev
	$(BIN)/mypy

tests: .venv/dev
	$(BIN)/python -m pytest

# Real SuperLink and SuperNode processes: minutes, most of them waiting.
test-deploy: .venv/dev
	$(BIN)/python -m pytest -n 2 -m deploy --durations=0

# Debian's chromium; installed if it is missing and this may be done, else the tests say that they were skipped.
test-browser: .venv/browser
	command -v chromium >/dev/null || { apt-get update -q && apt-get install -y -q chromium fonts-dejavu-core; } || true
	$(BIN)/python -m pytest -n 1 -rs tests/report/test_browser.py

docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open in a browser: site/index.html"

bench: .venv/user
	$(BIN)/python benchmarks/plan.py

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
