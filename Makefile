# Every command a developer needs. Set-up happens by itself and only where something is missing: see tools/setup.sh.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-change test-portable test-window test-point test-all test-quick bench gpu-bundle docs lint lock clean uv core dev full

# A folder of requirements/stacks, each with an environment of its own
export STACK ?= current
RUN := . tools/env.sh;
# Linters read the types of one stack.
IF_CURRENT := $(if $(filter current,$(STACK)),lint)
PORTABLE := $(addprefix tests/, core/test_groups.py core/test_layouts.py core/test_offload.py core/test_vocabulary.py core/test_standalone.py examples golden unit/test_options.py unit/test_versions.py)
PLUGINS := tests/bridge/test_plugin.py tests/bridge/test_restoration.py tests/verl

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: core ## Show the package at work on CPU ranks (a minute or two, set-up included)
	@$(RUN) python -m testing.demo $(ARGS)

test: full $(IF_CURRENT) ## Linters, then tests on the real stack: half an hour (its first set-up compiles for about 10 minutes)
ifneq ($(STACK)$(ARGS),current)
	$(RUN) python -m pytest $(ARGS)
else
	$(RUN) python -m pytest --numprocesses 2 tests/unit
	$(RUN) python -m pytest --ignore tests/unit
	for stack in verl newest-torch; do $(MAKE) test-portable STACK=$$stack; done
endif

test-change: dev ## Unit tests and golden checkpoints, without Transformer Engine: what CI runs on each change
	$(RUN) python -m pytest --numprocesses 2 tests/unit tests/golden

# Hosts that no check installs on a stack lie beside it as files, to be read.
test-portable: dev ## Tests that need no Transformer Engine, on another STACK: two minutes
	$(RUN) pins=requirements/stacks/$$STACK; [[ ! -f $$pins/full.txt ]] || \
	  grep -hE '^(megatron-bridge|verl)==' "$$pins"/{full,no-deps}.txt | uv pip install --quiet --no-deps \
	    --target "$$(python -c 'import sys; print(sys.prefix)')/sources" --requirements -
	$(RUN) python -m pytest $(PORTABLE)

test-window: ## A part of the tests on every stack that has no run of its own; writes docs/stacks/ (half an hour)
	for stack in torch-2.12 torch-2.14 verl-0.9.0 bridge-0.6.0; do $(MAKE) test-point STACK=$$stack; done

test-point: full
	$(RUN) python -m pytest --record $(PORTABLE) $(PLUGINS)

test-all: full lint ## Linters, then every test with every case of what `make test` samples; writes docs/soak/ and docs/soak.md (two hours)
	$(RUN) MBRIDGE_SOAK=1 python -m pytest --timeout 3600 $(ARGS)

test-quick: full ## Every unit test, and of each family one pair of layouts: less than five minutes
	$(RUN) python -m pytest -m quick $(ARGS)

bench: full ## All formats in real training, then saves and loads beside the disk, then stalls (ARGS=--quick: a look)
	$(RUN) for part in benchmarks benchmarks.disk benchmarks.beside; do python -m $$part $(ARGS); done

gpu-bundle: uv ## Collect in out/gpu-bundle what a GPU machine without a network lacks; tools/gpu_check.sh checks it there
	tools/gpu_bundle.sh

docs: dev ## Build the documentation site in out/site
	$(RUN) zensical build --clean --strict

lint: dev ## Style, types, architecture, shell scripts
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(RUN) lint-imports --no-logo
	$(RUN) shellcheck tools/*.sh recipes/verl/*.sh examples/*.sh .ci/run

lock: uv ## Resolve the requirements of a STACK into its lock.txt again (ARGS=--upgrade takes newer versions)
	$(RUN) pins=requirements/stacks/$$STACK; more=(); \
	[[ ! -f $$pins/full.txt ]] || more=(--overrides "$$pins"/{overrides,full,cuda}.txt requirements/{full,build}.txt); \
	uv pip compile --quiet --no-annotate --custom-compile-command "make lock STACK=$$STACK" $(ARGS) "$${more[@]}" \
	  --output-file "$$pins/lock.txt" "$$pins"/{core,dev}.txt requirements/{core,dev}.txt

clean: ## Remove .venv and everything else that was generated here (the compiled wheel stays in the user's cache)
	rm -rf .venv .venv-* build dist out *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

uv core dev full:
	@tools/setup.sh $@
