# Each target works alone on a fresh clone: it makes .venv and installs what it needs.
#   make train   the main job: Fashion-MNIST on one device, then on all (options: make train ARGS="--epochs 3")
#   make test    everything that CI checks: format, rules, types, layers, tests, doctests, the README's code
#   make check   the same without the tests
#   make bench   evener and its peers (minutes); results go to benchmarks/results/
#   make bench-gluon     evener's explicit style against its one line (some minutes)
#   make bench-unequal   the same with a second core that is slowed (half an hour)
#   make bench-recovery  what one death costs, against a restart from a checkpoint (half an hour)
#   make bench-reproducible  the same bits on any devices with a grid, and what that costs (ten minutes)
#   make soak    training while helpers are killed, stopped and short of memory at random (MINUTES=30)
PYTHON ?= python3
VENV   ?= .venv
MINUTES ?= 30
BIN    := $(VENV)/bin

.PHONY: train test check bench bench-gluon bench-unequal bench-recovery bench-reproducible soak clean

# The stamp is renewed when what it installs changes.
$(VENV)/.dev: pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[plot]"
	touch $@

$(VENV)/.bench: $(VENV)/.dev requirements-bench.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-bench.txt
	touch $@

train: $(VENV)/.dev
	$(BIN)/evener train $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check
	# Three: whose test waits for helpers to start does not need its core.
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "not gpu and not quiet" $(ARGS)
	$(BIN)/python -m pytest -m "quiet and not gpu" $(ARGS) || [ $$? = 5 ]  # 5: none chosen

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/peers/main.py $(ARGS)

bench-gluon: $(VENV)/.bench
	$(BIN)/python benchmarks/gluon/main.py $(ARGS)

bench-unequal: $(VENV)/.bench
	$(BIN)/python benchmarks/unequal/main.py $(ARGS)
	$(BIN)/python benchmarks/unequal/shares_over_time.py

bench-recovery: $(VENV)/.bench
	$(BIN)/python benchmarks/recovery/main.py $(ARGS)

bench-reproducible: $(VENV)/.bench
	$(BIN)/python benchmarks/reproducible/main.py $(ARGS)

soak: $(VENV)/.dev
	$(BIN)/python tests/faults/soak.py --minutes $(MINUTES) $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis out
