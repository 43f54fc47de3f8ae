# make demo: MAML with and without Meta-dropout on the built-in characters, in a few minutes
# make test: the test suite        make check: linters and types        make docs: the documentation site, in site/
# make fuzz SECONDS=300: spoilt files for every reader, that long each     make rounds: kills and simultaneous starts
# make clean: remove the environment
PYTHON ?= python3.11
ifeq ($(shell command -v $(PYTHON) 2>/dev/null),)
  PYTHON := python3
endif
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
READY := .venv/.installed
DEV := .venv/.installed-dev

.PHONY: demo test check docs fuzz rounds clean

demo: $(READY)
	$(BIN)/metadropout demo

# With METADROPOUT_DATA set to a folder with Omniglot or CIFAR-100, the tests on real data run, too.
test: $(DEV)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Warnings are errors, links to other pages and to their headings are checked.
docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open site/index.html"

# docs/reliability.md says what is shown by these two. A reader that fails stops, and its input is kept.
SECONDS := 60
fuzz: $(DEV)
	PYTHONPATH=tests $(BIN)/python -m reliability.fuzz $(READERS) --seconds $(SECONDS)

rounds: $(DEV)
	PYTHONPATH=tests $(BIN)/python -m reliability.rounds

# What a user needs, in less time than what a developer needs.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e '.[plots]'
	touch $@

$(DEV): $(READY)
	$(PIP) -e '.[dev]'
	touch $@

clean:
	rm -rf .venv
