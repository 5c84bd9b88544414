# Two commands on a fresh machine: `make demo` and `make test`. Nothing outside this directory changes.
PYTHON ?= python3
BIN := .venv/bin
ENGINE := CMakeLists.txt $(wildcard csrc/*)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test test-all lint docs bench sanitize clean

demo: .venv/demo  ## train GDU, GRU and LSTM on the paper's smallest tasks, and write a report
	$(BIN)/torchgdu reproduce

test: .venv/test lint  ## everything deterministic: lint, types, tests, doctests, documentation
	$(PYTEST) -m "not slow"

test-all: test  ## test, then what takes minutes, root, a browser or a sanitizer
	$(PYTEST) -m slow

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/test  ## check the documentation: every link, and every code block run
	$(BIN)/python -m pytest tests/test_docs.py

bench: .venv/demo  ## time the layers against torch.nn
	$(BIN)/torchgdu bench

sanitize: .venv/test  ## the engine without Python, under the address, undefined-behaviour and thread sanitizers
	$(BIN)/python -m pytest -m slow tests/test_sanitize.py

clean:
	rm -rf .venv build

# Installed editable, so that Python sources need no new install; the engine's sources do.
.venv/python:
	$(PYTHON) -m venv .venv
	touch $@

.venv/demo: .venv/python pyproject.toml constraints.txt $(ENGINE)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[plot,cluster]"
	touch $@

.venv/test: .venv/python pyproject.toml constraints.txt $(ENGINE)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[test]"
	touch $@ .venv/demo
