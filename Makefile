# Thin targets over the `moeblaze` command of .venv; `make help` lists them. What the machine lacks, such as g++, comes by
# scripts/system_packages.sh from apt-get, everything else from requirements.lock.
#
#   make setup PYTHON=python3.12        builds .venv with another Python, once .venv is removed
#   make setup TORCH_INDEX_URL=URL      takes torch's build for the CPU, or for another CUDA, from that package index
#   make lock UPGRADE=--upgrade         pins the newest versions; without UPGRADE the pins that still fit stay

PYTHON ?= python3

# A process that may not keep the bytecode of what it imports compiles torch each time: four seconds.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# The stamp of a finished set-up holds the index that torch came from: later installs read it there.
STAMP := .venv/torch-index-url
LAST_INDEX := $(shell cat $(STAMP) 2>/dev/null)
TORCH_INDEX_URL ?= $(LAST_INDEX)
TORCH_INDEX := $(addprefix --extra-index-url ,$(TORCH_INDEX_URL))

.PHONY: help setup setup-gpu demo test test-portable check sanitize bench docs docs-serve notebooks lab editor lock
.PHONY: machine-for-demo machine-for-notebooks machine-for-tests any-compiler

help: ## List these targets
	@sed -nE 's/^([a-z-]+):.* ## (.*)/\1|\2/p' Makefile | while IFS='|' read -r name text; do \
	    printf '%-15s %s\n' "$$name" "$$text"; done

setup: $(STAMP) ## Install the pinned packages into .venv

# Another index means another build of the same torch version, which pip would not exchange: start from nothing.
ifneq ($(TORCH_INDEX_URL),$(LAST_INDEX))
.PHONY: $(BIN)/pip $(STAMP)
endif

# Without compiling: Python compiles a module when it is imported, and most never are.
$(STAMP): requirements.lock pyproject.toml | $(BIN)/pip
	$(BIN)/pip install --no-compile $(TORCH_INDEX) -r requirements.lock
	$(BIN)/pip install --no-deps --no-build-isolation --editable .
	@echo '$(TORCH_INDEX_URL)' > $@

# Made once, and kept when the lock changes: another Python laid over an environment would break it.
$(BIN)/pip:
	@$(SYSTEM) venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo 'error: Python 3.11 or newer is needed, and $(PYTHON) is missing or older.' \
	         'Name another one: make setup PYTHON=python3.12' >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv

# What a machine with a GPU adds: CuPy, and the libraries of CUDA 13 that Numba needs.
setup-gpu: $(STAMP) ## Add CuPy, for a machine with a GPU
	$(BIN)/pip install $(TORCH_INDEX) -r requirements.lock -r requirements-gpu.lock

# The programs of the machine. BROWSERS are what tests/browser.py looks for.
BROWSERS := chromium chromium-browser google-chrome
SYSTEM := PYTHON='$(PYTHON)' CXX='$(CXX)' BROWSERS='$(BROWSERS)' scripts/system_packages.sh

machine-for-demo:
	@$(SYSTEM) venv compiler?

machine-for-notebooks:
	@$(SYSTEM) venv compiler

machine-for-tests:
	@$(SYSTEM) venv compiler clang browser git

# Where no g++ can be installed, Clang as PyPI has it serves.
ZIG := ziglang==0.17.1
any-compiler: machine-for-demo $(STAMP)
	@command -v $(firstword $(CXX)) >/dev/null || $(BIN)/pip install $(ZIG)

demo: any-compiler ## Train a tiny model, then check and account for its layers: two minutes, no GPU
	$(BIN)/moeblaze demo

# For the tests alone, in a folder of its own: in .venv its extensions would be part of every JupyterLab. What else it
# needs is in .venv.
NBGRADER := nbgrader==0.9.6 alembic==1.20.1 mako==1.4.3 notebook==7.6.5 rapidfuzz==3.14.6
build/nbgrader: | $(STAMP)
	$(BIN)/pip install --quiet --no-deps --target $@ $(NBGRADER)

# SGLang's own code reads our maps in tests/foreign, which are skipped where its wheel cannot be had.
SGLANG := sglang==0.5.23
build/sglang: | $(STAMP)
	-$(BIN)/pip download --quiet --no-deps --retries 1 --timeout 30 --dest $@ $(SGLANG)

# A process a core and one more, of up to two GiB each. What needs a GPU has it, and the clock, to itself.
test: machine-for-tests $(STAMP) build/nbgrader build/sglang ## Run every test that can run on this machine
	$(BIN)/python -m pytest tests/gpu
	$(BIN)/python -m pytest --ignore tests/gpu --numprocesses auto --maxprocesses 8 --dist worksteal

# Those that need neither the SIMT executor, which has run on Linux alone, nor numba-cuda, which is for Linux alone. Of
# some files it is those without simt or numba in their ids.
PORTABLE := core/test_config.py core/test_kernel_headers.py core/test_records.py core/test_source_hashes.py placement \
            systems/test_layer.py test_readme.py test_style.py
IN_PART := backends/test_activation.py backends/test_combine.py backends/test_dispatch.py backends/test_gating.py
test-portable: $(STAMP) ## Run the tests that need nothing of Linux
	$(BIN)/python -m pytest $(addprefix tests/,$(PORTABLE))
	$(BIN)/python -m pytest -k "not simt and not numba" $(addprefix tests/,$(IN_PART))

