# make demo       installs into .venv and trains a small model on tp 2 x pp 2 x dp 2; its loss curve is loss.png
# make test       installs into .venv, then linter, type checker and tests
# make test-long  the long loops; their log goes to bench/results/
# make test-gpu   the tests that need a CUDA device
#
# PYTHON names the interpreter to start from. Where it has a torch that sees a GPU, its torch, triton and other packages are used as they are:
# the environment only adds to them. Elsewhere the environment gets TORCH; any build of torch 2.11 to 2.14 will do.
PYTHON ?= python3
TORCH  ?= torch==2.13.0

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
VENV := .venv
PY   := $(VENV)/bin/python
SEES_GPU := $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
IN_PARALLEL = $(shell $(PY) -c 'import xdist' 2>/dev/null && echo --numprocesses 3 --dist loadfile)
SOURCES  := pyproject.toml setup.py pymesh3d/__init__.py $(wildcard csrc/*)

.PHONY: demo test test-long test-gpu clean

demo: $(VENV)/installed
	$(PY) -m pymesh3d train --tp 2 --pp 2 --dp 2 --out loss.png

# Three files of tests at a time, where the plugin is here: many wait for processes that are killed, frozen or slow to start.
test: $(VENV)/installed-dev
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest -m 'not gpu and not long' $(IN_PARALLEL)

test-long: $(VENV)/installed-dev
	mkdir -p bench/results
	$(PY) -m pytest -m long | tee bench/results/test-long.log

test-gpu: $(VENV)/installed-dev
	$(PY) -m pytest -m gpu

clean:
	rm -rf $(VENV) build dist *.egg-info pymesh3d/_C.*.so

# On a GPU machine the environment sees all that PYTHON sees (PYTHON may itself be an environment, so --system-site-packages is not enough), its
# pip included, and `keep.txt` pins every package found there.
$(VENV)/ready:
	if $(SEES_GPU); then \
	    $(PYTHON) -m venv --without-pip $(VENV); \
	    $(PYTHON) -c 'import sys; [print(f"import site; site.addsitedir({p!r})") for p in sys.path if p.endswith("-packages")]' \
	        > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages_of_the_machine.pth"; \
	    $(PY) -m pip list --format=freeze > $(VENV)/keep.txt; \
	else \
	    $(PYTHON) -m venv $(VENV); \
	    $(PY) -m pip install $(TORCH); \
	fi
	touch $@

# `[dev]` for installed-dev, `[plot]` for installed. A GPU machine may be offline: what its packages lack is fetched only if a registry answers.
$(VENV)/installed:     EXTRAS := [plot]
$(VENV)/installed-dev: EXTRAS := [dev]
$(VENV)/installed $(VENV)/installed-dev: $(VENV)/ready $(SOURCES)
	if [ -f $(VENV)/keep.txt ]; then \
	    $(PY) -m pip install -e '.$(EXTRAS)' --no-build-isolation --constraint $(VENV)/keep.txt --retries 0 --timeout 10 || { \
	        echo 'Not all could be fetched: going on with the packages that are here.'; \
	        $(PY) -m pip install -e . --no-build-isolation --no-deps; \
	    }; \
	else \
	    $(PY) -m pip install -e '.$(EXTRAS)'; \
	fi
	touch $@
