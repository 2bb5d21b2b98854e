# The entry point for developers. `make up` and `make test` create the environment in .venv if there is none.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
HELM   := $(VENV)-helm
HELM_READY := $(HELM)/.ready
SOURCES := proto/quire_proto engine/quire_engine router/quire_router cli/quire_cli scripts demo examples

# Printed before pip starts: on Linux its own index has torch with CUDA.
define TORCH_SIZE
This takes 5.4 GiB of disk, most of it torch's CUDA build, which pip takes on Linux whether there is a GPU or not. Without
a GPU torch's CPU build does the same in 2 GiB: stop this (Ctrl-C) and run it with PIP_EXTRA_INDEX_URL=INDEX, where INDEX
is that of torch's builds for CPUs, which torch's installation page names.
endef
export TORCH_SIZE

# Hundreds of processes start in the tests: what Python compiles of our sources is kept, whatever the user's shell says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: up test ready system programs kernels bytecode cluster-test soak chaos lint types style layers bench bench-router bench-scale bench-simulation bench-fleet peers peer-suites clients images dist docs gpu-kit first-hour proto proto-check clean help

help:
	@echo "make up [MODEL=/path/to/folder] [NAME=name] [ENGINES=2] [ARGS='--port 80']   quire serve, from this checkout"
	@echo "make test [ARGS=tests/unit/house/test_make.py]      every test, real processes included; or those that ARGS names"
	@echo "make cluster-test                             every row of docs/evidence/failures.md on your cluster (tests/cluster/README.md; an hour)"
	@echo "make soak [ARGS=tests/unit/engine/core]       100,000 simulated requests, 10,000 schemas, ten kills of one answer, wheels, Firefox (an hour or more)"
	@echo "make chaos [ARGS='--rounds 10']               routers, engines and Redis die under streams, again and again (some minutes)"
	@echo "make lint                                     style, types, stale stubs"
	@echo "make bench [ARGS='--rounds 3']                speed, offline and served, beside installed peers', and more; then one table"
	@echo "make peers                                    vLLM's CPU build and llama.cpp, each in an environment of its own"
	@echo "make peer-suites [ARGS='vllm']                the HTTP tests of vLLM, llama.cpp and SGLang, against Quire; new parameters of theirs"
	@echo "make clients [OPEN_WEBUI=1]                   clients that others wrote, installed in .clients, talk to a router (a quarter of an hour)"
	@echo "make bench-router                             what the router costs, and what some clients do to others"
	@echo "make bench-scale                              what fleets of 10 to 1,000 engines cost a router (ten minutes)"
	@echo "make bench-simulation TRACE=/path/to/file     KV waste, and sjf against fcfs, on a trace"
	@echo "make bench-fleet TRACES=/path/to/folder       placement policies against each other, simulated"
	@echo "make images [DEVICES='cpu cuda']              the router's and the engines' images (docker/README.md)"
	@echo "make dist                                     wheels, the chart, a bill of materials and sums, in dist/ (docs/contributing.md)"
	@echo "make gpu-kit [ARGS='--gpu sm_90a']             kernels and wheels for scripts/gpu_run.sh on a bare machine with a GPU (docs/gpu.md)"
	@echo "make docs                                     the documentation as a site, in .run/docs/site (REPOSITORY_URL links the code)"
	@echo "make first-hour [ARGS=--sources]              the first commands of the pages in an empty root; pip fetches torch (some minutes)"
	@echo "make proto                                    the stubs of proto/quire"
	@echo "make clean                                    takes away the environments and what was built or measured"

$(READY): constraints.txt tests/requirements.txt proto/pyproject.toml engine/pyproject.toml router/pyproject.toml cli/pyproject.toml
	@echo "creating the environment in $(VENV) (a few minutes the first time)"
	@test -n "$$PIP_EXTRA_INDEX_URL" || ls -d $(VENV)/lib/python*/site-packages/torch >/dev/null 2>&1 || echo "$$TORCH_SIZE"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@scripts/pip_install.sh $(VENV) -e proto -e engine -e router -e cli -r tests/requirements.txt
	@touch $@

$(HELM_READY): constraints.txt tests/kube/requirements.txt
	@scripts/helm_environment.sh $(HELM)

up: $(READY)
	@exec $(BIN)/python -m quire_cli.main serve "$(or $(MODEL),demo/model)" --engines "$(or $(ENGINES),2)" \
	  $(if $(or $(NAME),$(if $(MODEL),,demo)),--served-model-name "$(or $(NAME),quire-demo)") $(ARGS)

