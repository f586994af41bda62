# Every command a developer needs. Set-up happens by itself and only where something is missing: see tools/setup.sh.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-all test-quick bench gpu-bundle docs lint lock clean uv core dev full

RUN := . tools/env.sh;

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: core ## Show the package at work on CPU ranks (a minute or two, set-up included)
	@$(RUN) .venv/bin/python -m mbridge_fsdp_ckpt.testing.demo $(ARGS)

test: full lint ## Linters, then tests on the real stack: half an hour (its first set-up compiles for about 10 minutes)
	$(RUN) python -m pytest $(ARGS)

test-all: full lint ## Linters, then every test with every case of what `make test` samples; writes docs/soak/ and docs/soak.md (two hours)
	$(RUN) MBRIDGE_SOAK=1 python -m pytest --timeout 3600 $(ARGS)

test-quick: full ## Every unit test, and of each family one pair of layouts: less than five minutes
	$(RUN) python -m pytest -m quick $(ARGS)

bench: full ## Run the benchmarks
	$(RUN) python -m benchmarks $(ARGS)

gpu-bundle: uv ## Collect in out/gpu-bundle what a GPU machine without a network lacks; tools/gpu_check.sh checks it there
	tools/gpu_bundle.sh

docs: dev ## Build the documentation site in out/site
	$(RUN) zensical build --clean --strict

lint: dev ## Style, types, architecture, shell scripts
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(RUN) lint-imports --no-logo
	$(RUN) shellcheck tools/*.sh recipes/verl/*.sh .ci/run

lock: uv ## Resolve requirements/*.txt into requirements/lock.txt again (ARGS=--upgrade takes newer versions)
	.venv/bin/uv pip compile --quiet --no-annotate --custom-compile-command "make lock" $(ARGS) \
	  --overrides requirements/overrides.txt --output-file requirements/lock.txt requirements/{full,dev,build}.txt

clean: ## Remove .venv and everything else that was generated here (the compiled wheel stays in the user's cache)
	rm -rf .venv build dist out *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

uv core dev full:
	@tools/setup.sh $@
