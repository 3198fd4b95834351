# Two commands matter: `make demo` and `make test`. Each sets up .venv by itself, from python3 and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup demo test docs soak test-oldest test-newest wheel test-gpu lint kernels-check kernels-check-aarch64 kernels-prove
.PHONY: bench bench-cpu bench-gpu clean

setup: $(READY)

# The CPU kernels alone: `make kernels-check` compiles CUDA's, `make test-gpu` builds them for the GPU that is there.
$(READY): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*/*)
	@echo "setup 1/3: a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) --upgrade pip
	@echo "setup 2/3: torch (a download of 0.2 to 3 GB where pip has to)"
	@$(INSTALL) torch
	@echo "setup 3/3: the other packages, and the CPU kernels (about a minute)"
	@$(INSTALL) --config-settings=cmake.define.PYFLATNESS_CUDA=OFF -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/pyflatness demo --out demo

# A worker for each core, with a thread each: those of several would fight over the cores. Tests of threads set their own.
# A test that has not ended after 15 minutes fails: its worker prints where all of its threads are, and ends.
HANGS = -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true
test: setup
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n auto --dist worksteal $(HANGS)

# Long checks, for before a release: the grids whose pairs `make test` runs, with every combination; thousands of random
# networks and interrupts; the tests of values with matrix products that are added up otherwise, see
# tests/support/summation.py; coverage of the intervals; a thousand damaged checkpoints and hostile ones; the CUDA
# kernels' accesses and barriers.
VALUES = $(addprefix tests/,contractions head hessian losses measures model sweep training)
soak: setup kernels-prove
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m soak -n auto --dist worksteal
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest --sums chain -n auto --dist worksteal $(VALUES)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest --sums reversed -n auto --dist worksteal $(VALUES)
	$(BIN)/python tests/soak/checkpoints.py

# The suite's core at the oldest versions that pyproject.toml accepts, in an environment of its own of 7 GB.
test-oldest: setup
	$(BIN)/python tests/versions.py oldest

# The same at the newest versions, torch's first of all.
test-newest: setup
	$(BIN)/python tests/versions.py newest

# The site, from docs/ and the docstrings, into build/site; docs/examples are run for it; a warning is an error.
docs: setup
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky -q docs build/site

# The wheel with a manylinux tag, and the kernels' tests with it and the oldest versions, in an environment of 7 GB.
wheel: setup
	$(BIN)/python tests/wheel.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(wildcard csrc/*/*.cpp csrc/*/*.h csrc/*/*.cu csrc/*/*.cuh tests/*.cpp tests/*/*.cpp tests/*/*.h)

CONFIGURE = $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)

# The CPU kernels without Python under the sanitizers; no symbol that two instruction sets could share; the CUDA kernels
# compiled as `pip install .` does where a GPU and nvcc are, and their module imported, which needs no driver; what the compiler made
# of them against csrc/cuda/sass.md.
kernels-check: setup
	$(CONFIGURE) -B build/sanitize -DPYFLATNESS_SANITIZE=ON
	$(BIN)/cmake --build build/sanitize
	build/sanitize/kernels_check
	.ci/nm build/wheel
	$(CONFIGURE) -B build/cuda -DPYFLATNESS_CUDA=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir)
	$(BIN)/cmake --build build/cuda --target _cuda
	PYTHONPATH=build/cuda/csrc/cuda $(BIN)/python -c "import _cuda; print('imported:', _cuda.__file__)"
	$(BIN)/python tests/sass.py

# The CUDA kernels emulated: under sanitizers, and without each of their barriers, which some test must notice.
kernels-prove: setup
	$(BIN)/python tests/soak/bounds.py
	$(BIN)/python tests/soak/barriers.py

# The CPU kernels for aarch64: by Debian's g++-aarch64-linux-gnu, their check run by qemu-user. Not a part of CI.
AARCH64 := aarch64-linux-gnu
kernels-check-aarch64: setup
	$(CONFIGURE) -B build/aarch64 -DPYFLATNESS_SANITIZE=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=$(AARCH64)-g++
	$(BIN)/cmake --build build/aarch64
	ASAN_OPTIONS=detect_leaks=0 qemu-aarch64 -L /usr/$(AARCH64) build/aarch64/kernels_check

bench: setup
	$(BIN)/python benchmarks/head.py
	$(BIN)/python benchmarks/layers.py
	$(BIN)/python benchmarks/growth.py

# One table of what is to be reached on the CPU, with where the time goes.
bench-cpu: setup
	$(BIN)/python benchmarks/cpu.py

# On a machine with a GPU, with PYTHON a Python whose torch has CUDA: builds the kernels for it, runs their tests, then
# the same under compute-sanitizer's memcheck and racecheck.
test-gpu:
	$(PYTHON) tests/gpu.py

# The benchmark of the same machine: floors, composed torch, kernels.
bench-gpu:
	PYTHONPATH=$(CURDIR) $(PYTHON) benchmarks/gpu.py

clean:
	rm -rf $(VENV) build demo
