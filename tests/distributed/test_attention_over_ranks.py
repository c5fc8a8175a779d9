"""Packed documents, sliding windows and attention sinks over ranks, against each document alone on one process."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from oracle import alone, collect, plain, positions, tokens, total_error
from support_matrix import ROWS
from torch.distributed.tensor import DTensor

import trunkline
from distributed.processes import run

LENGTHS = [[5, 1, 17, 17], [12, 28]]
FAMILIES = ["Llama", "Llama 4", "Mistral", "Gemma 2", "gpt-oss", "DeepSeek V3"]


def compare(
    parallel_dims: dict[str, int], families: list[str], config: dict[str, Any], settings: dict[str, Any]
) -> list[str]:
    """Return a text for each loss or gradient that differs from each document alone."""
    mesh = trunkline.init_mesh(**parallel_dims)
    wrong = []
    for row in (row for row in ROWS if any(row.family.startswith(name) for name in families)):
        model = replace(row, settings={**row.settings, **config}).build(dtype=torch.float32)
        lengths = LENGTHS[: row.rows]
        ids = tokens(row.rows, 40)
        loss, expected = alone(copy.deepcopy(model), ids, lengths)
        trunkline.shard(model, mesh)
        trunkline.stream(model, mesh=mesh, **{"chunk_size": 8, **settings})
        got = model(input_ids=ids, labels=ids, position_ids=positions(lengths)).loss
        got.backward()
        floor = 1e-6 * float(torch.stack([g.norm() for g in expected.values()]).norm())
        if abs(float(got.detach()) - float(loss)) > 1e-6 * float(loss):
            wrong.append(f"{row.family}: loss {float(got.detach())} instead of {float(loss)}")
        for name, gradient in collect(model).items():
            assert isinstance(gradient, DTensor)
            difference = float((gradient.full_tensor() - expected[name]).norm())
            if difference > 1e-5 * max(float(expected[name].norm()), floor):
                wrong.append(f"{row.family}: {name} is off by {difference / float(expected[name].norm()):.1e}")
    return wrong


@pytest.mark.parametrize(("parallel_dims", "family"), [({"sp": 2}, "DeepSeek V3"), ({"cp": 2}, "gpt-oss")], ids=str)
def test_documents_windows_and_sinks(parallel_dims: dict[str, int], family: str) -> None:
    for wrong in run(2, compare, parallel_dims, [family], {}, {}):
        assert not wrong


@pytest.mark.soak
@pytest.mark.parametrize("parallel_dims", [{"sp": 2}, {"cp": 2}, {"sp": 2, "cp": 2}, {"sp": 4}, {"cp": 4}], ids=str)
def test_documents_windows_and_sinks_of_all_families(parallel_dims: dict[str, int]) -> None:
    families = {"{'sp': 4}": FAMILIES[:3], "{'cp': 4}": FAMILIES[2:4]}.get(str(parallel_dims), FAMILIES)
    for wrong in run(math.prod(parallel_dims.values()), compare, parallel_dims, families, {}, {}):
        assert not wrong


STREAMED, HEAD_GROUPS = {"attn_strategy": "streamed"}, {"attn_strategy": "head_groups"}
RECOMPUTED = {"checkpoint_every": 2, "keep": ()}


@pytest.mark.parametrize(
    ("parallel_dims", "settings"),
    [
        ({"sp": 2}, HEAD_GROUPS),
        pytest.param({"cp": 2}, STREAMED, marks=pytest.mark.soak),
        pytest.param({"sp": 2}, RECOMPUTED, marks=pytest.mark.soak),
        pytest.param({"cp": 2}, RECOMPUTED, marks=pytest.mark.soak),
        pytest.param({"sp": 2}, STREAMED, marks=pytest.mark.soak),
        pytest.param({"cp": 2}, HEAD_GROUPS, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_windows_and_sinks_with_offloading(
    parallel_dims: dict[str, int], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Ranks with half of the sinks each; windows whose chunks are on disk."""
    given = {"chunk_size": 8, "device_budget": "200KiB", "offload_dir": str(tmp_path), **settings}
    heads = {"num_key_value_heads": 4}
    for wrong in run(2, compare, parallel_dims, ["Mistral", "gpt-oss"], heads, given):
        assert not wrong


def compiled(parallel_dims: dict[str, int]) -> tuple[list[float], list[int]]:
    """Return the gradient error and the number of compiled graphs after each of two steps."""
    from torch._dynamo.testing import CompileCounter

    counter, compile_ = CompileCounter(), torch.nn.Module.compile
    torch.nn.Module.compile = lambda self: compile_(self, backend=counter)  # no code is generated
    model, ids = build("llama", torch.float32, num_hidden_layers=2), tokens(1, 29)
    expected = plain(copy.deepcopy(model), ids, ids, 28)[1]
    mesh = trunkline.init_mesh(**parallel_dims)
    trunkline.shard(model, mesh)
    trunkline.stream(model, mesh=mesh, chunk_size=8, compile=True)
    errors, graphs = [], []
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        found = collect(model).items()
        gradients = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found}
        errors.append(total_error(gradients, expected))
        graphs.append(counter.frame_count)
    return errors, graphs


@pytest.mark.soak
@pytest.mark.parametrize("parallel_dims", [{"sp": 2}, {"tp": 2}], ids=str)
def test_compiled_layers_are_traced_once(parallel_dims: dict[str, int]) -> None:
    """Over sp two chunks are in the same compiled layer at a time."""
    for errors, (first, second) in run(2, compiled, parallel_dims, fresh=True):
        assert max(errors) < 1e-5
        assert 0 < first == second
