"""Many ranks against one process: loss, every gradient, their norm, and parameters after steps of AdamW."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from families import build
from oracle import cross_entropy, relative_error, tokens
from torch import Tensor
from torch.distributed.tensor import DTensor

import trunkline
from distributed.processes import run

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
NINE = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 72}


@dataclass(frozen=True)
class Case:
    zero: int = 3
    family: str = "llama"
    batch: int = 1
    seq_len: int = 37
    chunk_size: int = 8
    keep: tuple[str, ...] = ("attention",)
    heads: dict[str, int] = field(default_factory=lambda: HEADS)
    settings: dict[str, Any] = field(default_factory=dict)
    sharding: dict[str, Any] = field(default_factory=dict)
    steps: int = 1


def heads(query: int, key: int) -> dict[str, int]:
    return {"num_attention_heads": query, "num_key_value_heads": key, "head_dim": 8, "hidden_size": 8 * query}


def batches(case: Case, replicas: int, step: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and labels of each replica; the first has few valid labels, the second none in its second step."""
    found = []
    for replica in range(replicas):
        ids = tokens(case.batch, case.seq_len, seed=10 * step + replica + 1)
        labels = ids.clone()
        if replica == 0:
            labels[0, 3 : case.seq_len // 2] = -100
        if replica == 1 and step == 1:
            labels[:] = -100
        found.append((ids, labels))
    return found


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def compare(parallel_dims: dict[str, int], cases: list[Case]) -> list[str]:
    """Run all cases on one mesh; return a text for each number that is wrong."""
    mesh = trunkline.init_mesh(**parallel_dims)
    replicas, replica = mesh["dp"].size(), mesh["dp"].get_local_rank()
    wrong = []
    for case in cases:
        model = build(case.family, torch.float32, **case.heads)
        alone = copy.deepcopy(model).double()
        if case.zero or mesh["tp"].size() > 1:
            trunkline.shard(model, mesh, zero=case.zero, **case.sharding)
        trunkline.stream(model, mesh=mesh, chunk_size=case.chunk_size, keep=case.keep, **case.settings)
        # eps large enough that a gradient which is zero but for rounding does not decide the direction of a step
        rates = {"lr": 0.01, "eps": 1e-3}
        mine, theirs = (torch.optim.AdamW(m.parameters(), **rates) for m in (model, alone))
        for step in range(case.steps):
            data = batches(case, replicas, step)
            valid = [max(int((labels[:, 1:] != -100).sum()), 1) for _, labels in data]
            total = max(sum(int((labels[:, 1:] != -100).sum()) for _, labels in data), 1)
            losses = [cross_entropy(alone(input_ids=ids).logits, labels) for ids, labels in data]
            torch.stack(losses).sum().div(total).backward()
            ids, labels = data[replica]
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            expected = float(losses[replica].detach()) / valid[replica]
            if abs(float(loss.detach()) - expected) > 1e-5 * abs(expected):
                wrong.append(f"{case}: step {step}: loss {float(loss.detach())} instead of {expected}")
            norm = torch.stack([p.grad.norm() for p in alone.parameters() if p.grad is not None]).norm()
            floor = 1e-6 * float(norm)
            for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
                assert p.grad is not None, name
                assert q.grad is not None, name
                if isinstance(p, DTensor) != isinstance(p.grad, DTensor):
                    wrong.append(f"{case}: {name}.grad is a {type(p.grad).__name__}")
                error = float((whole(p.grad).double() - q.grad).norm()) / max(float(q.grad.norm()), floor, 1e-30)
                # After a step both are at other parameters, by what the step before made of rounding.
                if error > (1e-5 if step == 0 else 1e-4):
                    wrong.append(f"{case}: step {step}: {name} is off by {error:.1e}")
            limit = float(norm) / 2 or 1.0
            got = trunkline.clip_grad_norm_(model, limit)
            torch.nn.utils.clip_grad_norm_(alone.parameters(), limit)
            if abs(float(got) - float(norm)) > 1e-5 * float(norm):
                wrong.append(f"{case}: step {step}: norm {float(got)} instead of {float(norm)}")
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
        for (name, p), q in zip(model.named_parameters(), alone.named_parameters(), strict=True):
            error = relative_error(whole(p.detach()), q[1].detach())
            if error > 1e-5:
                wrong.append(f"{case}: after {case.steps} steps {name} is off by {error:.1e}")
    return wrong


KEEPS = [(), ("attention",), ("kv",), ("attention", "kv")]
SHAPES = [(1, 1), (1, 5), (3, 8), (3, 21), (1, 37)]  # batch, sequence
SPREAD = [
    *(Case(zero, steps=5) for zero in (3, 2, 0)),
    *(Case(zero, batch=shape[0], seq_len=shape[1]) for shape, zero in zip(SHAPES, (3, 2, 0, 3, 2), strict=True)),
    *(Case(keep=keep, zero=zero) for keep, zero in zip(KEEPS, (0, 3, 2, 0), strict=True)),
    Case(family="gpt2", heads={}, chunk_size=5),
    Case(family="llama-tied", zero=2, batch=3, chunk_size=64),
    Case(family="qwen3", heads=heads(4, 1)),
    Case(family="gpt-neox", heads={}, keep=(), settings={"checkpoint_every": 2}),
    Case(heads=heads(12, 3), keep=("kv",), settings={"checkpoint_every": 3}),
]
PLANNED = ["llama-tied", "qwen2", "qwen3", "mistral", "gpt-neox", "cohere", "gemma", "granite"]  # for tp
FOR_TP = [
    replace(case, heads=HEADS if case.heads else {})
    for case in SPREAD
    if case.family in ["llama", *PLANNED] and case.heads != heads(4, 1)
]
# Two families, every zero, key/value heads fewer than ranks, a tied head, fewer tokens than a chunk.
FEW = [
    Case(steps=3),
    Case(zero=2, family="qwen3", heads=heads(4, 1), batch=3, seq_len=21, keep=()),
    Case(zero=0, family="llama-tied", seq_len=5, keep=("attention", "kv"), settings={"checkpoint_every": 2}),
]
FAST: dict[str, tuple[dict[str, int], list[Case]]] = {
    "sp2": ({"sp": 2}, FEW),
    "cp2": ({"cp": 2}, FEW[1:]),
    "dp2": ({"dp": 2}, FEW[:1]),
    "tp2": ({"tp": 2}, [Case(zero=0, steps=3), Case(zero=0, family="qwen3", heads={}, keep=())]),
    "dp2-sp2": ({"dp": 2, "sp": 2}, FEW[1:2]),
}
TWO_AXES = [Case(steps=5), Case(keep=()), Case(family="qwen3", heads={}, keep=("kv",))]
SOAK: dict[str, tuple[dict[str, int], list[Case]]] = {
    "sp2": ({"sp": 2}, SPREAD),
    "cp2": ({"cp": 2}, SPREAD),
    "dp2": ({"dp": 2}, SPREAD),
    "tp2": ({"tp": 2}, [Case(zero=0, steps=5), *(Case(zero=0, keep=keep) for keep in KEEPS), *FOR_TP]),
    "tp2-families": ({"tp": 2}, [Case(zero=0, family=family, heads={}) for family in PLANNED]),
    "few-cp2": ({"cp": 2}, FEW),
    "few-dp2": ({"dp": 2}, FEW),
    "cp3": ({"cp": 3}, SPREAD),
    "sp3": ({"sp": 3}, [Case(heads=NINE, steps=5), *(Case(heads=NINE, batch=b, seq_len=n) for b, n in SHAPES)]),
    "sp3-all": ({"sp": 3}, [replace(case, heads=heads(6, 3)) for case in SPREAD if case.heads]),
    "sp4": ({"sp": 4}, SPREAD),
    "sp2-cp2": ({"sp": 2, "cp": 2}, SPREAD),
    "sp2-tp2": ({"sp": 2, "tp": 2}, [*TWO_AXES, *FOR_TP]),
    "dp2-sp2": ({"dp": 2, "sp": 2}, SPREAD),
    "dp2-sp2-cp2": ({"dp": 2, "sp": 2, "cp": 2}, SPREAD),
}


@pytest.mark.parametrize("mesh", FAST)
def test_ranks_compute_the_same_as_one_process(mesh: str) -> None:
    parallel_dims, cases = FAST[mesh]
    for wrong in run(math.prod(parallel_dims.values()), compare, parallel_dims, cases):
        assert not wrong, "\n".join(wrong[:20])


@pytest.mark.soak
@pytest.mark.parametrize("mesh", SOAK)
def test_all_cases_on_all_meshes(mesh: str) -> None:
    parallel_dims, cases = SOAK[mesh]
    for wrong in run(math.prod(parallel_dims.values()), compare, parallel_dims, cases, timeout=1200):
        assert not wrong, "\n".join(wrong[:20])


def no_plan() -> str:
    with pytest.raises(ValueError, match="GPT2") as refused:
        trunkline.shard(build("gpt2"), trunkline.init_mesh(tp=2))
    return str(refused.value)


def test_family_without_a_tp_plan_is_refused_by_name() -> None:
    assert "GPT2LMHeadModel has no tensor-parallel plan in transformers: use sp or cp" in run(2, no_plan)[0]
