# Two commands: `make site` shows the collection at work on this machine, `make test` tests all that this machine can.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
DEMO_VENV := demo/host/opt/sglang/venv
ORACLE_VENV := .cache/oracle-venv
ORACLE_PIP ?=# e.g. --index-url of an index with PyTorch builds without CUDA
DEMO_LEFTOVER := demo/host/var/cache/sglang/.cache/flashinfer/0.6.1/120a/cached_ops/trtllm_comm
DEMO_PACKAGES := flashinfer-python==0.6.1 sglang==0.5.8

# Nothing is left behind in the home folder, and nothing outside the checkout decides what runs.
export PATH := $(BIN):$(PATH)
export ANSIBLE_HOME := $(CURDIR)/.cache/ansible
export PIP_CACHE_DIR := $(CURDIR)/.cache/pip
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP := $(BIN)/python -m pip
COLLECTIONS := $(CURDIR)/$(VENV)/collections

.PHONY: help site test lint sanity units releases oracle molecule corpus compatibility benchmark kernels clean
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 14

# This checkout, whatever else is installed. Molecule has a path of its own.
site units benchmark: export ANSIBLE_COLLECTIONS_PATH := $(COLLECTIONS)

site: $(VENV)/controller.done $(DEMO_VENV)/packages.done ## Run site.yml on the demo host: this machine, below demo/host/
	ansible-playbook site.yml -l gpu-nodes

test: lint sanity units releases molecule ## Test all that can be tested on this machine

corpus: $(ORACLE_VENV)/done ## Test every published release, and record what was found in docs/compatibility.md (20 minutes)
	pytest tests/corpus --every-release --numprocesses auto --ignore tests/corpus/test_compatibility.py
	$(MAKE) compatibility

compatibility: $(VENV)/tests.done ## Write docs/compatibility.md from what make corpus recorded
	PYTHONPATH=$(COLLECTIONS) python -m ansible_collections.blackwell.inference.tests.corpus.compatibility

benchmark: $(VENV)/tests.done ## Time one gate call against core modules, locally and over ssh to this machine
	PYTHONPATH=$(COLLECTIONS) python tests/benchmarks/gate_call.py

kernels: $(VENV)/tests.done ## Build the fusion kernels for SM120 with nvcc; needs a CUDA toolkit, no GPU (10 minutes)
	pytest tests/kernels -s

clean: ## Remove all that the other targets have made
	rm -rf $(VENV) .cache .ansible .mypy_cache .pytest_cache .ruff_cache .hypothesis demo/host dist audit proof tests/output
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/controller.done: requirements.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"$(PYTHON) is Python {v[0]}.{v[1]}; expected 3.11 or newer. Name one: make PYTHON=/path/to/python3 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --require-hashes -r requirements.txt
	mkdir -p $(COLLECTIONS)/ansible_collections/blackwell
	rm -rf $(COLLECTIONS)/ansible_collections/blackwell/inference
	ln -s ../../../.. $(COLLECTIONS)/ansible_collections/blackwell/inference
	touch $@

$(VENV)/tests.done: $(VENV)/controller.done tests/requirements.txt
	$(PIP) install --quiet --require-hashes -r tests/requirements.txt
	touch $@

# The real packages, without their GPU dependencies: the gates are in their files.
$(DEMO_VENV)/packages.done: $(VENV)/controller.done
	$(BIN)/python -m venv --without-pip $(DEMO_VENV)
	$(PIP) --python $(DEMO_VENV)/bin/python install --quiet --no-deps --no-compile $(DEMO_PACKAGES)
	mkdir -p $(DEMO_LEFTOVER)
	echo 'simulated: what an earlier start of the server would have compiled' > $(DEMO_LEFTOVER)/trtllm_comm.so
	touch $@

lint: $(VENV)/tests.done
	ruff check .
	ruff format --check .
	mypy plugins/module_utils
	yamllint --strict .
	ansible-lint --offline --profile production
	antsibull-changelog lint
	antsibull-docs lint-collection-docs --plugin-docs .

units: $(VENV)/tests.done
	pytest --numprocesses auto

# The released packages, judged by their own code: a spread of releases here, all of them in `make corpus`.
releases: $(ORACLE_VENV)/done
	pytest tests/corpus --numprocesses auto

oracle: $(ORACLE_VENV)/done

$(ORACLE_VENV)/done: $(VENV)/tests.done tests/corpus/requirements.txt
	$(BIN)/python -m venv $(ORACLE_VENV)
	$(PIP) --python $(ORACLE_VENV)/bin/python install --quiet $(ORACLE_PIP) -r tests/corpus/requirements.txt
	touch $@

molecule: $(VENV)/tests.done
	bash molecule/run.sh

# ansible-test wants a path of its own kind and asks git for the files, so it works on a copy.
TREE := .cache/tree/ansible_collections/blackwell/inference
sanity: $(VENV)/tests.done
	rm -rf .cache/tree && mkdir -p $(TREE) .cache/home/.ansible/test/cache
	git ls-files -z --cached --others --exclude-standard | tar c --null --files-from=- | tar x -C $(TREE)
	git -C $(TREE) init --quiet && git -C $(TREE) add --all
	for version in $$(python -c 'import ansible_test, pathlib, re; print(*sorted(set(re.findall(r"\b2\d\.\d(?:\.\d)?\b", (pathlib.Path(ansible_test.__path__[0]) / "_internal/python_requirements.py").read_text()))))'); do \
	  cp tests/sanity/get_pip.py .cache/home/.ansible/test/cache/get_pip_$${version//./_}.py; done
	cd $(TREE) && HOME=$(CURDIR)/.cache/home PATH=$(BIN):/usr/sbin:/usr/bin:/sbin:/bin ansible-test sanity --local --color no \
	  --python $$(python -c 'import sys; print("{}.{}".format(*sys.version_info))')
