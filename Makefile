# The two that a newcomer runs: make demo, make test. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-deep check picture manual metrics manifests site format proto proto-check sim fuzz mutants bench bench-gpu bench-serving test-system test-gpu test-engines check-engines release clean

help:  ## what can be made here
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "membroker needs Python 3.11 or later; say which with: make PYTHON=python3.12 …"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	  || { echo "cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)  ## the main job in about 15 seconds: sharing, trade, a burst, refusal, restart, death, sleep (no GPU, no root)
	$(BIN)/membroker demo

# The tests start thousands of interpreters: without bytecode files each would compile membroker again.
unexport PYTHONDONTWRITEBYTECODE

# Many tests wait for processes, so one more than there are processors keeps them all at work.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n + 1 : 8)))
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
test: $(STAMP)  ## everything that a change needs to know, in three minutes on two cores: make test JOBS=1 for one at a time
	$(PYTEST) -m "not deep and not root and not gpu"

test-deep: $(STAMP)  ## what searches: simulation, fuzz, random walks, crash points, floods, soak, memory, doubles over gRPC
	$(PYTEST) -m "deep and not root and not gpu"

sim: $(STAMP)  ## a world around the core: make sim STEPS=1000000 SEED=7; with the library's calls: OPTIONS=--joined
	$(BIN)/python -m tests.simulation.run --steps $(or $(STEPS),5000000) $(if $(SEED),--seed $(SEED)) $(OPTIONS)

fuzz: $(STAMP)  ## mutated frames, requests, documents: make fuzz SECONDS=600, for each fuzz
	FUZZ_SECONDS=$(or $(SECONDS),60) $(BIN)/python -m pytest tests/fuzz --timeout=0 -q

mutants: $(STAMP)  ## do the tests notice small changes of the source: make mutants SAMPLE=200 SEED=1 OPTIONS='--part core'
	$(BIN)/python -m tools.mutants --sample $(or $(SAMPLE),200) --seed $(or $(SEED),1) $(OPTIONS)

bench: $(STAMP)  ## what the broker costs here, beside bare echoes: make bench OPTIONS='--json FILE'
	$(BIN)/python -m benchmarks.load $(OPTIONS)

test-system: $(STAMP)  ## as root: the tests that need other users, mount namespaces or a real systemd
	$(BIN)/python -m pytest -m root

# tests/gpu, and the stories elsewhere that run on each kind of device (the fixture `device`).
GPU_TESTS := tests/gpu tests/engines/test_vllm.py tests/engines/test_vllm_tp.py tests/engines/test_vllm_sleep.py tests/engines/test_sglang.py tests/benchmarks/test_bench_pressure.py tests/client/vmm/test_ranges.py tests/system/test_main_job.py
# On the machine with the GPU, with its own interpreter and packages: nothing is installed, and pytest-timeout may be
# missing. A test that hangs says where it stands after four minutes.
test-gpu:  ## the tests that need a real NVIDIA GPU, with this machine's own python3 (two GPUs: also NCCL, and a daemon for each)
	PYTHONPATH="$(CURDIR)/client:$(CURDIR)/broker:$$PYTHONPATH" $(PYTHON) -m pytest -p no:cacheprovider \
	  -o faulthandler_timeout=240 -W "ignore:Unknown config option" -m gpu $(GPU_TESTS)

# Real engines have an environment of their own: they pin hundreds of packages.
ENGINES ?= .venv-engines
$(ENGINES)/.installed: tests/engines/requirements.txt tests/engines/requirements-sglang.txt
	@test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/pip install --quiet --disable-pip-version-check --no-deps $(^:%=--requirement %)
	$(MAKE) --no-print-directory $(SGLANG:%=$(ENGINES)/sglang-%) || echo "left out: SGLang"
	@touch $@

# The releases of SGLang that are served, in the same environment: the last one is run whole.
SGLANG := 0.5.21 0.5.22 0.5.23
$(ENGINES)/sglang-%:
	rm -rf $@.part
	$(ENGINES)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-compile --target $@.part sglang==$*
	mv $@.part $@

# In this environment vLLM's tests, then those of each SGLang. All of an engine's tests skip where it is not installed.
TEST_ENGINES = $(ENGINES)/bin/python -m pytest -o cache_dir=.pytest_cache/engines $(OPTIONS)
test-sglang-%:
	@test -d $(ENGINES)/sglang-$* || { echo "left out: SGLang $*"; exit 0; }; SGLANG_USE_CPU_ENGINE=1 \
	  PYTHONPATH="$(CURDIR)/client:$(CURDIR)/broker:$(abspath $(ENGINES)/sglang-$*):$(CURDIR)/tests/support/sglang_stubs" \
	  $(TEST_ENGINES) tests/engines/test_sglang_parts.py $(if $(filter $*,$(lastword $(SGLANG))),tests/engines/test_sglang.py)

test-engines:  ## real vLLM and SGLang over the host driver (4 GiB of packages); left out where they cannot be installed
	@if $(MAKE) --no-print-directory $(ENGINES)/.installed; then \
	  PYTHONPATH="$(CURDIR)/client:$(CURDIR)/broker" $(TEST_ENGINES) tests/engines && \
	  $(MAKE) --no-print-directory $(SGLANG:%=test-sglang-%); \
	else echo "left out: vLLM's CPU build cannot be installed here"; fi

check-engines: $(STAMP)  ## which vLLM and SGLang of the last 60 days have what membroker uses, then test-engines: OPTIONS=--strict
	$(BIN)/python -m tools.engines --keep $(ENGINES)/releases $(OPTIONS)
	@$(MAKE) --no-print-directory test-engines OPTIONS=

# As test-gpu: on the machine with the GPU, nothing is installed.
bench-gpu:  ## what the broker costs on a GPU: make bench-gpu OPTIONS='--json FILE --plot FILE --markdown'
	PYTHONPATH="$(CURDIR)/client:$(CURDIR)/broker:$(CURDIR):$$PYTHONPATH" $(PYTHON) -m benchmarks.gpu $(OPTIONS)

bench-serving:  ## vLLM engines that share one GPU, beside static parts: make bench-serving OPTIONS='--json FILE --plot FILE'
	PYTHONPATH="$(CURDIR)/client:$(CURDIR)/broker:$(CURDIR):$$PYTHONPATH" $(PYTHON) -m benchmarks.serving $(OPTIONS)

check: $(STAMP) proto-check  ## format, lint, types, import contracts, private accesses, stale stubs and pages, spelling, prose, the site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.private_access
	$(BIN)/codespell
	$(BIN)/python -m tools.prose
	$(BIN)/python -m tools.picture --check
	$(BIN)/python -m tools.manual --check
	$(BIN)/python -m tools.metrics_page --check
	@$(MAKE) --no-print-directory site

picture: $(STAMP)  ## draw the packages and their imports in ARCHITECTURE.md
	$(BIN)/python -m tools.picture

manual: $(STAMP)  ## write completions, manual pages and docs/cli.md from the parsers
	$(BIN)/python -m tools.manual

metrics: $(STAMP)  ## write docs/metrics.md from the catalog of metrics
	$(BIN)/python -m tools.metrics_page

manifests: $(STAMP)  ## write what the Helm chart copies, and render it into deploy/kubernetes
	$(BIN)/python -m tools.manifests

site: $(STAMP)  ## build the documentation site in .site/html; a broken link or anchor fails
	$(BIN)/python -m tools.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # and not --quiet: what is not logged is not counted

format: $(STAMP)  ## write the format that `check` wants
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The generator lives in an environment of its own: code from this version loads on every later protobuf.
.venv-proto/.installed: pyproject.toml
	@test -x .venv-proto/bin/python || $(PYTHON) -m venv .venv-proto
	.venv-proto/bin/pip install --quiet --disable-pip-version-check \
	  "grpcio-tools==1.71.2" "mypy-protobuf==3.6.0" "googleapis-common-protos>=1.66"
	@touch $@

PROTOS := $(wildcard proto/membroker/v1/*.proto proto/membroker/dra/v1/*.proto)
define GENERATE
	. .venv-proto/bin/activate && python -m grpc_tools.protoc -I proto \
	  -I "$$(python -c 'import google.rpc, pathlib; print(pathlib.Path(list(google.rpc.__path__)[0]).parents[1])')" \
	  --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)
	find $(1)/membroker -name '*_pb2_grpc.py*' | xargs grep -L 'class .*Stub' | xargs -r rm
endef

proto: .venv-proto/.installed  ## generate the stubs from proto/
	$(call GENERATE,client)

proto-check: .venv-proto/.installed  ## fail when the committed stubs are stale
	@rm -rf .venv-proto/out && mkdir -p .venv-proto/out
	$(call GENERATE,.venv-proto/out)
	for stubs in v1 dra/v1; do diff -r -x '__pycache__' -x '__init__.py' .venv-proto/out/membroker/$$stubs client/membroker/$$stubs || exit 1; done

release: $(STAMP)  ## wheel, sdist and container image in dist/, each tried with the demo: make release BASE=IMAGE REHEARSAL=1
	$(BIN)/python -m tools.release $(if $(BASE),--base '$(BASE)') $(if $(REHEARSAL),--rehearsal) -- $(BUILD_OPTIONS)

clean:  ## remove what make made
	rm -rf .site .venv .venv-proto .venv-engines .pytest_cache .mypy_cache .ruff_cache .hypothesis