# The chaos run comes first, and alone as autoscaling does: whoever has no processor for seconds looks dead. Of the others
# some compute in processes beside them and some wait, so five workers have two cores busy, if both kinds run at the same
# time (tests/conftest.py). With ARGS just those tests run, one after the other. A test that fails gets a second chance,
# since real processes on a busy machine may be late, and the summary names those that needed it: they are to be mended.
# It comes when routers trust a Redis again that was late (4 s). The chaos run gets none.
AGAIN := --reruns 1 --reruns-delay 5 -rR
ALONE := tests/chaos/test_chaos.py tests/service/test_autoscaling.py
TESTS := $(addprefix tests/,chaos service model browser clients gpu cluster unit sim kube)

test: programs kernels
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	$(BIN)/python -m pytest $(AGAIN) $(ALONE)
	$(BIN)/python -m pytest -n 5 --dist loadfile --no-loadscope-reorder $(AGAIN) $(addprefix --ignore ,$(ALONE)) $(TESTS)
endif

# What tests need, in parts that may be made at once, beside those of lint. The first two do not wait for pip, which
# leaves all cores but one alone.
ready: kernels system programs bytecode

system:
	@scripts/redis.sh
	@scripts/proxies.sh
	@scripts/chromium.sh
	@scripts/registry.sh

programs: $(READY) $(HELM_READY) system
	@scripts/promtool.sh $(BIN)
	@scripts/envoy.sh $(BIN)

# Compiled before the workers begin, each of which would do it. It needs Python alone, of the environment where that is there.
kernels:
	@PYTHONPATH=engine:proto $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -c "import quire_engine.kernels.build as build, quire_proto.terminal as terminal; build.needs_build() and terminal.waiting('compiling kernels')(build.shared_object)()"

# Every test is collected once, so that the workers find Python's bytecode: on a clean clone each would compile it all.
# Without kernels, as otherwise this would compile them too. The runs name what cannot be collected.
bytecode: $(READY)
	@QUIRE_ENGINE_CPU_KERNELS=off $(BIN)/python -m pytest -p no:cacheprovider --collect-only -qq tests >/dev/null 2>&1 || true

cluster-test: $(READY)
	$(BIN)/python -m pytest tests/cluster -rs --write-rows $(ARGS)

# A search may take longer than a test of the short form, and than the limit at which pytest ends with all its tests.
LONG := --timeout 5400 -o faulthandler_timeout=7200

soak: $(READY)
	@scripts/redis.sh
	@scripts/firefox.sh $(BIN)
	$(BIN)/python -m pytest -m soak $(LONG) $(or $(ARGS),tests/unit tests/sim tests/kube tests/service tests/model tests/browser)

chaos: $(READY)
	@scripts/redis.sh
	$(BIN)/python -m tests.chaos.run $(ARGS)
ifndef ARGS
	$(BIN)/python -m tests.chaos.run --upgrade --rounds 2
	$(BIN)/python -m tests.chaos.run --journal-file --rounds 2
endif

lint: types style layers proto-check

types: $(READY)
	$(BIN)/mypy $(SOURCES)

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

layers: $(READY)
	$(BIN)/lint-imports --no-logo
	cd cli && ../$(BIN)/lint-imports --no-logo

# What is measured with each shape, and the shapes whose figures stand in the table at the end.
BENCHED := 135m qwen3-0.6b llama3-1b
SERVED  := --measure throughput,latency,prefill,served
SMALL   := --also int8,int4 --num-prompts 8 --input-len 64 --output-len 32 --latency-input-len 64 --latency-output-len 48 --prefill-len 512 \
  --kv-cache-memory 268435456

bench: $(READY)
	@scripts/redis.sh
	@mkdir -p .run
	$(BIN)/quire-engine bench --shape 135m $(SERVED) --json .run/bench-135m.json $(ARGS)
	$(BIN)/quire-engine bench --shape qwen3-0.6b $(SERVED) --json .run/bench-qwen3-0.6b.json $(ARGS)
	$(BIN)/quire-engine bench --shape llama3-1b $(SMALL) --json .run/bench-llama3-1b.json $(ARGS)
	$(BIN)/python -m tests.bench.scheduling
	$(BIN)/python -m tests.bench.growth
	$(BIN)/python -m tests.bench.memory
	$(BIN)/python -m tests.bench.host_cache
	$(BIN)/python -m tests.bench.swap_ahead
	$(BIN)/python -m tests.bench.preemption
	$(BIN)/python -m tests.bench.sampling
	$(BIN)/python -m tests.bench.kv_cache_dtype
	$(BIN)/python -m tests.bench.structured
	$(BIN)/python -m tests.bench.host_step
	$(BIN)/python -m quire_engine.bench.table $(BENCHED:%=.run/bench-%.json)

