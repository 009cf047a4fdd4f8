# `make test` and `make demo` need nothing but Python >= 3.11 and make; the rest is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: test quick check docs demo notebooks fuzz compare clean

# Bytecode of what is imported is written when it is imported first: compiling all of it takes half a minute.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[dev]"
	touch $@

# One thread a worker: on two cores, more would wait for each other. The third worker uses the time in which others wait
# for processes that their tests have started; `worksteal` keeps all of them busy.
# Bytecode is kept, whatever the environment says: the tests start many processes.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

# mypy and mkdocs use one core each
test: .venv/installed
	$(MAKE) -j2 check docs
	$(PYTEST)

# before a push: the numerical core, the propositions of the paper and the examples in docstrings, in about a minute
quick: .venv/installed
	$(PYTEST) -q tests/linalg tests/grid tests/solvers tests/paper gpytorch_gaps

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# the site goes to build/site; any warning is an error (and the theme keeps its advertisement to itself)
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

demo: .venv/demo
	$(BIN)/python -m gpytorch_gaps demo

# the demo needs less than the tests: what they install serves as well
.venv/demo: pyproject.toml constraints.txt
	test -e .venv/installed || { $(PYTHON) -m venv .venv && $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[plot]"; }
	touch $@

# every notebook from a clean kernel, on something small
notebooks: .venv/installed
	$(BIN)/python -m pytest -m "benchmark or not benchmark" tests/test_notebooks.py

fuzz: .venv/installed
	$(BIN)/python -m pytest -m benchmark tests/test_fuzz.py tests/test_certificate.py

# fifty steps of Adam beside dense GPyTorch, with 1,500 observations: a quarter of an hour
compare: .venv/installed
	$(BIN)/python -m pytest -m benchmark tests/workflow

clean:
	rm -rf .venv results build
