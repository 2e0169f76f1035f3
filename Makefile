# Every target does the set-up it needs: a virtual environment with pinned versions.
#
#   make demo       measure, split and train a sparse network on two unlike devices, compare speeds
#   make test       the quick suite
#   make test-full  all tests: the quick suite, make smoke and what takes longer
#   make coverage   the quick suite, and the lines of sparsepipe/ that it runs in all processes
#   make notebooks  executes the notebooks, on recorded ledgers
#   make smoke      a quarter of Table II, killed once on its way, and other exhibits, as small as can be
#   make gpu        figures of a GPU, in starts of nine minutes that go on with each other; outputs/gpu
#   make docs       the documentation as a site, into build/site; a dead link is an error
#   make lint       ruff, mypy, import contracts
#
# On a machine without an NVIDIA GPU the much smaller CPU build of PyTorch will do:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
DEMO_ARGS ?=
GPU_ARGS ?=
PYTEST_ARGS ?=
TEST_JOBS ?= 3

# Whatever is imported is compiled once: without its bytecode PyTorch takes three times as long.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs_ready

.PHONY: setup demo test test-full coverage notebooks smoke gpu docs lint format clean
.DELETE_ON_ERROR:

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "SparsePipe needs Python 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@# Bytecode is made of what is imported, when that is first done.
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --no-compile \
		--disable-pip-version-check $(PIP_ARGS) --editable ".[dev]"
	@touch $@

demo: $(READY)
	$(BIN)/sparsepipe experiment=demo $(DEMO_ARGS)
	$(BIN)/sparsepipe -m experiment=demo_speed parallel=dp,mp,hete_mp $(DEMO_ARGS)

# Tests run in TEST_JOBS processes with a thread each, one more than two cores have: many of
# them wait, for limits and for ranks that they start.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not full and not smoke" -n $(TEST_JOBS) --dist worksteal $(PYTEST_ARGS)

test-full: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal $(PYTEST_ARGS)

coverage: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -m "not full and not smoke" -n $(TEST_JOBS) --dist worksteal $(PYTEST_ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --include='sparsepipe/*' --sort=cover

notebooks: $(READY)
	$(BIN)/python -m pytest tests/integration/test_notebooks.py -n 2 --dist worksteal $(PYTEST_ARGS)

smoke: $(READY)
	$(BIN)/python -m pytest -m smoke tests/integration -n 2 --dist worksteal $(PYTEST_ARGS)

gpu: $(READY)
	$(BIN)/python benchmarks/gpu/run.py --out outputs/gpu $(GPU_ARGS)

# A layer over the set-up, so that tests do not need it. Warnings of mkdocs are errors.
$(DOCS_READY): $(READY)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --no-compile \
		--disable-pip-version-check $(PIP_ARGS) --editable ".[docs]"
	@touch $@

docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build/site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
