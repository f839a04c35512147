# Everything runs in .venv, which `make setup` makes; demo, test, unit, check and bench make it first when needed.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.complete
TORCH := torch==2.13.0
# Three processes on two cores, since tests of the service mostly wait; a file of tests at a time: what a file has set
# up is set up once. The order of the files is that of tests/conftest.py.
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder

export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Bytecode is kept, also where the environment says otherwise: tests start hundreds of processes, and each would compile
# all that it imports.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-gpu unit check fuzz prove prove-plans prove-pruning equality docs bench bench-search bench-runs bench-sync chaos soak clean

help:
	@echo "Times on two cores. The target that you make first also makes .venv, which downloads for some minutes."
	@echo "make demo          finds plans for three real models through the service      2-3 min"
	@echo "make unit          the quick tests                                            2 min"
	@echo "make check         formatting, lint, types, import rules                      1-2 min"
	@echo "make test          every capability, with real processes and servers          12 min"
	@echo "make test-long     further kinds of models and plans, scripts of benchmarks   10 min"
	@echo "make test-gpu      pipelines, stages and trainers on GPUs of this host        5 min"
	@echo "make docs          the documentation as a site in site/, links checked         5 s"
	@echo "make fuzz          gives the importer hostile model files                     1 min"
	@echo "make prove         verifies ten thousand random plans; pruning and bounds"
	@echo "                   against full enumeration                                   20 min"
	@echo "make equality      plans of all kinds on real processes against one process   15-30 min"
	@echo "make chaos         kills parts of the service while jobs run                  20 min"
	@echo "make soak          throughput, polls and 30 minutes of everything             40 min"
	@echo "make bench         speed of import, pricing and decisions                     10 min"
	@echo "make bench-search  searchers against known optima, real models, growth        hours"
	@echo "make bench-runs    predicted against measured plans, on a quiet host          5 min"
	@echo "make bench-sync    a small training under each sync mode                      4 min"
	@echo "make setup         makes .venv and compiles the kernels, nothing else         some minutes"
	@echo "make clean         removes what these made                                    seconds"

setup: $(STAMP)

# A stamp, not the folder: an installation that was interrupted is done again. torch comes first, at the exact version,
# so that nothing else decides which torch is taken.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: sudo apt-get install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed, and $(PYTHON) is older; name another: make setup PYTHON=..."; exit 1; }
	@rm -f $(STAMP)
	@if $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
		$(PYTHON) -m venv --clear .venv; \
	elif command -v virtualenv >/dev/null; then \
		virtualenv --quiet --clear --python $(PYTHON) .venv; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update --quiet && apt-get install --quiet --yes python3-venv && $(PYTHON) -m venv --clear .venv; \
	else \
		echo "$(PYTHON) cannot make virtual environments: sudo apt-get install python3-venv"; exit 1; \
	fi
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	$(BIN)/python -m service.warm_up
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/automap demo

# The page of the service is tested in a real browser and its store on a redis-server as others run it; both are installed
# where that is allowed (RUNLEVEL=1: no such server is started then). What could not be run is said in the last lines.
test: $(STAMP)
	@{ command -v chromium && command -v redis-server; } >/dev/null || [ "$$(id -u)" != 0 ] \
		|| ! command -v apt-get >/dev/null \
		|| RUNLEVEL=1 timeout 300 sh -c 'apt-get update && apt-get install --yes chromium redis-server' >/dev/null 2>&1 \
		|| true
	@$(BIN)/python -m pytest $(WORKERS) -m "not long"

test-long: $(STAMP)
	@$(BIN)/python -m pytest $(WORKERS) -m long --timeout 3600

# Ranks share a GPU where there are fewer: NCCL 2.30 or newer is needed for that.
test-gpu: $(STAMP)
	@$(BIN)/python -m pytest --device cuda tests/automap/runtime/test_pipeline.py \
		tests/automap/runtime/test_stage_executor.py tests/automap/runtime/test_module_trainer.py \
		tests/automap/test_plan_loader.py

unit: $(STAMP)
	@$(BIN)/python -m pytest $(WORKERS) -m "not slow and not long"

check: $(STAMP)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

fuzz: $(STAMP)
	@$(BIN)/python benchmarks/fuzz_import.py

prove: $(STAMP)
	@$(MAKE) --no-print-directory -j 2 prove-plans prove-pruning

prove-plans: $(STAMP)
	@$(BIN)/python benchmarks/prove_plans.py

prove-pruning: $(STAMP)
	@$(BIN)/python benchmarks/prove_pruning.py

docs: $(STAMP)
	@$(BIN)/sphinx-build -q -W --keep-going -c docs . site
	@echo "site/docs/README.html"

equality: $(STAMP)
	@$(BIN)/python benchmarks/equality.py

chaos: $(STAMP)
	@$(BIN)/python benchmarks/service_chaos.py

soak: $(STAMP)
	@$(BIN)/python benchmarks/service_load.py

bench: $(STAMP)
	@for script in benchmarks/*_speed.py benchmarks/*_limits.py; do [ ! -e "$$script" ] || $(BIN)/python "$$script" || exit 1; done

bench-search: $(STAMP)
	@for script in problems searchers real_models search_scale dqn_ablation cost_graph pipeline_optima; do \
		$(BIN)/python benchmarks/$$script.py || exit 1; \
	done

bench-runs: $(STAMP)
	@$(BIN)/python benchmarks/order_of_runs.py
	@$(BIN)/python benchmarks/step_parts.py
	@$(BIN)/python benchmarks/runtime_overhead.py

bench-sync: $(STAMP)
	@$(BIN)/python benchmarks/sync_training.py

clean:
	rm -rf .venv build dist demo site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .schemathesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
