"""Decoded tokens that are flushed to their tier; a failure on the way leaves the cache as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from stepping import own_logits, settings_of, step_through, tokens
from torch import Tensor

import trunkline
from trunkline.api import tiers_of
from trunkline.chunking import Chunk
from trunkline.kv_cache import cache as cache_module
from trunkline.offload import chunked_sequence
from trunkline.offload.storage import ScratchFile, TierError
from trunkline.offload.stores import Stores, Tiers


@pytest.fixture(autouse=True)
def _short_decode_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.kv_cache.cache.DECODE_BUFFER_TOKENS", 8)


@contextmanager
def failing(layer: Any) -> Iterator[None]:
    layer.forward = lambda *_, **__: (_ for _ in ()).throw(RuntimeError("on the way"))
    with pytest.raises(RuntimeError, match="on the way"):
        yield
    del layer.forward


@pytest.mark.parametrize("stops", [(30, 31), (30, 35, 60), (30, 31, 60, -31)], ids=str)
def test_a_failure_while_the_last_token_is_read_again_keeps_it(stops: tuple[int, ...]) -> None:
    """The token is in the decode buffer, behind an empty buffer, or a segment of its own."""
    ids = tokens(1, 80)
    model = build("llama").eval()
    expected = own_logits(model, ids)
    trunkline.stream(model, chunk_size=16)
    cache = trunkline.prefill(model, ids[:, : stops[0]])
    for stop in stops[1:]:
        if stop < 0:
            cache.crop(-stop)
        else:
            trunkline.prefill(model, ids[:, cache.length : stop], cache=cache)
    length = cache.length
    with failing(model.model.layers[2]):
        model(ids[:, :length], past_key_values=cache, logits_to_keep=1)
    assert cache.length == length
    assert all(cache in view.segment.owners for view in cache.segments)
    step_through(cache, model, ids, expected, list(range(length + 1, length + 11)), 1e-9)


@pytest.mark.parametrize("budget", [10_000_000, 100_000])
def test_tokens_cropped_before_saving_do_not_come_back(budget: int, tmp_path: Path) -> None:
    ids = tokens(1, 80)
    model = build("llama").eval()
    expected = own_logits(model, ids)
    trunkline.stream(model, chunk_size=16)
    cache = trunkline.prefill(model, ids[:, :30])
    step_through(cache, model, ids, expected, list(range(31, 48)), 1e-9)
    cache.crop(43)
    trunkline.save_cache(model, cache, tmp_path / "cache")
    trunkline.unstream(model)
    trunkline.stream(model, chunk_size=64, device_budget=budget, offload_dir=tmp_path)
    step_through(trunkline.load_cache(model, tmp_path / "cache"), model, ids, expected, list(range(44, 81)), 1e-9)


@pytest.mark.parametrize("budget", [30_000, 60_000, 150_000])
def test_a_short_prompt_can_be_continued_as_long_as_there_is_disk(budget: int, tmp_path: Path) -> None:
    """The device keeps room for decoded tokens to be flushed."""
    ids = tokens(1, 120)
    model = build("llama").eval()
    expected = own_logits(model, ids)
    trunkline.stream(model, chunk_size=64, device_budget=budget, offload_dir=tmp_path)
    cache = trunkline.prefill(model, ids[:, :5])
    step_through(cache, model, ids, expected, [*range(6, 40), *range(40, 121, 3)], 1e-9)
    assert trunkline.stats(model).peaks["device"] <= budget


def test_bytes_are_counted_once_after_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are merged, a read fails during a merge, the first fetch finds no memory."""
    ids = tokens(1, 120)
    model = build("llama").eval()
    expected = own_logits(model, ids)
    trunkline.stream(model, chunk_size=64, device_budget=150_000, offload_dir=tmp_path)
    cache = trunkline.prefill(model, ids[:, :70])
    accounts = tiers_of(model).budgets
    step_through(cache, model, ids, expected, list(range(71, 87)), 1e-9)

    def held() -> int:
        return sum(account.held for account in accounts.values())

    assert held() == cache.nbytes
    read, empty, calls = ScratchFile.read, chunked_sequence.TensorSpec.empty, list[int]()

    def broken(self: ScratchFile, block: Any, into: Tensor) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise TierError("a read that fails")
        read(self, block, into)

    segment = cache.segments[0].segment
    with monkeypatch.context() as patched:
        patched.setattr(ScratchFile, "read", broken)
        with pytest.raises(TierError, match="a read that fails"):
            segment.lend(0, segment.chunks[0]).__enter__()
    assert held() == cache.nbytes

    def without_memory(form: chunked_sequence.TensorSpec) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return empty(form)

    calls.clear()
    with monkeypatch.context() as patched:
        patched.setattr(chunked_sequence.TensorSpec, "empty", without_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            trunkline.prefill(model, ids[:, 86:87], cache=cache)
    assert held() == cache.nbytes
    step_through(cache, model, ids, expected, list(range(87, 121)), 1e-9)
    assert held() == cache.nbytes
    del cache, segment
    gc.collect()
    tiers_of(model).release_abandoned()
    assert held() == 0


@pytest.mark.parametrize("place", ["device", "disk"])
@pytest.mark.parametrize("window", [None, 20])
def test_an_error_after_a_flush_leaves_the_cache_as_it_was(window: int | None, place: str, tmp_path: Path) -> None:
    """The failed forward has written other tokens into the buffer; they never show."""
    model, ids, other = build("mistral", sliding_window=window).eval(), tokens(1, 80), tokens(1, 80, seed=2)
    expected = own_logits(model, ids)
    trunkline.stream(model, chunk_size=16, **settings_of(tmp_path, place))
    cache = trunkline.prefill(model, ids[:, :30])
    layer = model.model.layers[2]
    for stop in range(31, 60):  # buffers of 8 tokens: each fails once when it is full, and in between
        for count in (1, 5, 20):
            layer.forward = lambda *_, **__: (_ for _ in ()).throw(RuntimeError("on the way"))
            with pytest.raises(RuntimeError, match="on the way"):
                trunkline.prefill(model, other[:, :count], cache=cache)
            del layer.forward
        step_through(cache, model, ids, expected, [stop], 1e-9)
    assert all(cache in view.segment.owners for view in cache.segments)


@pytest.mark.parametrize("device", [150_000, 260_000])
def test_decoded_tokens_are_merged_up_to_a_chunk_within_a_budget(device: int, tmp_path: Path) -> None:
    model, ids = build("llama").eval(), tokens(1, 400)  # decoded four at a time
    expected = own_logits(model, ids)
    trunkline.stream(model, chunk_size=64, device_budget=device, offload_dir=tmp_path)
    cache = trunkline.prefill(model, ids[:, :130])
    for stop in (*range(134, 401, 4), 400):
        trunkline.prefill(model, ids[:, cache.length : stop], cache=cache)
    assert cache.logits is not None
    torch.testing.assert_close(cache.logits[:, 0], expected[:, -1], rtol=1e-9, atol=1e-9)
    fork = cache.fork()
    assert (fork.spare_bytes, fork.max_merged_tokens) == (cache.spare_bytes, cache.max_merged_tokens) != (0, 0)
    lengths = [segment.stop - segment.start for segment in (view.segment for view in cache.segments[1:])]
    assert sum(lengths) >= 400 - 130 - 8
    assert max(lengths) == 64
    assert len(lengths) <= 4 + 3
    meters = trunkline.stats(model)
    assert meters.peaks["device"] <= device
    assert meters.peaks["disk"] > 0


@pytest.mark.parametrize("error", [ValueError, TierError])
def test_decoded_tokens_are_not_merged_without_room(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_stores = cache_module.make_stores

    def without_room(tiers: Tiers, batch: int, chunks: list[Chunk], *rest: Any) -> Stores:
        if len(chunks[0]) > cache_module.DECODE_BUFFER_TOKENS:
            raise error("no room")
        return make_stores(tiers, batch, chunks, *rest)

    monkeypatch.setattr(cache_module, "make_stores", without_room)
    model, ids = build("llama").eval(), tokens(1, 100)
    expected = own_logits(model, ids)
    trunkline.stream(model, chunk_size=32, device_budget=150_000, offload_dir=tmp_path)
    cache = trunkline.prefill(model, ids[:, :64])
    step_through(cache, model, ids, expected, list(range(65, 101)), 1e-9)
    assert len(cache.segments) == 1 + 36 // 8


def test_decoded_tokens_are_merged_into_few_segments() -> None:
    """Their number grows with the logarithm of the tokens."""
    model, ids = build("llama").eval(), tokens(1, 140)
    expected = own_logits(model, ids)
    trunkline.stream(model, chunk_size=16)
    cache = trunkline.prefill(model, ids[:, :20])
    for stop in range(21, 141):
        trunkline.prefill(model, ids[:, stop - 1 : stop], cache=cache)
    assert cache.logits is not None
    torch.testing.assert_close(cache.logits[:, 0], expected[:, -1], rtol=1e-9, atol=1e-9)
    assert len(cache.segments) <= 1 + 4  # the prompt's, and at most one of each size: 8, 16, 32, 64
    fork = cache.fork()  # shared segments are not merged
    for stop in range(30):
        trunkline.prefill(model, ids[:, stop : stop + 1], cache=fork)
    twice = torch.cat([ids, ids], 1)
    step_through(cache, model, twice, own_logits(build("llama").eval(), twice), [150], 1e-9)
