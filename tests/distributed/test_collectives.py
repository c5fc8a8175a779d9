"""How many collectives a step takes, and how large they are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from families import build
from oracle import tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import trunkline
from distributed.processes import run

LAYERS, CHUNK = 3, 8


class Collectives(TorchDispatchMode):
    """Counts collectives by name, and keeps the elements of the largest tensor that any of them moved."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not any(word in str(func) for word in ("wait", "wrap")):
            name = func.overloadpacket.__name__.strip("_").removesuffix("_base").removesuffix("_into_tensor")
            self.counts[name.replace("_", "").removesuffix("tensor")] += 1
            flat = torch.utils._pytree.tree_leaves(args)
            self.largest = max([self.largest, *(x.numel() for x in flat if isinstance(x, Tensor))])
        return func(*args, **(kwargs or {}))


def count(degrees: dict[str, int], seq_len: int, keep: tuple[str, ...], zero: int) -> tuple[Any, ...]:
    mesh = trunkline.init_mesh(**degrees)
    # More chunks than parameters: what grows with the sequence would be larger than anything else.
    model = build("llama", torch.float32, vocab_size=16, intermediate_size=8, hidden_size=16, head_dim=4)
    if zero:
        trunkline.shard(model, mesh, zero=zero)
    trunkline.stream(model, mesh=mesh, chunk_size=CHUNK, keep=keep)
    ids = tokens(1, seq_len, vocab=16)
    with Collectives() as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with Collectives() as backward:
        loss.backward()
    parameters = sum(1 for _ in model.parameters())
    return dict(forward.counts), dict(backward.counts), max(forward.largest, backward.largest), parameters


@pytest.mark.parametrize("keep", [("attention",), ("attention", "kv")], ids=["attention", "both"])
def test_collectives_of_a_step_over_sp(keep: tuple[str, ...]) -> None:
    """A layer is gathered once a sweep; an all-to-all a chunk each way; gradients are reduced once."""
    for seq_len, zero in ((40, 3), (80, 3), (80, 2), (80, 0)):
        n = seq_len // CHUNK
        forward, backward, largest, parameters = run(2, count, {"sp": 2}, seq_len, keep, zero)[0]
        gathers = 1 + LAYERS if zero else 0  # what is in no layer, and each layer
        assert forward == {"allgather": 1 + gathers, "alltoall": LAYERS * 2 * n, "allreduce": 1}
        projected = 0 if "kv" in keep else n - 1
        expected = {"alltoall": LAYERS * (4 * n + projected), "allreduce": LAYERS + 1}  # what was touched at all, once
        if zero:
            expected |= {"allgather": 1 if zero == 2 else gathers, "reducescatter": parameters}
        else:
            expected["allreduce"] += parameters
        assert backward == expected
        # 4 query and two times 2 key/value heads of dimension 4, of a rank's half of a chunk; or a layer's parameters
        assert largest <= max(2 * 8 * 4 * CHUNK, 16 * 16 * 4 + 3 * 16 * 8), largest


def test_collectives_of_a_step_over_cp() -> None:
    """Keys and values of all earlier tokens are gathered for every chunk, in as many calls as kernels take."""
    found = {}
    for seq_len in (40, 80):
        n = seq_len // CHUNK
        forward, backward, found[seq_len], parameters = run(2, count, {"cp": 2}, seq_len, ("attention",), 3)[0]
        # A chunk's own keys, and where there are earlier ones, these.
        assert forward == {"allgather": 2 + LAYERS + LAYERS * (2 * n - 1), "allreduce": 1}
        assert backward == {
            "allgather": 1 + LAYERS + LAYERS * (2 * n - 1),
            "reducescatter": parameters + LAYERS * (2 * n - 1),
            "allreduce": LAYERS + 1,
        }


def spans(seq_len: int) -> tuple[int, int]:
    from trunkline.attention import core

    core.SPAN = 16
    *_, largest, _ = count({"cp": 2}, seq_len, ("attention",), 3)
    return largest, 0


def test_what_is_gathered_over_cp_does_not_grow_with_the_sequence() -> None:
    largest = [run(2, spans, seq_len)[0][0] for seq_len in (80, 160, 320)]
    assert largest[0] == largest[1] == largest[2]
