"""Refusals over ranks: each names the setting and the fix."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from families import build
from oracle import tokens
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard

import trunkline
from distributed.processes import run


def refusals() -> list[str]:
    mesh = trunkline.init_mesh(dp=2)
    said = []

    def refused(call: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match=r"\w") as error:
            call(*args, **kwargs)
        said.append(str(error.value))

    refused(trunkline.stream, nn.parallel.DistributedDataParallel(build("llama", torch.float32)), mesh=mesh)
    refused(trunkline.stream, fully_shard(build("llama", torch.float32)), mesh=mesh)
    model = trunkline.shard(build("llama", torch.float32), mesh)
    refused(trunkline.stream, model)
    refused(trunkline.shard, model, mesh)
    refused(trunkline.shard, build("llama"), mesh, zero=1)
    refused(trunkline.shard, build("llama"), mesh, zero=0, offload=True)
    refused(trunkline.shard, trunkline.stream(build("llama")), mesh)
    refused(trunkline.stream, build("llama"), mesh="cuda")
    refused(trunkline.init_mesh, sp=3)
    refused(trunkline.clip_grad_norm_, model, 0.0)
    refused(trunkline.stream, trunkline.stream(build("llama"), mesh=mesh))
    refused(trunkline.stream, trunkline.shard(build("llama"), mesh, zero=0))
    model = trunkline.stream(model, mesh=mesh)
    ids = tokens(1, 9)
    with trunkline.no_sync(model):
        model(input_ids=ids, labels=ids).loss.backward()
    refused(trunkline.unstream, model)
    with contextlib.suppress(KeyError), trunkline.no_sync(model):
        model(input_ids=ids, labels=ids).loss.backward()
        raise KeyError
    trunkline.unstream(model)  # an error drops what waits
    late = get_peft_model(trunkline.shard(build("llama"), mesh), LoraConfig(target_modules=["q_proj"]))
    refused(trunkline.stream, late, mesh=mesh)
    return said


def test_refusals_name_the_setting_and_the_fix() -> None:
    said = run(2, refusals)[0]
    expected = [
        "mesh=trunkline.init_mesh()", "call trunkline.shard(model, mesh) instead", "give stream() the mesh, too",
        "sharded already", "give 0, 2 or 3", "no effect with zero=0", "call trunkline.unstream(model) first",
        "give the mesh that trunkline.init_mesh returns", "must divide 2", "give a number above 0",
        "give stream() the mesh, too", "give stream() the mesh, too", "run a backward outside it first",
        "put adapters (LoRA) on the model first",
    ]  # fmt: skip
    assert len(said) == len(expected)
    for text, part in zip(said, expected, strict=True):
        assert part in text


def cut_heads(parallel_dims: dict[str, int], heads: dict[str, int]) -> str:
    mesh = trunkline.init_mesh(**parallel_dims)
    with pytest.raises(ValueError, match="heads") as error:
        trunkline.stream(build("llama", **heads), mesh=mesh)
    return str(error.value)


def test_degree_that_does_not_divide_the_heads_is_refused() -> None:
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 24}
    text = run(2, cut_heads, {"sp": 2}, heads)[0]
    assert "sp=2 does not divide 3 query and 3 key/value heads (world size 2)" in text
    assert "cp=2" in text
