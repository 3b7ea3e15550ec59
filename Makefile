# Two commands: `make site` shows the collection at work on this machine, `make test` tests all that this machine can.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
export PATH := $(BIN):$(PATH)

.PHONY: site test clean help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 14

$(VENV)/controller.done: requirements.txt
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"python3 is {v[0]}.{v[1]}; expected 3.11 or newer. Name one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.txt
	mkdir -p $(VENV)/collections/ansible_collections/blackwell
	ln -sfn $(CURDIR) $(VENV)/collections/ansible_collections/blackwell/inference
	touch $@

$(VENV)/tests.done: $(VENV)/controller.done tests/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r tests/requirements.txt
	touch $@
