# make demo: one command from a fresh checkout to an answer.   make test: everything CI runs.
SHELL := /bin/bash -o pipefail
PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip --disable-pip-version-check install -e '$(1)' | sed -un 's/^ *Downloading /  /p; /^Installing/s/:.*//p'
, := ,
PACKAGES := baton baton_client engine kv_transfer worker prefill_worker decode_worker router bench cli
BUILD := pyproject.toml setup.py baton/_kv_copy.c router/_prefix_index.c
PROTOS := $(wildcard proto/baton/v1/*.proto)

.PHONY: venv demo test test-live test-computing test-waiting chart lint types stubs exact soak proto clean
venv: .venv/installed
demo: .venv/installed
	@$(BIN)/baton model fetch smollm2
	@$(BIN)/baton demo
# Tests that live on real processes and clocks come first on the cores; what only computes fills what they leave free, and
# those that mostly wait for a database or a fake Kubernetes follow it.
COMPUTING := $(wildcard tests/baton tests/bench tests/chart tests/docker tests/engine)
WAITING := $(wildcard tests/controller tests/kube)
LIVE := $(filter-out $(COMPUTING) $(WAITING),$(patsubst %/.,%,$(wildcard tests/*/.)))
PYTEST = $(BIN)/python -m pytest -m "not slow and not gpu"
test: .venv/installed-test lint
	@$(BIN)/baton model fetch smollm2
	@$(MAKE) -s -j4 types stubs test-waiting test-live
test-live: .venv/installed-test
	@$(PYTEST) $(LIVE)
test-computing: .venv/installed-test .venv/bin/helm # its output comes at its end, in one piece
	@mkdir -p build; nice -n 19 $(PYTEST) -p no:cacheprovider --timeout 600 $(COMPUTING) > build/$@.txt 2>&1; status=$$?; cat build/$@.txt; exit $$status
test-waiting: test-computing
	@mkdir -p build; nice -n 5 $(PYTEST) -p no:cacheprovider $(WAITING) > build/$@.txt 2>&1; status=$$?; cat build/$@.txt; exit $$status
chart: .venv/installed-test .venv/bin/helm # chart, images, Kubernetes, slow tests too (as root also real Ray on pods); packs build/baton-*.tgz
	@$(BIN)/python -m pytest -m "not gpu" tests/chart tests/docker tests/kube
	@$(BIN)/helm package deploy/helm/baton --destination build
lint: .venv/installed-test
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports
types: .venv/installed-test
	@nice $(BIN)/mypy $(PACKAGES) tests
stubs: .venv/installed-test # the generated stubs in baton/v1 are those of proto/
	@rm -rf build/stubs && $(MAKE) -s proto STUBS=build/stubs && diff -r -x __pycache__ -x __init__.py build/stubs/baton/v1 baton/v1
exact: .venv/installed-test
	@$(BIN)/python -m pytest -m slow -k exact --timeout 3600
soak: .venv/installed-test # ten minutes; BATON_SOAK_SEED=N draws again what a printed seed drew
	@$(BIN)/python -m pytest tests/soak -m slow -s
proto: STUBS ?= .
proto: .venv/installed-test
	@mkdir -p $(STUBS) && $(BIN)/python -m grpc_tools.protoc -I proto --python_out=$(STUBS) --grpc_python_out=$(STUBS) \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --mypy_out=quiet:$(STUBS) --mypy_grpc_out=quiet:$(STUBS) $(PROTOS)
clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info baton/*.so router/*.so

.venv/bin/python:
	@echo "Creating .venv" && $(PYTHON) -m venv .venv
.venv/bin/helm: tests/chart/helm_binary.py | .venv/installed-test
	@echo "Fetching Helm (37 MB)" && $(BIN)/python -m tests.chart.helm_binary $(BIN)
.venv/installed: $(BUILD) | .venv/bin/python
	@echo "Installing Baton and what it needs (torch and ray are large: some minutes)" && $(call INSTALL,.[worker]) && touch $@
.venv/installed-test: $(BUILD) | .venv/bin/python
	@echo "Installing Baton with its tests and tools (some minutes)" && $(call INSTALL,.[worker$(,)test$(,)dev]) && touch $@
