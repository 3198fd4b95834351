# Two commands matter: `make demo` and `make test`. Each sets up .venv by itself, from python3 and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: setup demo test soak test-oldest test-gpu lint kernels-check bench bench-gpu clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*.* csrc/*/*.*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/pyflatness demo --out demo

# Many small parallel regions: threads that spin while they wait would fight over shared cores.
test: setup
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n auto --dist worksteal

# Long checks, for before a release: thousands of random networks and interrupts, coverage of the intervals.
soak: setup
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m soak -n auto --dist worksteal

# The suite's core at the oldest versions that pyproject.toml accepts, in an environment of its own of 7 GB.
test-oldest: setup
	$(BIN)/python tests/oldest.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(wildcard csrc/*.* csrc/*/*.* tests/*.cpp tests/*/*.h)

# The kernels without Python: run under the sanitizers, and no symbol that two instruction sets could share.
kernels-check: setup
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DPYFLATNESS_SANITIZE=ON
	$(BIN)/cmake --build build/sanitize
	build/sanitize/kernels_check
	$(BIN)/cmake -S . -B build/plain -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DPYFLATNESS_KERNELS_ONLY=ON
	$(BIN)/cmake --build build/plain
	.ci/nm build/plain

bench: setup
	$(BIN)/python benchmarks/head.py
	$(BIN)/python benchmarks/layers.py

# On a machine with a GPU, with PYTHON a Python whose torch has CUDA: builds the kernels for it, runs their tests, then
# the same under compute-sanitizer's memcheck and racecheck.
test-gpu:
	$(PYTHON) tests/gpu.py

# The benchmark of the same machine: floors, composed torch, kernels.
bench-gpu:
	PYTHONPATH=$(CURDIR) $(PYTHON) benchmarks/gpu.py

clean:
	rm -rf $(VENV) build demo
