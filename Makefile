# make quickstart   trains a small LLaMA on four local processes and prints what it cost
# make test         the test suite          make test-all   … with the slow tests and the full equality table
# make test-optional  the tests of packages that only some users install
# make test-cluster launchers and SLURM over hosts (root, Linux; one at a time)    make test-cluster-all   … with the slow ones
# make lab-test     the tests of the laboratory (lab/), as root also with networks
# make lint types   ruff and basedpyright   make bench      the engine against a plain loop
# make dist         a wheel in dist/        make test-wheel  … in an empty environment with the oldest packages that it allows
# make docs         the documentation site, in site/
# make gpu-packages what sdp bench --alone needs besides torch, in .gpu, to take to a GPU machine without a network (lab/studies/gpu)
#
# Each makes .venv and installs pinned packages first, torch before everything that depends on it. On a machine whose
# torch is given, use it: make VENV=/path/to/venv TORCH=torch …  (in NVIDIA's image, a venv with --system-site-packages)
VENV   ?= .venv
PYTHON ?= python3
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
RUN    ?= runs/quickstart
# Processes that run tests: three on two cores, because tests often wait for a process, a message or a time limit. A file's
# tests stay in one of them, because they share fixtures. Each computes with one thread. tests/conftest.py puts the longest
# files first, and xdist would sort files by their number of tests. A process that dies ends the run as a failure, and files
# that have not begun are not run. If xdist replaced it, it would run the file again that killed it.
WORKERS ?= 3
PYTEST  = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder \
	--max-worker-restart 0
# The GPU machine's Python, and its platforms in the words of wheels, which pip takes to the letter.
GPU_PYTHON   ?= 3.12
GPU_PLATFORM ?= $(foreach glibc,2_28 2_27 2_17,manylinux_$(glibc)_x86_64) manylinux2014_x86_64
# Of constraints.txt's packages; others that it may lack can be added: make gpu-packages GPU_PACKAGES="pydantic einops zstandard hjson"
GPU_PACKAGES ?= pydantic einops zstandard hjson
# Tests start hundreds of processes, none of which should compile the package's sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test dist test-wheel lab-test test-optional test-all test-cluster test-cluster-all lint types docs format bench gpu-packages clean

quickstart: $(VENV)/.installed
	@mkdir -p runs
	@test ! -e $(RUN) -a ! -e $(RUN)-dense || { echo "$(RUN) or $(RUN)-dense exists: remove it, or choose another: make quickstart RUN=DIR" >&2; exit 2; }
	$(BIN)/sdp train configs/quickstart.json --dump-dir $(RUN) > /dev/null
	@echo; echo "The same model, dense, under data parallelism, for a few steps to compare memory and traffic with:"
	$(BIN)/sdp train configs/quickstart.json --dump-dir $(RUN)-dense --set sdp.capacity=1.0 sdp.lr_scale=none data.path=$(RUN)/corpus \
	    training.steps=8 training.evaluate_every=0 training.evaluate_batches=1 training.save_every=0 > /dev/null
	$(BIN)/sdp report $(RUN) $(RUN)-dense

test: $(VENV)/.installed-test
	$(PYTEST) -m "not slow and not full_table and not cluster"

lab-test: $(VENV)/.installed-test
	$(PYTEST) -m "not slow" lab/tests

# Accelerate, Trainer, llama.cpp's reader, lm-evaluation-harness, and servers of S3 and Google's storage. `make test` skips what it lacks.
test-optional: $(VENV)/.installed-dev
	$(PYTEST) -m "not full_table and not cluster" tests/engine/test_integrations.py tests/deepspeed_compat \
	    tests/data/test_huggingface.py tests/tools/test_tasks.py tests/engine/test_object_store.py tests/tools/test_object_stores.py \
	    tests/test_cluster_files.py

dist: $(VENV)/.torch
	rm -rf dist build/lib build/bdist*
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist

# What a user gets: only the package, with the oldest release of everything, outside of the checkout.
test-wheel: dist
	rm -rf $(VENV)-wheel
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip --disable-pip-version-check install --quiet "$(TORCH)" -c constraints-oldest.txt dist/*.whl
	$(VENV)-wheel/bin/python tests/scripts/try_wheel.py dist/*.whl

test-all: $(VENV)/.installed-test
	$(PYTEST) -m "not cluster"

# apt-get install iproute2 openssh-server openssh-client pdsh openmpi-bin mpich slurm-wlm munge slurmdbd mariadb-server; as root
test-cluster: $(VENV)/.installed-test $(VENV)/.intel-mpi
	$(BIN)/python -m pytest tests/cluster -m "cluster and not slow" --durations=12

test-cluster-all: $(VENV)/.installed-test $(VENV)/.intel-mpi
	$(BIN)/python -m pytest tests/cluster --durations=12

bench: $(VENV)/.installed
	$(BIN)/python -m lab.overhead

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/basedpyright --pythonpath $(BIN)/python

# Dead links and anchors are errors. The API page reads the sources below build/docs.
docs: $(VENV)/.installed-docs
	OMP_NUM_THREADS=1 $(BIN)/python docs/generate.py
	@rm -rf build/docs && mkdir -p build/docs/sdp && ln -s $(CURDIR)/engine $(CURDIR)/tools $(CURDIR)/__init__.py build/docs/sdp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu-packages: $(VENV)/.torch
	rm -rf .gpu
	$(PIP) install --quiet --no-compile --target .gpu --only-binary=:all: --implementation cp --python-version $(GPU_PYTHON) \
	    $(addprefix --platform ,$(GPU_PLATFORM)) \
	    $(foreach package,$(GPU_PACKAGES),$(shell sed -n 's/^\($(package)==.*\)/\1/p' constraints.txt | head -n 1))
	ln -s .. .gpu/sdp
	@du -sh .gpu

clean:
	rm -rf .gpu $(VENV) $(VENV)-wheel *.egg-info build dist site .pytest_cache .ruff_cache .hypothesis

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 …" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip' || { echo "The module venv is missing: apt install python3-venv" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "$(TORCH)" setuptools
	@touch $@

# Built without isolation: an isolated build of a package that needs torch would download another one.
$(VENV)/.installed: $(VENV)/.torch setup.cfg pyproject.toml constraints.txt
	$(PIP) install --quiet --no-build-isolation -c constraints.txt --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.torch setup.cfg pyproject.toml constraints.txt
	DS_BUILD_OPS=0 $(PIP) install --quiet --no-build-isolation -c constraints.txt --editable ".[test,deepspeed,mpi]"
	@touch $(VENV)/.installed $@

# In a folder of its own: mpi4py would take its library in the environment's.
$(VENV)/.intel-mpi: $(VENV)/.torch
	-$(PIP) install --quiet --no-deps --target $(VENV)/intel-mpi impi-rt==2021.19.0 && touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	$(PIP) install --quiet --no-build-isolation -c constraints.txt --editable ".[dev]"
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) install --quiet --no-build-isolation -c constraints.txt --editable ".[docs]"
	@touch $@
