# Two commands do everything on a fresh machine with Python, pip and make:
#   make demo   make test
PYTHON ?= python3
BIN := .venv/bin
.PHONY: demo test lint types tests test-deploy bench clean

.venv/user: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/dev: .venv/user
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .[dev,flower]
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

bench: .venv/user
	$(BIN)/python benchmarks/plan.py

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
