# The two commands of the README: each sets up all that it needs.
.PHONY: demo test check unit integration layout clean

PY := .venv/bin/python

demo:  ## train a search agent on this machine's CPU and show its reward rise
	@bin/setup.sh cpu
	@$(PY) bin/prepare demo
	@rm -rf runs/demo
	@$(PY) bin/launch configs/demo.toml

test: check unit integration  ## lint, types and every test that needs no GPU

check: .venv-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

unit: .venv-dev  ## fast tests: no vLLM, no DeepSpeed
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/unit -q

integration: .venv-dev  ## real engines, real processes
	$(PY) -m pytest tests/integration -q -m "integration and not gpu" --timeout 600

.venv-dev:
	@bin/setup.sh cpu,dense,ray,dev
.PHONY: .venv-dev

layout: .venv-dev  ## rewrite the README's list of files
	$(PY) -m async_search_rl.tools.layout

clean:  ## remove runs and caches (keeps .venv)
	rm -rf runs .cache .pytest_cache .mypy_cache .ruff_cache build *.egg-info
