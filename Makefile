# make run     FedSAP against FedProto, FedAvg and local training on the built-in digits; writes runs/digits
# make test    the test suite, then the checks
# make check   formatting, lint and types
# make setup   only .venv, which the others make as they need it
# make clean   removes .venv and caches; leaves runs/
#
# PYTHON     another interpreter, 3.11 or newer:  make test PYTHON=python3.12
# TEST_FLAGS  of pytest: two files at a time, in their order: tests of Flower come early and wait more than they work
# PIP_FLAGS  more for pip, such as --extra-index-url with an index of torch builds without CUDA

PYTHON ?= python3
PIP_FLAGS ?=
TEST_FLAGS ?= --numprocesses 2 --dist loadfile --no-loadscope-reorder
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test check setup clean
.DELETE_ON_ERROR:

run: $(STAMP)
	@$(BIN)/fedsap run --out runs/digits --resume --method fedsap --method fedproto --method fedavg --method local

# The checks run even when a test fails. They come last and are short: pytest's summary stays in sight.
test: $(STAMP)
	@failed=0; \
	$(BIN)/python -m pytest $(TEST_FLAGS) || failed=1; \
	$(MAKE) --no-print-directory check || failed=1; \
	exit $$failed

check: $(STAMP)
	@failed=0; \
	$(BIN)/python -m ruff format --check --output-format concise . || failed=1; \
	$(BIN)/python -m ruff check --output-format concise . || failed=1; \
	$(BIN)/python -m mypy || failed=1; \
	exit $$failed

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || \
	{ echo "PYTHON: no '$(PYTHON)' found; takes Python 3.11 or newer, e.g. make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "PYTHON: got $$("$(PYTHON)" --version 2>&1); takes 3.11 or newer, e.g. make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV), once; this takes a minute or a few."
	@"$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
