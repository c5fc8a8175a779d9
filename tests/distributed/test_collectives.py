"""Number and size of the collectives of a step, and their overlap with compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import others_in_soak
from families import build
from oracle import tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import trunkline
from distributed.processes import run
from trunkline.distributed.comm import Comm, PendingCollective

LAYERS, CHUNK = 3, 8


class CollectiveCounter(TorchDispatchMode):
    """Count of collectives by name, and the number of elements of the largest tensor that they moved."""

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


def count(parallel_dims: dict[str, int], seq_len: int, keep: tuple[str, ...], zero: int) -> tuple[Any, ...]:
    mesh = trunkline.init_mesh(**parallel_dims)
    # More chunks than parameters: what grows with the sequence would be larger than anything else.
    model = build("llama", torch.float32, vocab_size=16, intermediate_size=8, hidden_size=16, head_dim=4)
    if zero:
        trunkline.shard(model, mesh, zero=zero)
    trunkline.stream(model, mesh=mesh, chunk_size=CHUNK, keep=keep)
    ids = tokens(1, seq_len, vocab=16)
    with CollectiveCounter() as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with CollectiveCounter() as backward:
        loss.backward()
    parameters = sum(1 for _ in model.parameters())
    return dict(forward.counts), dict(backward.counts), max(forward.largest, backward.largest), parameters


@pytest.mark.parametrize("keep", [("attention",), ("attention", "kv")], ids=["attention", "both"])
def test_collectives_of_a_step_over_sp(keep: tuple[str, ...]) -> None:
    """One all-gather a layer and sweep; one all-to-all a chunk and direction; one reduction of gradients."""
    for seq_len, zero in ((40, 3), (80, 2), (40, 0)) if keep == ("attention",) else ((80, 3),):
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
    """Keys and values of all earlier tokens are gathered for every chunk, once for each kernel call."""
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
    from trunkline.attention import kv_spans

    with patch.object(kv_spans, "SPAN", 16):
        *_, largest, _ = count({"cp": 2}, seq_len, ("attention",), 3)
    return largest, 0


def test_gathered_keys_do_not_grow_with_the_sequence_over_cp() -> None:
    largest = [run(2, spans, seq_len)[0][0] for seq_len in (80, 160)]
    assert largest[0] == largest[1]


class Order(TorchDispatchMode):
    """Record of the order in which a rank starts exchanges, computes, and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm") or "attention" in func.overloadpacket.__name__:
            self.events.append("compute")
        return func(*args, **(kwargs or {}))

    def sent(self, original: Any) -> Any:
        def noted(comm: Comm, parts: Tensor) -> PendingCollective:
            pending: PendingCollective = original(comm, parts)
            self.events.append(pending)
            return pending

        return noted

    def wait(self, original: Any) -> Any:
        def noted(pending: PendingCollective) -> Tensor:
            if pending.work is not None and any(each is pending for each in self.events):
                self.events.append((pending,))
            received: Tensor = original(pending)
            return received

        return noted

    @property
    def exchanges(self) -> tuple[int, int]:
        """Number of exchanges, and of those during which nothing was computed."""
        begun = {id(each): at for at, each in enumerate(self.events) if isinstance(each, PendingCollective)}
        ended = {id(each[0]): at for at, each in enumerate(self.events) if isinstance(each, tuple)}
        assert begun.keys() == ended.keys()
        return len(begun), sum("compute" not in self.events[begun[each] : ended[each]] for each in begun)


def order(
    parallel_dims: dict[str, int], collective: str, seq_len: int, options: dict[str, Any]
) -> tuple[tuple[int, int], tuple[int, int]]:
    mesh = trunkline.init_mesh(**parallel_dims)
    model = build("llama", torch.float32, vocab_size=16, num_key_value_heads=4, num_hidden_layers=LAYERS)
    trunkline.stream(model, mesh=mesh, chunk_size=CHUNK, **options)
    ids = tokens(1, seq_len, vocab=16)
    noted = []
    loss = None
    for _ in range(2):
        mode = Order()
        with (
            patch.object(Comm, collective, mode.sent(getattr(Comm, collective))),
            patch.object(PendingCollective, "wait", mode.wait(PendingCollective.wait)),
            mode,
        ):
            loss = model(input_ids=ids, labels=ids).loss if loss is None else loss.backward()
        noted.append(mode.exchanges)
    return noted[0], noted[1]


@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [
        pytest.param({"keep": ("attention", "kv")}, lambda n: (2 * n, 0), lambda n: (4 * n, 3), marks=pytest.mark.soak),
        ({"keep": ("attention",)}, lambda n: (2 * n, 0), lambda n: (5 * n - 1, 4)),
        pytest.param({"keep": ()}, lambda n: (2 * n, 0), lambda n: (5 * n - 1, 5), marks=pytest.mark.soak),
        # Here the gradient of a chunk's output is all that can be computed of it, and comes too late.
        ({"attn_strategy": "head_groups", "device_budget": "1GiB"}, lambda n: (3 * n, 1), lambda n: (5 * n, n + 3)),
    ],
    ids=["both", "attention", "nothing", "head groups"],
)
def test_a_neighbouring_chunk_computes_during_exchanges(
    options: dict[str, Any], forward: Callable[[int], tuple[int, int]], backward: Callable[[int], tuple[int, int]]
) -> None:
    """Exchanges at the ends of a sweep have no neighbour; their number does not grow with the sequence."""
    for n in (4, 8):
        found = run(2, order, {"sp": 2}, "all_to_all", n * CHUNK, options)[0]
        for (exchanges, exposed), expected in zip(found, (forward(n), backward(n)), strict=True):
            assert (exchanges / LAYERS, exposed / LAYERS) == expected


@pytest.mark.parametrize(("keep", "times"), others_in_soak([(("attention",), 1), ((), 2)], [((), 2)]))
def test_keys_are_gathered_while_earlier_ones_are_in_use(keep: tuple[str, ...], times: int) -> None:
    """All gathers overlap with compute, except the first of a sweep and that of chunk 0."""
    for n in (4, 8):
        forward, backward = run(2, order, {"cp": 2}, "all_gather", n * CHUNK, {"keep": keep})[0]
        calls = 2 * n - 1  # earlier keys, of all chunks but the first, and own keys
        assert (forward[0] / LAYERS, forward[1] / LAYERS) == (calls, 1)
        assert (backward[0] / LAYERS, backward[1] / LAYERS) == (times * calls, times + 1)
