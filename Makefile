# demo, test, lint, wheel: each makes .venv on its first call and reuses it afterwards.
# gpu-test and bench install nothing: they run the checkout with the Python it is given (PYTHON=…, default python3).

VENV := .venv
STAMP := $(VENV)/.installed
VENV_PYTHON := $(VENV)/bin/python
RUN := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
DEMO_OUT := $(CURDIR)/out/demo

.DEFAULT_GOAL := help
.PHONY: help demo test law gold golden lint format wheel gpu-test bench links checkout clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

demo: $(STAMP) ## decode, score and report a small grid with the shipped model (CPU, minutes)
	$(RUN) $(VENV_PYTHON) -m dlmgrid.jobs.cli run jobs/grids/demo.yaml --out $(DEMO_OUT)
	$(RUN) $(VENV_PYTHON) -m dlmgrid.jobs.cli score $(DEMO_OUT) --confirm-run-unsafe-code
	$(RUN) $(VENV_PYTHON) -m dlmgrid.jobs.cli report $(DEMO_OUT)

test: $(STAMP) ## run the tests that need no GPU
	$(RUN) $(VENV_PYTHON) -m pytest -q -n 2 --dist loadfile --timeout 600 -m "not gpu and not law and not slow" $(ARGS)

law: $(STAMP) ## hold 200,000 draws of every method and decoder to the exact law (CPU, minutes)
	$(RUN) $(VENV_PYTHON) -m pytest -q -m law $(ARGS)

gold: $(STAMP) ## score the gold answers of every item of every public set (DLMGRID_DATA=DIR; ARGS="-k mbpp")
	$(RUN) $(VENV_PYTHON) -m pytest -q -m slow tests/workers/benchmarks $(ARGS)

golden: $(STAMP) ## write the frozen prompts in tests/golden/ again
	$(RUN) $(VENV_PYTHON) tests/golden/prompts.py

lint: $(STAMP) ## ruff (lint, format) and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(STAMP) ## let ruff rewrite the sources
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

wheel: $(STAMP) ## build a wheel from the committed tree into dist/
	rm -rf out/export && mkdir -p out/export dist
	git archive HEAD | tar -x -C out/export
	$(VENV_PYTHON) -m build --wheel --outdir dist out/export

gpu-test: checkout ## run the tests that need a CUDA device, with PYTHON (default python3)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(or $(PYTHON),python3) -m pytest -q -m gpu tests/kernels tests/workers/engine tests/workers/decoding tests/workers/drafting tests/workers/folding tests/workers/test_unit_runner.py $(ARGS)

bench: checkout ## time passes, decoding and drafting as measured / goal, with PYTHON (default python3)
	$(or $(PYTHON),python3) -m dlmgrid.jobs.bench $(ARGS)

links: ## put back the links in dlmgrid/ that a zip or core.symlinks=false has lost
	@for folder in cluster workers kernels jobs; do \
		rm -rf dlmgrid/$$folder && ln -s ../$$folder dlmgrid/$$folder || exit 1; \
	done

clean: ## remove the environment and what builds leave behind
	rm -rf $(VENV) build dist out/export *.egg-info .pytest_cache .ruff_cache .mypy_cache

# The package is the checkout seen through dlmgrid/'s links, so nothing works without them.
checkout:
	@for folder in cluster workers kernels jobs; do \
		test -L dlmgrid/$$folder -o -d dlmgrid/$$folder || { \
			echo "error: dlmgrid/$$folder is not a link to $$folder/ (an unpacked zip, or git's core.symlinks=false); run 'make links'" >&2; \
			exit 2; \
		}; \
	done

# torch goes first and alone, so that a slow or interrupted download of it is not repeated with the rest.
$(STAMP): pyproject.toml constraints.txt | checkout
	@python='$(PYTHON)'; \
	for candidate in $(if $(PYTHON),,python3.12 python3.11 python3.13 python3); do \
		test -z "$$python" || break; \
		"$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
			&& python="$$candidate"; \
	done; \
	"$${python:-false}" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "error: $${python:-no Python} is not a Python 3.11 or newer with venv; install one (Debian, Ubuntu: apt install python3.12 python3.12-venv) or name it: make PYTHON=/path/to/python" >&2; \
		exit 2; \
	}; \
	echo "setting up $(VENV) with $$($$python --version)"; \
	"$$python" -m venv --clear $(VENV)
	$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@
