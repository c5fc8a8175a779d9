"""PEFT, and bases whose weights are quantised."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from operators import Operators
from oracle import check, plain, streamed, tokens
from peft import LoraConfig, get_peft_model
from support_matrix import ROWS
from torch import nn

import trunkline

CONFIGS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "v_proj"]},
    "every linear": {"target_modules": "all-linear"},
    "dora": {"target_modules": ["k_proj", "down_proj"], "use_dora": True},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
    "modules to save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "a norm to save": {"target_modules": ["up_proj"], "modules_to_save": ["norm"]},
    "some layers": {"target_modules": ["v_proj"], "layers_to_transform": [1]},
}


def adapted(model: nn.Module, **settings: Any) -> nn.Module:
    torch.manual_seed(3)
    found = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.0, **settings))
    for name, parameter in found.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:  # zero at first: the gradient of the other would be, too
            parameter.data.normal_(0, 0.1)
    return found


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_added_before_or_after_stream(name: str, before: bool) -> None:
    ids = tokens(2, 37)
    expected = plain(adapted(build("llama"), **CONFIGS[name]).double(), ids, ids)
    model = build("llama")
    if before:
        model = trunkline.stream(adapted(model, **CONFIGS[name]).double(), chunk_size=8)
    else:
        model = adapted(trunkline.stream(model, chunk_size=8), **CONFIGS[name]).double()
    got = streamed(model, ids, ids)
    assert all("lora" in each or "modules_to_save" in each for each in got[1])
    # transformers' norms, and DoRA's of weights, have fp32 inside: a trained one is summed in another order.
    check(got, expected, torch.float64, tolerance=1e-6 if name in ("a norm to save", "dora") else None)


@pytest.mark.parametrize("family", ["gpt-oss", "Gemma 2", "DeepSeek V3 and R1", "Qwen 3 MoE"])
def test_lora_on_other_families(family: str) -> None:
    (row,) = (row for row in ROWS if row.family == family)
    targets = {"target_modules": "all-linear"}
    ids = tokens(2, 37)
    expected = plain(adapted(row.build(), **targets).to(row.dtype), ids, ids)
    model = trunkline.stream(adapted(row.build(), **targets).to(row.dtype), chunk_size=8)
    check(streamed(model, ids, ids), expected, row.dtype, tolerance=row.tolerance)


@pytest.mark.parametrize(("name", "projected", "lowest"), [("q_proj", 5, 5), ("down_proj", 3, 1)])
def test_a_frozen_base_costs_no_gradients(name: str, projected: int, lowest: int) -> None:
    """No product for the gradient of a frozen weight, none below the first adapter, and no gradient of the base."""
    layers, n = 3, 4
    ids = tokens(1, 32)
    model = trunkline.stream(adapted(build("llama", torch.float32), target_modules=[name]), chunk_size=8)
    loss = model(input_ids=ids, labels=ids).loss
    with Operators() as backward:
        loss.backward()
    products = sum(backward.counts[op] for op in ("mm", "addmm", "bmm"))
    replayed = layers * (n * 9 + (n - 1) * projected)  # seven linear layers and two of the adapter; keys and values
    inputs = (layers - 1) * n * 9 + n * lowest
    assert products == replayed + inputs + layers * n * 2  # and the two weights of the adapter
    assert all(p.grad is None for each, p in model.named_parameters() if "lora" not in each)


def compare_int8() -> None:
    """Adapters over 8-bit weights get the gradients of plain autograd on the same weights."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def model() -> nn.Module:
        found = build("llama", torch.float32).requires_grad_(False)
        quantize_(found.model.layers, Int8WeightOnlyConfig())
        return adapted(found, target_modules=["q_proj", "down_proj"])

    ids = tokens(2, 37)
    expected = plain(model(), ids, ids)
    got = streamed(trunkline.stream(model(), chunk_size=8), ids, ids)
    assert got[1]
    check(got, expected, torch.float32)


@pytest.mark.soak
def test_adapters_over_int8_weights() -> None:
    """In a process of its own: where torchao can be imported transformers and PEFT do so, and it is not silent."""
    folder = Path(sys.prefix) / "torchao"
    assert folder.is_dir(), "run make venv, which installs torchao there"
    path = os.pathsep.join(
        [str(folder), str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-c", "import test_adapters; test_adapters.compare_int8()"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
