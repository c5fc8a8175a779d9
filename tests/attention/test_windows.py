"""Windows and documents save work and memory: unseen chunks are not fetched, and passed chunks are dropped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import all_pairs
from families import build
from oracle import packed, positions, streamed, tokens

import trunkline
from trunkline.attention.core import Core
from trunkline.attention.kernels import CpuFlashKernel
from trunkline.attention.kv_store import KVStore

CHUNK, N = 8, 12  # tokens of a chunk, chunks
IDS = tokens(1, CHUNK * N)


def watch(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, note: Callable[..., Any]) -> list[Any]:
    """Record `note(...)` after each call of a method."""
    found, method = [], getattr(owner, name)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        found.append(note(self, *args, **kwargs))
        return result

    monkeypatch.setattr(owner, name, wrapped)
    return found


@pytest.mark.parametrize(("window", "reach"), [(1, 0), (2, 1), (9, 1), (10, 2), (30, 4)])
@pytest.mark.parametrize("tier", ["device", "disk"])
def test_chunks_beyond_a_window_are_not_fetched(
    window: int, reach: int, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk fetches as many earlier chunks as its window reaches into: once in forward, once in backward."""
    model = build("mistral", torch.float32, sliding_window=window, num_hidden_layers=1)
    budget = {"device_budget": "24KiB", "offload_dir": tmp_path, "attn_strategy": "streamed"} if tier == "disk" else {}
    trunkline.stream(model, chunk_size=CHUNK, **budget)
    read = watch(monkeypatch, KVStore, "next_streamed", lambda self: self._stores)
    loss = model(input_ids=IDS, labels=IDS).loss
    met = sum(min(i, reach) for i in range(N))
    assert len(read) == met
    loss.backward()
    # Keys and values again; and of their gradients those that a later chunk has left something in.
    assert len(read) == 2 * met + sum(
        1 for i in range(N - 1) for j in range(max(0, i - reach), i + 1) if i + 1 - reach <= j
    )


