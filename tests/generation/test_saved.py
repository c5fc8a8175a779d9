"""Saved caches: loaded under budgets, with longer or shorter chunks, cropped or damaged."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import pytest
from cases import others_in_soak
from families import build
from stepping import own_logits, step_through, tokens

import trunkline
from trunkline.api import tiers_of

HOW = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("source", "chunk_size", "num_budgets"),
    others_in_soak(
        [("prompt", 16, 7), ("disk", 80, 7), *itertools.product(["prompt", "disk"], [16, 80], [33])],
        [("disk", 80, 7)],
    ),
)
def test_a_cache_that_fits_can_be_continued(
    source: str, chunk_size: int, num_budgets: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding works under every budget that is not refused at once; a long prompt works, or is refused unharmed."""
    monkeypatch.setattr("trunkline.kv_cache.cache.DECODE_BUFFER_TOKENS", 16)
    model, ids, more = build("llama").eval(), tokens(1, 300), tokens(1, 8, seed=2)
    trunkline.stream(model, chunk_size=32)
    cache = trunkline.prefill(model, ids)
    trunkline.save_cache(model, cache, tmp_path / "cache")
    trunkline.prefill(model, more, cache=cache)
    expected = [trunkline.generate(model, cache=cache, **HOW).tolist()]
    trunkline.prefill(model, ids[:, :100], cache=cache)
    expected.append(trunkline.generate(model, cache=cache, **HOW).tolist())
    del cache
    trunkline.unstream(model)
    outcomes = []
    most = 200_000 if chunk_size == 16 else 500_000
    for budget in range(20_000, most, most // num_budgets):
        trunkline.stream(model, chunk_size=chunk_size, device_budget=budget, offload_dir=tmp_path)
        outcomes.append(0)
        try:
            cache = (
                trunkline.prefill(model, ids) if source == "prompt" else trunkline.load_cache(model, tmp_path / "cache")
            )
        except ValueError as error:
            assert "device_budget" in str(error)  # noqa: PT017 - it may be either
            assert sum(account.held for account in tiers_of(model).budgets.values()) == 0
            trunkline.unstream(model)
            continue
        trunkline.prefill(model, more, cache=cache)
        assert trunkline.generate(model, cache=cache, **HOW).tolist() == expected[0]
        outcomes[-1] = 1
        try:
            trunkline.prefill(model, ids[:, :100], cache=cache)
        except ValueError as error:
            assert "device_budget" in str(error)  # noqa: PT017
            assert trunkline.generate(model, cache=cache, **HOW).tolist() == expected[0]
        else:
            assert trunkline.generate(model, cache=cache, **HOW).tolist() == expected[1]
            outcomes[-1] = 2
        assert trunkline.stats(model).peaks["device"] <= budget
        del cache
        trunkline.unstream(model)
    assert sorted(outcomes) == outcomes, "a larger budget is never worse"
    assert outcomes.count(0) < num_budgets / 2
    assert outcomes.count(2) > num_budgets / 4


@pytest.mark.parametrize("window", [None, 70])
def test_loaded_chunks_are_cut_to_the_readers_chunk_size(
    window: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that were written without budgets have any length; a window has dropped the first."""
    monkeypatch.setattr("trunkline.kv_cache.cache.DECODE_BUFFER_TOKENS", 8)
    ids = tokens(2, 400)
    model = build("mistral", sliding_window=window).eval()
    expected = own_logits(model, ids)
    trunkline.stream(model, chunk_size=150)
    cache = trunkline.prefill(model, ids[:, :200])
    trunkline.prefill(model, ids[:, 200:280], cache=cache)
    trunkline.prefill(model, ids[:, 280:281], cache=cache)
    assert cache.segments[0].segment.num_dropped == [0 if window is None else 1] * 3
    trunkline.save_cache(model, cache, tmp_path / "cache")
    trunkline.unstream(model)
    trunkline.stream(model, chunk_size=32, device_budget=1_500_000, offload_dir=tmp_path)
    loaded = trunkline.load_cache(model, tmp_path / "cache")
    segments = [view.segment for view in loaded.segments]
    assert max(len(chunk) for segment in segments for chunk in segment.chunks) <= 32
    assert [(segment.start, segment.stop) for segment in segments] == [
        (view.segment.start, view.stop) for view in cache.segments
    ] + [(280, 281)]
    step_through(loaded, model, ids, expected, [282, 283, 350, 351, 400], 1e-9)
    trunkline.save_cache(model, loaded, tmp_path / "again")
    trunkline.unstream(model)
    trunkline.stream(model, chunk_size=64)
    again = trunkline.load_cache(model, tmp_path / "again")
    again.crop(-10)
    step_through(again, model, ids, expected, [391, 400], 1e-9)


def test_a_fork_where_the_device_has_room_for_one_decode_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode buffer is flushed, and both caches can be continued."""
    monkeypatch.setattr("trunkline.kv_cache.cache.DECODE_BUFFER_TOKENS", 64)
    model, ids = build("llama").eval(), tokens(1, 200)
    expected = own_logits(model, ids)
    trunkline.stream(model, chunk_size=16, device_budget=200_000, offload_dir=tmp_path)
    cache = trunkline.prefill(model, ids[:, :100])
    step_through(cache, model, ids, expected, [101, 110], 1e-9)
    left = cache.tiers.unreserved_bytes("device")
    assert left is not None
    assert left < cache.decode_buffer_bytes(1) * 3.5  # two buffers, and the bytes to read and to flush
    forks = [cache.fork() for _ in range(3)]
    for stop in (111, 115):
        step_through(forks[0], model, ids, expected, [stop], 1e-9)
    forks.clear()
    step_through(cache, model, ids, expected, [111, 130, 200], 1e-9)
    assert trunkline.stats(model).peaks["device"] <= 200_000


def test_a_damaged_cache_is_refused(tmp_path: Path) -> None:
    model = build("llama").eval()
    trunkline.stream(model, chunk_size=16, device_budget=1_000_000, offload_dir=tmp_path)
    for name in ("rest.safetensors", "segment-00000-chunk-00001.safetensors"):
        for what in ("cut", "gone"):
            folder = tmp_path / f"{name} {what}"
            cache = trunkline.prefill(model, tokens(1, 300))
            trunkline.save_cache(model, cache, folder)
            del cache
            path = folder / name
            path.write_bytes(path.read_bytes()[:100]) if what == "cut" else path.unlink()
            with pytest.raises(ValueError, match=rf"damaged cache: {name} cannot be read .* save it anew"):
                trunkline.load_cache(model, folder)
            gc.collect()
            trunkline.stats(model)
            assert sum(account.held for account in tiers_of(model).budgets.values()) == 0


def test_cropped_chunks_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.kv_cache.cache.DECODE_BUFFER_TOKENS", 8)
    model, ids = build("llama").eval(), tokens(1, 100)
    expected = own_logits(model, ids)
    trunkline.stream(model, chunk_size=16)
    cache = trunkline.prefill(model, ids)
    cache.crop(-67)
    trunkline.save_cache(model, cache, tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("segment-*"))) == 3, "33 tokens in chunks of 16"
    step_through(trunkline.load_cache(model, tmp_path / "cache"), model, ids, expected, [34, 35, 100], 1e-9)