check: any-compiler ## Check every stage of every backend against the oracle
	$(BIN)/moeblaze check

# On a GPU, with the CUDA toolkit: every kernel under compute-sanitizer's four tools.
sanitize: $(STAMP) ## Run every kernel under compute-sanitizer, on a GPU
	$(BIN)/moeblaze sanitize

# On a GPU, with Nsight Compute: every table of benchmarks in docs/, the layer twice, so that the spread shows.
BENCH := $(BIN)/moeblaze bench
SYSTEMS := moeblaze,megablocks,capacity,torch_grouped
POLICIES := --policy minimal --policy inputs
OF_SYSTEMS := --preset conf3,conf4,conf1,qwen3,mixtral,fine-grained --system $(SYSTEMS)
SKEWED := --preset conf3 --preset conf4 --preset qwen3 --system $(SYSTEMS) --routing zipf
bench: $(STAMP) ## Measure every table of benchmarks in docs/, on a GPU
	$(BENCH) layer --preset all $(POLICIES) --record build/bench.json
	$(BENCH) layer --preset all $(POLICIES) --record build/bench.json
	$(BENCH) layer --preset all --system moeblaze --routing zipf --record build/bench.json
	$(BENCH) stage --preset all --record build/bench.json
	$(BENCH) dispatch --record build/bench.json
	$(BENCH) gating --record build/bench.json
	$(BENCH) combine --record build/bench.json
	$(BENCH) layer $(OF_SYSTEMS) --record build/systems.json
	$(BENCH) layer $(SKEWED) --record build/systems.json
	$(BENCH) layer $(SKEWED) --capacity-factor 1.0 --record build/systems.json
	$(BENCH) ladder --record build/ladder.json
	$(BENCH) growth --record build/growth.json
	$(BENCH) host --record build/host.json
	$(BENCH) counters --record build/counters.json

# The tables and the pictures of the documents, from docs/results; then the site, in build/site. The pictures of its
# controls come from the notebooks' functions, some of which compile kernels for the CPU.
docs: machine-for-notebooks $(STAMP) ## Write the generated pages, and the site in build/site
	$(BIN)/python -m moeblaze_ref.bench.document
	$(BIN)/python -m moeblaze_ref.lm.document
	$(BIN)/python -m moeblaze_ref.placement.document
	$(BIN)/python -m moeblaze_ref.parallel.document
	$(BIN)/python -m moeblaze_ref.papers.document
	$(BIN)/python -m moeblaze_ref.cli.plan_document
	$(BIN)/python -m moeblaze_ref.plan.document
	$(BIN)/python -m moeblaze_ref.course.site.cupy_by_hand
	$(BIN)/python -m moeblaze_ref.course.site.records
	$(BIN)/python -m moeblaze_ref.course.site.path
	$(BIN)/python -m moeblaze_ref.course.site.teaching
	$(BIN)/python -m moeblaze_ref.course.site.architecture
	$(BIN)/python -m moeblaze_ref.course.site.routers
	$(BIN)/python -m moeblaze_ref.course.site.bug_classes
	$(BIN)/python -m moeblaze_ref.course.site.league
	$(BIN)/python -m moeblaze_ref.course.site.functions
	$(BIN)/python -m moeblaze_ref.course.site.build

docs-serve: docs ## Show the site at http://127.0.0.1:8000
	$(BIN)/python -m http.server --directory build/site --bind 127.0.0.1 8000

# Runs every notebook and writes it with its outputs.
notebooks: machine-for-notebooks $(STAMP) ## Run every notebook and write it with its outputs
	$(BIN)/python -m moeblaze_ref.course.notebook.outputs

lab: $(STAMP) ## Open your copies of the notebooks in JupyterLab
	$(BIN)/moeblaze lab

# The editor of the exercises: one file with the packages that it needs, so that it opens with the network off.
EDITOR := moeblaze_ref/course/editor
editor: ## Build the editor of the exercises from its source, with npm
	mkdir -p build/editor
	cp $(addprefix $(EDITOR)/,package.json package-lock.json editor.js build.mjs) build/editor
	cd build/editor && npm ci --ignore-scripts --no-audit --no-fund && node build.mjs
	cp build/editor/bundle.js build/editor/bundle.LICENSE.txt $(EDITOR)

COMPILE := build/uv/bin/uv pip compile --quiet --python-version 3.11 $(UPGRADE)

# One version of everything for every Python and platform; the GPU's lock holds only what it adds.
lock: ## Pin the versions of all packages in requirements.lock
	$(PYTHON) -m venv build/uv
	build/uv/bin/pip install --quiet uv==0.13.8
	$(COMPILE) --universal --fork-strategy fewest --annotation-style line --custom-compile-command 'make lock' \
	    --extra placement --extra huggingface --extra docs --extra test pyproject.toml --output-file requirements.lock
	$(COMPILE) --python-platform linux --no-header --no-annotate --constraint requirements.lock \
	    --extra gpu pyproject.toml --output-file build/gpu.lock
	{ echo '# What a GPU adds to requirements.lock, written by `make lock` too.'; \
	  grep -vxF "$$(sed 's/ .*//' requirements.lock)" build/gpu.lock | sed "s/\$$/ ; sys_platform == 'linux'/"; \
	} > requirements-gpu.lock
