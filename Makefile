# `make test` is everything that CI runs. Each target makes the environments that it needs and reuses them afterwards.
#
#   PYTHON=python3.11       interpreter for new environments (3.10 or newer, one that torch-xla 2.9 has wheels for)
#   VENV=dir                environment with torch 2.9 and torch-xla 2.9 (about 7 GB: PyPI's torch brings CUDA)
#   VENV_PLAIN=dir          environment without torch-xla, for all tests not marked `xla`: Python 3.12 or newer with torch
#                           2.14, as AWS ships them, where such an interpreter is found, else PYTHON with torch 2.13
#   PYTHON_PLAIN=python3.13 interpreter for it
#   PYTHONS="3.12 3.13"     Pythons of `make test-pythons`; those that are not found are left out
#   TORCH="torch==2.15.*"   torch of `make test-pythons`
#   PYTEST_ARGS="-k name"   further arguments for pytest
#   STORE=s3                `make demo` saves to an S3 server, which it starts on this machine
#   MUTANTS_ARGS="core/votes"  further arguments for `make mutants` (python -m tests.mutants --help)
#   BENCH_ARGS="--quick"    further arguments for `make bench` (python -m tools.bench --help) and its kin

PYTHON ?= python3
VENV ?= .venv
VENV_PLAIN ?= .venv-plain
PYTHON_PLAIN ?= $(or $(shell tools/find_python 3.12 3.13 3.14),$(PYTHON))
PYTHONS ?= 3.10 3.12 3.13 3.14
TORCH ?= torch==2.14.*
TORCH_XLA := 'torch==2.9.*' 'torch-xla==2.9.*'
TORCH_PLAIN ?= 'torch==2.14.*; python_version >= "3.12"' 'torch==2.13.*; python_version < "3.12"'
PYTEST_ARGS ?=
BENCH_ARGS ?=
MUTANTS_ARGS ?=
STORE ?=

XLA_READY := $(VENV)/.nxd-ckpt-installed
PLAIN_READY := $(VENV_PLAIN)/.nxd-ckpt-installed
BENCH_READY := $(VENV)/.nxd-ckpt-bench-installed

# TorchTitan and what its checkpoint manager imports, 8 MB; it depends on far more, which the manager does not use. The
# release that AWS ships lies beside it, in a folder of its own.
TITAN := 'torchtitan==0.3.*' 'spmd_types==0.2.3' tyro docstring_parser typeguard
OLD_TITAN := --target $(VENV_PLAIN)/torchtitan-0.2.2 'torchtitan==0.2.2'

# Modules that may hold tests for the environment with torch-xla: importing the others takes as long as some tests.
OF_XLA := grep -rlE 'mark\.(xla|both)' tests --include='test_*.py' | sort

# Ranks are processes and share few cores: one thread each.
export OMP_NUM_THREADS := 1
# Hundreds of processes import torch and this package: compiled once, by the first that needs it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test lint test-xla test-plain test-pythons soak soak-xla soak-plain mutants bench bench-reshard bench-diff bench-hf bench-migrate bench-plugins bench-s3 bench-scale bench-hosts bench-tiers bench-statistics demo site

# Side by side, as none of the three keeps two processors busy: tests of test-plain often wait, so four of them run at
# once. Each shows what it said when it is done.
test:
	$(MAKE) --jobs 2 --output-sync=target lint test-xla test-plain

