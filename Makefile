# make help lists the targets. Each one creates the environment it needs by itself (.ci/env).
#
#   EXTRAS       more extras of pyproject.toml for .venv, e.g. make demo EXTRAS=cuda13
#   ARGS         more arguments for experiments/run_generate.py, e.g. make demo ARGS='--policy lfu'
#   WORKERS      processes that share the tests: a number, 0 for none, or logical (the default), one a core, 8 at most
#   PYTEST_ARGS  more arguments for pytest, e.g. make test PYTEST_ARGS='tests/host_offload -x'

PYTHON := .venv/bin/python
ORACLE := .venv-oracle/bin/python
EXTRAS ?=
ARGS ?=
WORKERS ?= logical
PYTEST_ARGS ?=

# The tests of a file share models that are loaded once, so a file goes to one worker; tests/conftest.py says in which
# order. A worker of two took 3.5 GB. One run compiles as users do, the other one in less time; each does its own tests
# (5: it has none of those that were asked for).
PYTEST := $(PYTHON) -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder
PYTEST_TWICE = failed=; for how in quickly fully; do \
	$(PYTEST) --compiled $$how $(1) $(PYTEST_ARGS) || [ $$? = 5 ] || failed=1; done; [ ! $$failed ]

.PHONY: help env demo test quick lint format oracle lock clean distclean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: ## create or refresh .venv with what the tests need
	@.ci/env .venv test $(EXTRAS)

demo: ## stream text from the bundled model with a quarter of its experts cached
	@.ci/env .venv $(EXTRAS)
	@$(PYTHON) experiments/run_generate.py --cache-rate 0.25 $(ARGS)

test: env ## run every test
	$(call PYTEST_TWICE)

quick: env ## run the tests that are not marked slow
	$(call PYTEST_TWICE,-m "not slow")

lint: env ## check style and formatting
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: env ## mend what ruff can mend
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

oracle: ## recompute the expected outputs with transformers and torch; fail on any difference
	@.ci/env .venv-oracle oracle
	$(ORACLE) tests/tiny_models.py --check
	$(ORACLE) tests/sampling_oracle.py --check
	$(ORACLE) tests/torch_reference.py --check

lock: ## write the newest versions of all dependencies to .ci/constraints.txt
	@CONSTRAINTS=/dev/null .ci/env .venv-lock test
	@{ head -n 1 .ci/constraints.txt && .venv-lock/bin/python -m pip freeze --exclude-editable; } >.ci/constraints.new
	@mv .ci/constraints.new .ci/constraints.txt
	@rm -rf .venv-lock

clean: ## remove caches and build products
	rm -rf build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis
	find moe_jax host_offload pallas_kernels experiments notebooks tests -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## also remove the environments
	rm -rf .venv .venv-oracle .venv-lock
