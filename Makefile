# make demo      trains a small network on real digits and shows all 18 quantities
# make examples  runs every script in examples/, each of which checks itself against autograd
# make test      runs the tests
# make docs      builds the documentation site in out/site
# make release   builds wheel and site of the tag on this commit, in out/release
# make bench     measures every quantity as a ratio to plain forward+backward
# make check-models   runs models of torchvision, transformers and timm against plain autograd (an hour)
# Each sets up .venv by itself (Python >= 3.10); a second call finds it ready.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
PY := $(VENV)/bin/python
# what is imported is compiled then; most files never are
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

# tests and pages start many programs, each of which would compile the package anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo examples test lint doctest docs docs-serve docs-examples release bench check-models clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,8s/^# //p' Makefile

demo: $(VENV)/.has-demo
	$(PY) examples/demo.py $(ARGS)

examples: $(VENV)/.has-demo
	@for script in examples/[a-z]*.py; do \
		if [ $$script != examples/demo.py ]; then printf '\n== %s\n' $$script; $(PY) $$script || exit 1; fi; \
	done

# the tests of the site drive Chromium, where there is one
BROWSER := $(if $(shell command -v chromium || command -v chromium-browser || command -v google-chrome),$(VENV)/.has-browser)

test: $(VENV)/.has-demo $(VENV)/.has-test $(VENV)/.has-docs $(BROWSER)
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

lint: $(VENV)/.has-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

# bpk/rules and bpk/jacobians lead to their folders, so this visits every file once, by its installed name
doctest: $(VENV)/.has-test
	OMP_NUM_THREADS=1 $(PY) -m pytest -q --doctest-modules bpk --ignore=bpk/laplace_torch

# without network: nothing is fetched when the site is built or read
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.has-docs
	OMP_NUM_THREADS=1 $(PY) -m mkdocs build --quiet --strict $(ARGS)
	$(PY) -m tools.site.links out/site

docs-serve: export NO_MKDOCS_2_WARNING = 1
docs-serve: $(VENV)/.has-docs
	$(PY) -m mkdocs serve $(ARGS)

# runs the examples whose stored output belongs to an older source
docs-examples: $(VENV)/.has-demo $(VENV)/.has-docs
	OMP_NUM_THREADS=1 $(PY) -m tools.site.examples $(ARGS)

# wheel and site of the tag on this commit, into out/release
release: export NO_MKDOCS_2_WARNING = 1
release: $(VENV)/.has-dev $(VENV)/.has-docs
	$(PY) -m tools.release $(ARGS)

bench: $(VENV)/.has-bench
	$(PY) -m benchmarks $(ARGS)

# what README and site say about models of other packages: the pages name the commit that was checked
check-models: export OMP_NUM_THREADS = 1
check-models: $(VENV)/.has-demo $(VENV)/.has-hub
	$(PY) -m benchmarks.torchvision_models --write $(ARGS)
	$(PY) -m benchmarks.torchvision_models --without-converter --write $(ARGS)
	$(PY) -m benchmarks.hub_check --write $(ARGS)

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and f"bpk needs Python 3.10 or newer, and $(PYTHON) is {v[0]}.{v[1]}. Name another one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# one stamp per extra, so that each target installs only what it needs
$(VENV)/.has-%: pyproject.toml constraints.txt | $(VENV)/.created
	@echo "installing bpk[$*] into $(VENV) ..."
	@$(INSTALL) -e '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