lint: $(XLA_READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m tools.prose

test-xla: $(XLA_READY)
	$(VENV)/bin/python -m pytest -m "not soak and (xla or not once)" $$($(OF_XLA)) $(PYTEST_ARGS)

test-plain: $(PLAIN_READY)
	$(VENV_PLAIN)/bin/python -m pytest -m "plain and not soak" -n 4 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# The tests of `test-plain` on other interpreters; no part of `make test`. Each gets an environment of 1 to 6 GB.
test-pythons:
	set -e; for version in $(PYTHONS); do \
	    python=$$(tools/find_python $$version); \
	    if test -z "$$python"; then echo "Python $$version is not found: left out"; continue; fi; \
	    $(MAKE) test-plain VENV_PLAIN=$(VENV_PLAIN)-$$version PYTHON_PLAIN=$$python TORCH_PLAIN='"$(TORCH)"'; \
	done

# The cases that `make test` leaves out, each in the environment where `make test` has the others of its test. It takes
# hours: ten million damaged files alone take two of one processor. PYTEST_ARGS="-k 'not many_damaged'" leaves them out.
soak:
	$(MAKE) --keep-going soak-xla soak-plain

soak-xla: $(XLA_READY)
	$(VENV)/bin/python -m pytest -m "soak and (xla or not once)" --hypothesis-profile=soak $$($(OF_XLA)) $(PYTEST_ARGS)

soak-plain: $(PLAIN_READY)
	$(VENV_PLAIN)/bin/python -m pytest -m "plain and soak" --hypothesis-profile=soak $(PYTEST_ARGS)

# Changes the code, one place at a time, to see whether a test notices; no part of `make test`.
mutants: $(PLAIN_READY)
	$(VENV_PLAIN)/bin/python -m tests.mutants $(MUTANTS_ARGS)

bench: $(BENCH_READY)
	$(VENV)/bin/python -m tools.bench $(BENCH_ARGS)

bench-reshard: $(PLAIN_READY)
	$(VENV_PLAIN)/bin/python -m tools.bench.convert $(BENCH_ARGS)
	$(VENV_PLAIN)/bin/python -m tools.bench.load $(BENCH_ARGS)

bench-hf: $(PLAIN_READY)
	$(VENV_PLAIN)/bin/python -m tools.bench.hugging_face $(BENCH_ARGS)

bench-migrate: $(PLAIN_READY)
	$(VENV_PLAIN)/bin/python -m tools.bench.migrate $(BENCH_ARGS)

bench-plugins: $(PLAIN_READY)
	$(VENV_PLAIN)/bin/python -m tools.bench.plugins $(BENCH_ARGS)

bench-diff: $(PLAIN_READY)
	$(VENV_PLAIN)/bin/python -m tools.bench.diff $(BENCH_ARGS)

bench-scale: $(PLAIN_READY)
	$(VENV_PLAIN)/bin/python -m tools.bench.scale $(BENCH_ARGS)

bench-hosts: $(PLAIN_READY)
	$(VENV_PLAIN)/bin/python -m tools.bench.hosts $(BENCH_ARGS)

bench-tiers: $(PLAIN_READY)
	$(VENV_PLAIN)/bin/python -m tools.bench.tiers $(BENCH_ARGS)

bench-statistics: $(PLAIN_READY)
	$(VENV_PLAIN)/bin/python -m tools.bench.statistics $(BENCH_ARGS)

bench-s3: $(PLAIN_READY)
	$(VENV_PLAIN)/bin/python -m pip install --quiet awscrt s3torchconnector
	$(VENV_PLAIN)/bin/python -m tools.bench.s3 $(BENCH_ARGS)

demo: $(XLA_READY)
	$(VENV)/bin/python examples/demo.py $(if $(STORE),--store $(STORE))

# The documentation site, in site/.
site: $(PLAIN_READY)
	NO_MKDOCS_2_WARNING=1 $(VENV_PLAIN)/bin/python -m mkdocs build --strict

# The pip that comes with Python 3.11 and 3.12 takes three times as long to choose versions as today's, so it is upgraded
# first. Without --no-compile it would compile all of torch's modules, most of which no test imports. Those that are
# imported are compiled by one process that only collects tests; four would do it at the same time, each for itself.
# One at a time, as both write the project's metadata here; torch, which takes longest, comes before that. The stamp
# comes last and is newer than what was installed from, so an interrupted installation is taken up again.
$(XLA_READY): pyproject.toml setup.py
	test -x $(VENV)/bin/python || $(PYTHON) -m venv --upgrade-deps $(VENV)
	$(VENV)/bin/python -m pip install --quiet --no-compile $(TORCH_XLA)
	flock setup.py $(VENV)/bin/python -m pip install --quiet --no-compile --editable '.[xla,dev]'
	touch $@

$(BENCH_READY): $(XLA_READY)
	$(VENV)/bin/python -m pip install --quiet --no-compile --editable '.[xla,dev,bench]'
	touch $@

$(PLAIN_READY): pyproject.toml setup.py
	test -x $(VENV_PLAIN)/bin/python || $(PYTHON_PLAIN) -m venv --upgrade-deps $(VENV_PLAIN)
	@echo "test-plain runs on $$($(VENV_PLAIN)/bin/python --version)"
	$(VENV_PLAIN)/bin/python -m pip install --quiet --no-compile $(TORCH_PLAIN)
	flock setup.py $(VENV_PLAIN)/bin/python -m pip install --quiet --no-compile --editable '.[dev]' $(TORCH_PLAIN)
	$(VENV_PLAIN)/bin/python -m pip install --quiet --no-compile --no-deps $(TITAN) || echo "TorchTitan is not tested: it needs Python 3.11"
	$(VENV_PLAIN)/bin/python -m pip install --quiet --no-compile --no-deps --upgrade $(OLD_TITAN)
	-$(VENV_PLAIN)/bin/python -m pytest --collect-only --quiet --quiet > /dev/null
	touch $@
