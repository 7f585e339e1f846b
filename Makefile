# make demo   quantize a real model and print what it cost and what it won (installs into .venv; no torch)
# make test   ruff, mypy and the test suite (installs everything into .venv)
# make fast   lint and the tests of tables, arithmetic, configuration and the command line: two minutes, for every change
# make matrix   build the package, install it into clean environments (newest, oldest dependencies), run it there
# make lint   ruff and mypy only
# make slow   the tests that take longer
# make fuzz   damage files for an hour (FUZZ_SECONDS=3600) and see that every reader answers in a sentence
# make mutants SEED=1 COUNT=200   break the package in places drawn by a seed, and see that a test notices
# make consumers   every architecture of transformers, exported and loaded by the programs that read it (an hour)
#             CONSUMERS=--again: what was right is run again, too, as every week; ends with 1 where a cell is worse
# make scoreboard JUDGES=FOLDER   tests of other programs (checkouts in FOLDER) against this one: docs/results/scoreboard.md
# make gpu    the tests that need a CUDA device, in an environment that has torch for it
# make benchmarks-quick   measure the headline figures again and print benchmarks/RESULTS.md (ten minutes)
# make site   the documentation as a site in build/site, search included; python -m http.server -d build/site
# make docs   write the generated pages, run the code of all pages
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test slow gpu lint docs consumers clean fuzz mutants
.PHONY: benchmarks-quick fast matrix scoreboard site

FUZZ_SECONDS ?= 3600
SEED ?= 0
COUNT ?= 200
JUDGES ?= ../judges

demo: $(VENV)/.onnx
	$(BIN)/python -m quark.demo

test: lint
	$(BIN)/python -m pytest -n 2

fast: lint
	$(BIN)/python -m pytest -n 2 tests/numerics tests/observers tests/config tests/test_architecture.py tests/test_commands.py tests/test_gate.py tests/test_records.py tests/test_site.py

matrix: $(VENV)/.dev
	$(PIP) build
	$(BIN)/python -m build
	$(BIN)/python tests/smoke.py matrix

slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy

fuzz: $(VENV)/.dev
	$(BIN)/python -W ignore -m tests.fuzz.run --seconds $(FUZZ_SECONDS) --seed $(SEED)

mutants: $(VENV)/.dev
	$(BIN)/python -m tests.mutants --seed $(SEED) --count $(COUNT)

consumers: $(VENV)/.dev
	$(BIN)/python tests/consumers/run.py $(CONSUMERS)

scoreboard: $(VENV)/.dev
	$(BIN)/python tests/judges/run.py $(JUDGES)

benchmarks-quick: $(VENV)/.dev
	$(BIN)/python -m benchmarks.page --measure

site: $(VENV)/.dev
	$(PIP) mkdocs-material
	$(BIN)/python docs/site.py
	$(BIN)/mkdocs build --strict

docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py
	$(BIN)/python -m pytest tests/test_docs.py tests/test_generated_pages.py

clean:
	rm -rf $(VENV) build dist demo_output

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.onnx: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --editable '.[onnx]'
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --editable '.[all,dev]'
	touch $@ $(VENV)/.onnx
