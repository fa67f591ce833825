# Everything runs in an environment of its own; `make demo` and `make test` need nothing but python3.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt

.PHONY: demo test lint bench report kernels

demo: $(VENV)/.installed
	$(BIN)/subquad generate --seed 1

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(VENV)/.installed-dev
	$(BIN)/python kernels/benchmarks/wkv.py --out build/bench $(ARGS)
	$(BIN)/python kernels/benchmarks/avey.py --out build/bench $(ARGS)
	$(BIN)/python kernels/benchmarks/avey_b.py --out build/bench $(ARGS)
	$(BIN)/python kernels/benchmarks/raven.py --out build/bench $(ARGS)
	$(BIN)/python kernels/benchmarks/gecko.py --out build/bench $(ARGS)
	$(BIN)/python kernels/benchmarks/models.py $(ARGS)
	$(BIN)/python tokenizers/benchmarks/rwkv_world.py $(ARGS)

report: $(VENV)/.installed-inspect
	$(BIN)/python -m examples.evaluation report $(ARGS)

kernels:
	rm -rf build/kernels
	$(PYTHON) kernels/build_repository.py build/kernels

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.installed-inspect: $(VENV)/.installed
	$(PIP) -e .[inspect]
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e .[dev]
	touch $@
