# make demo: MAML with and without Meta-dropout on the built-in characters, in a few minutes
# make test: the test suite        make quick: a part of it, in under a minute        make check: linters and types
# make docs: the documentation site, in site/
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

.PHONY: demo test quick check docs fuzz rounds clean

demo: $(READY)
	$(BIN)/metadropout demo

# With METADROPOUT_DATA set to a folder with Omniglot or CIFAR-100, the tests on real data run, too.
test: $(DEV)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

# Of each room those tests that say most of it in the least time: about a minute of processor time in all.
QUICK := test_golden.py test_config.py test_registry.py test_noise.py test_files.py test_safe_yaml.py test_layout.py \
  networks ops/test_precision.py ops/test_choices.py perturbations/test_metadropout.py \
  perturbations/test_shared_samples.py learners/test_metasgd.py learners/test_batched.py learners/test_protonet.py \
  data/test_registry.py data/test_episodes.py data/test_folder.py data/test_safe_pickle.py data/test_archives.py \
  data/test_identity.py runs training/test_checkpoints.py training/test_metrics.py robustness/test_attacks.py \
  analysis/test_verdict.py analysis/report/test_comparison.py analysis/report/test_charts.py \
  cli/test_progress.py
quick: $(DEV)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal -m "not slow" $(addprefix tests/,$(QUICK))

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Warnings are errors, links to other pages and to their headings are checked.
docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open site/index.html; with its search: python3 -m http.server --directory site"

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
