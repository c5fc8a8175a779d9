"""Costs of a step: kernel calls, copies, allocations, and what is held when."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from families import build
from operators import Operators
from oracle import tokens
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import trunkline
from trunkline.attention import kv_spans
from trunkline.offload.chunked_sequence import ChunkedSequence

KEEPS = [(), ("attention",), ("kv",), ("attention", "kv")]


COPIES = {("attention", "kv"): [99, 149], ("attention",): [99, 209], ("kv",): [99, 149], (): [99, 209]}
ALLOCATIONS = {("attention", "kv"): [18, 35], ("attention",): [18, 41], ("kv",): [18, 35], (): [18, 41]}


@pytest.mark.parametrize(
    ("keep", "recomputed", "projected"),
    [(("attention", "kv"), 0, 0), (("attention",), 0, 3), (("kv",), 7, 0), ((), 7, 3)],
)
def test_kernel_calls_and_copies_of_a_step(keep: tuple[str, ...], recomputed: int, projected: int) -> None:
    """Per layer and n = 4 chunks: one call a diagonal and one for everything before it, forward and backward alike.

    Backward adds nothing where attention is kept, and the same calls once more where it is not; keys/values that were
    not kept cost three projections each for n - 1 chunks and no more.
    """
    n, layers = 4, 3
    model = trunkline.stream(build("llama", torch.float32, tie_word_embeddings=True), chunk_size=8, keep=keep)
    ids = tokens(1, 32)
    with Operators() as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with Operators() as backward:
        loss.backward()
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    assert forward.counts[flash] == layers * (2 * n - 1)
    assert forward.counts["lerp_"] == layers * (n - 1)  # the merges
    assert backward.counts[flash] == layers * recomputed
    assert backward.counts[f"{flash}_backward"] == layers * (2 * n - 1)
    # Seven linear layers: forward once; backward replays them and takes two products each.
    products = [sum(counts[op] for op in ("mm", "addmm", "bmm")) for counts in (forward.counts, backward.counts)]
    head = n * 3  # with its two gradients, a tile a chunk
    # All of a step, the model's own included; everything resident, tiers and lanes add nothing to it.
    assert [forward.copies, backward.copies] == COPIES[keep]
    assert [forward.allocations, backward.allocations] == ALLOCATIONS[keep]
    assert products[0] == layers * n * 7 + head
    assert products[1] == layers * n * 7 * 3 + layers * (n - 1) * projected


@pytest.mark.parametrize("keep", KEEPS, ids=["nothing", "attention", "kv", "both"])
def test_kept_bytes_are_those_of_the_formula_and_are_released(keep: tuple[str, ...]) -> None:
    model = trunkline.stream(build("llama", torch.float32), chunk_size=8, keep=keep)
    ids = tokens(1, 40)
    loss = model(input_ids=ids, labels=ids).loss
    state = loss.grad_fn.state
    per_token = 4 * (4 * 8 + 4) * ("attention" in keep) + 4 * 2 * 2 * 8 * ("kv" in keep)  # o, lse; k, v
    assert sum(core.nbytes for core in state.cores) == 3 * 40 * per_token
    assert sum(sequence.nbytes for sequence in state.inputs) == 3 * 40 * 32 * 4
    assert state.dy.nbytes == 40 * 32 * 4
    loss.backward()
    assert all(core is None for core in state.cores)
    assert sum(sequence.nbytes for sequence in state.inputs) == 0
    assert state.dy.nbytes == 0
    assert not state.grad_sums._sums


def test_a_forward_that_is_dropped_frees_what_it_kept() -> None:
    model = trunkline.stream(build("llama", torch.float32), chunk_size=8)
    loss = model(input_ids=tokens(1, 40), labels=tokens(1, 40)).loss

    held = weakref.ref(loss.grad_fn.state.cores[0])
    del loss
    gc.collect()
    assert held() is None


def test_the_input_gradient_of_a_chunk_is_freed_before_the_next_chunk_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refs: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    stash = ChunkedSequence.stash

    def offload(self: ChunkedSequence, index: int, x: torch.Tensor) -> None:
        if self._name != "dy":
            stash(self, index, x)
            return
        refs.append(weakref.ref(x))
        stash(self, index, x.clone())  # as a store beyond the device: it holds no reference to `x`

    def progress(at: trunkline.Progress) -> None:
        if at.part == "backward":
            alive.append(sum(ref() is not None for ref in refs))

    monkeypatch.setattr(ChunkedSequence, "stash", offload)
    model = trunkline.stream(build("llama", torch.float32), chunk_size=8, progress=progress)
    model(input_ids=tokens(1, 40), labels=tokens(1, 40)).loss.backward()
    assert refs
    assert alive
    assert not any(alive)


def test_evaluation_keeps_nothing() -> None:
    model = trunkline.stream(build("llama", torch.float32), chunk_size=8)
    with torch.no_grad():
        loss = model(input_ids=tokens(1, 40), labels=tokens(1, 40)).loss
    assert loss.grad_fn is None


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that operators have made and that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def test_memory_beyond_the_stores_does_not_grow_with_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak of a step, less what the engine says it keeps, at 1,024 and 4,096 tokens in chunks of 128."""

    monkeypatch.setattr(kv_spans, "SPAN", 256)
    layers, width, heads, kv_heads, head_dim = 3, 32, 4, 2, 8
    kept = layers * width + layers * (heads * head_dim + heads)  # inputs; o and lse
    live = width + 4 * kv_heads * head_dim  # dy; k, v, dk, dv of one layer
    beyond = []
    for seq_len in (1024, 4096):
        model = trunkline.stream(build("llama", torch.float32, max_position_embeddings=4096), chunk_size=128)
        ids = tokens(1, seq_len)
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=False)
        with LiveBytes() as memory:
            model(input_ids=ids, labels=ids).loss.backward()
        given = 8  # ids: views of them are noted, too
        beyond.append(memory.peak - seq_len * ((kept + live) * 4 + given))
    assert beyond[0] > 0
    assert beyond[1] <= 1.05 * beyond[0], beyond