bench-router: $(READY)
	$(BIN)/python -m tests.bench.router $(ARGS)
	$(BIN)/python -m tests.bench.placement
	$(BIN)/python -m tests.bench.index
	$(BIN)/python -m tests.bench.ledger
	$(BIN)/python -m tests.bench.slow_clients
	$(BIN)/python -m tests.bench.prefix_timing
	$(BIN)/python -m tests.bench.discovery
	$(BIN)/python -m tests.bench.hostile_clients
	$(BIN)/python -m tests.bench.metric_age
	$(BIN)/python -m tests.bench.page

bench-scale: $(READY)
	$(BIN)/python -m tests.bench.scale --storms --json .run/scale.json --plot .run/scale.png $(ARGS)

peers:
	scripts/peers.sh .peers $(PYTHON)

peer-suites: $(READY)
	PYTHON=$(PYTHON) scripts/peer_suites.sh .run/peers
	$(BIN)/python -m tests.peers.run .run/peers $(ARGS)

bench-simulation: $(READY)
	$(BIN)/python -m tests.bench.simulation $(TRACE) $(ARGS)

bench-fleet: $(READY)
	$(BIN)/python -m tests.bench.fleet $(TRACES) $(ARGS)

# Build arguments of both Dockerfiles; docker/README.md explains the indexes.
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' router/pyproject.toml)
DEVICES ?= cpu
DOCKER  ?= docker
BUILD = $(DOCKER) build --build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD) \
  $(foreach name,BASE BASE_DIGEST EXTRA_INDEX TORCH_CPU_INDEX TORCH_CUDA_INDEX FLASHINFER_INDEX,$(if $(filter-out undefined,$(origin $(name))),--build-arg $(name)='$($(name))')) \
  $(BUILD_ARGS)

clients: $(READY)
	@scripts/clients.sh .clients
	$(BIN)/python -m pytest tests/clients --write-table $(ARGS)

images:
	$(BUILD) --file docker/router.Dockerfile --tag quire-router:$(VERSION) .
	set -e; for device in $(DEVICES); do \
	  $(BUILD) --file docker/engine.Dockerfile --target $$device --tag quire-engine:$(VERSION)-$$device .; done

# Of the last commit. With IMAGES=1 the images too, built beforehand and saved by $(DOCKER), so that the sums have them.
dist: $(READY)
	@mkdir -p dist
ifdef IMAGES
	$(MAKE) images
	$(DOCKER) save quire-router:$(VERSION) | gzip -n > dist/quire-router-$(VERSION).image.tar.gz
	set -e; for device in $(DEVICES); do \
	  $(DOCKER) save quire-engine:$(VERSION)-$$device | gzip -n > dist/quire-engine-$(VERSION)-$$device.image.tar.gz; done
endif
	$(BIN)/python scripts/dist.py $(ARGS)

# The generator has an environment of its own: it pins what the others do not.
docs:
	@test -x .docs/bin/mkdocs || { echo "installing mkdocs in .docs (the first time)"; $(PYTHON) -m venv .docs && .docs/bin/pip install mkdocs-material==9.8.2; }
	$(PYTHON) scripts/site.py .run/docs
	NO_MKDOCS_2_WARNING=1 .docs/bin/mkdocs build --strict --config-file .run/docs/mkdocs.yml

# Needs no GPU. Kernels are compiled once, as many at a time as MAX_JOBS says: each takes a minute or more of a core.
gpu-kit: $(READY)
	$(BIN)/python -m scripts.gpu_kit $(ARGS)

# With everything fetched by pip. make test has the short form, whose packages come from $(VENV) (docs/contributing.md).
first-hour: dist
	$(BIN)/python -m tests.first_hour.run --wheels dist --fetch $(ARGS)

proto: $(READY)
	proto/generate.sh

# Fails when the committed stubs are not what the .proto files generate.
proto-check: $(READY)
	@set -e; fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; proto/generate.sh "$$fresh"; \
	diff -r -x '*.proto' -x '__init__.py' -x py.typed -x __pycache__ proto/quire "$$fresh/quire" \
	  || { echo "the stubs are stale: run make proto"; exit 1; }

clean:
	rm -rf $(VENV) $(HELM) .run dist .gpu-kit .mypy_cache .ruff_cache .pytest_cache .hypothesis
