# make demo: MAML with and without Meta-dropout on the built-in characters, in a few minutes
# make test: the test suite        make check: linters and types        make clean: remove the environment
PYTHON ?= python3.11
ifeq ($(shell command -v $(PYTHON) 2>/dev/null),)
  PYTHON := python3
endif
BIN := .venv/bin
READY := .venv/.installed

.PHONY: demo test check clean

demo: $(READY)
	$(BIN)/metadropout demo

# With METADROPOUT_DATA set to a folder with Omniglot or CIFAR-100, the tests on real data run, too.
test: $(READY)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf .venv