def test_keys_that_a_window_has_passed_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward holds the chunks that one chunk sees; backward none that only later chunks see, and none early."""
    model = build("mistral", torch.float32, sliding_window=12, num_hidden_layers=2)
    trunkline.stream(model, chunk_size=CHUNK)
    pair = 2 * CHUNK * 2 * 8 * 4  # keys and values of a chunk: two heads of 8 in fp32
    forward = watch(monkeypatch, Core, "forward", lambda self, *_: self._kv.nbytes // pair)
    loss = model(input_ids=IDS, labels=IDS).loss
    assert forward == 2 * [1, *[2] * (N - 2), 0]
    backward = watch(monkeypatch, Core, "_gradient", lambda self, chunk, *_: (chunk.index, self._kv.nbytes // pair))
    loss.backward()
    assert backward == 2 * [(i, int(i > 1)) for i in range(N - 1, -1, -1)]


@pytest.mark.parametrize("keep", [("attention",), ("attention", "kv"), ()])
def test_a_window_takes_less_memory(keep: tuple[str, ...]) -> None:
    """The peak of the stores has keys and values of two chunks in place of all."""
    peaks = {}
    for window in (None, 12):
        model = build("mistral", torch.float32, sliding_window=window, num_hidden_layers=1)
        trunkline.stream(model, chunk_size=CHUNK, keep=keep)
        streamed(model, IDS, IDS)
        peaks[window] = trunkline.stats(model).peaks["device"]
    assert peaks[12] < peaks[None]


@pytest.mark.parametrize("lengths", [[96], [5, 1, 17, 9, 8, 56], [8] * 12, [1] * 96, [31, 65]])
def test_kernels_compute_visible_pairs_only(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel calls compute the triangles of the documents and nothing else, forward and backward."""
    computed = {"forward": 0, "backward": 0}

    def count(part: str) -> Callable[..., Any]:
        def counted(q: torch.Tensor, k: torch.Tensor, causal: bool) -> None:
            tiles, rows, keys = len(q), q.shape[2], k.shape[2]
            assert rows == keys or not causal
            computed[part] += tiles * (rows * (rows + 1) // 2 if causal else rows * keys)

        return counted

    forward, backward = count("forward"), count("backward")
    watch(monkeypatch, CpuFlashKernel, "forward", lambda _, q, k, v, *, causal, scale: forward(q, k, causal))
    watch(monkeypatch, CpuFlashKernel, "backward", lambda _, do, q, k, *rest, causal, scale: backward(q, k, causal))
    model = trunkline.stream(build("llama", torch.float32, num_hidden_layers=1), chunk_size=CHUNK)
    packed(model, IDS, position_ids=positions([lengths]))  # the first step also probes the layers
    computed.update(forward=0, backward=0)
    packed(model, IDS, position_ids=positions([lengths]))
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    assert computed == {"forward": pairs, "backward": pairs}


def test_keys_that_no_later_chunk_sees_are_not_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward takes keys and values from the replay alone, if documents are whole chunks."""
    model = trunkline.stream(build("llama", torch.float32, num_hidden_layers=1), chunk_size=CHUNK)
    put = watch(monkeypatch, Core, "append_kv", lambda self, chunk, *_: chunk.index)
    for lengths, again in (([CHUNK] * N, []), ([CHUNK] * 4 + [3 * CHUNK] + [CHUNK] * 5, [4, 5])):
        loss = model(input_ids=IDS, labels=IDS, position_ids=positions([lengths])).loss
        put.clear()
        loss.backward()
        assert put == again


@pytest.mark.parametrize("layers", [["sliding_attention"] * 2, ["sliding_attention", "full_attention"]])
def test_a_budget_reserves_what_a_window_holds(layers: list[str], tmp_path: Path) -> None:
    """Layers with a window have slots for two chunks; a layer without one for all."""
    family = (
        {"mistral": {}} if len(set(layers)) == 1 else {"qwen2": {"use_sliding_window": True, "layer_types": layers}}
    )
    ((name, more),) = family.items()
    peaks = {}
    for budget in (None, "1GiB", "measured"):
        model = build(name, torch.float32, sliding_window=12, num_hidden_layers=2, **more)
        given = peaks["1GiB"] if budget == "measured" else budget
        tier = {} if given is None else {"device_budget": given, "offload_dir": tmp_path, "attn_strategy": "resident"}
        trunkline.stream(model, chunk_size=CHUNK, **tier)
        streamed(model, IDS, IDS)
        peaks[budget] = trunkline.stats(model).peaks["device"]
    assert peaks["measured"] <= peaks["1GiB"] == peaks[None]


@pytest.mark.parametrize(
    ("window", "keep", "prefetch"), all_pairs([2, 9, 30], [("attention",), ("kv",), ()], [1, 2, 3])
)
def test_windows_reuse_slots_on_disk_with_the_same_result(
    window: int, keep: tuple[str, ...], prefetch: int, tmp_path: Path
) -> None:
    """Slots are written again while others are read: losses and gradients are those without budgets, bit for bit."""
    model = build("mistral", torch.float32, sliding_window=window, num_hidden_layers=2)
    found = []
    for budget in ({}, {"device_budget": "64KiB", "offload_dir": tmp_path, "attn_strategy": "streamed"}):
        trunkline.stream(model, chunk_size=CHUNK, keep=keep, prefetch=prefetch, **budget)
        found.append(streamed(model, IDS, IDS))
    moved = trunkline.stats(model).lanes["fetch"].moved
    assert moved > 0
    (loss, gradients), (other_loss, other_gradients) = found
    assert torch.equal(loss, other_loss)
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


def test_a_budget_has_slots_for_the_window_only() -> None:
    """Two of 64 chunks see each other: slots for all keys and their gradients would not fit."""
    model = build("mistral", torch.float32, sliding_window=12, num_hidden_layers=2)
    ids = tokens(1, 4_096)
    trunkline.stream(model, chunk_size=64, device_budget="2800KiB", attn_strategy="resident")
    streamed(model, ids, ids)
    assert trunkline.stats(model).peaks["device"] <= 2_800 * 1_024
