"""Caches that come back from disk under budgets, longer or shorter than they were, or not whole."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from families import build
from stepping import own_logits, step_through, tokens

import trunkline
from trunkline.api import tiers_of

HOW = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("chunk_size", [16, 80])
@pytest.mark.parametrize("way", ["read", "loaded"])
def test_what_is_not_refused_at_once_can_be_gone_on_from(
    way: str, chunk_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a few tokens, and by decoding, however tight the budget is; with many where there is room, or as it was."""
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
    for budget in range(20_000, most, most // 33):
        trunkline.stream(model, chunk_size=chunk_size, device_budget=budget, offload_dir=tmp_path)
        outcomes.append(0)
        try:
            cache = trunkline.prefill(model, ids) if way == "read" else trunkline.load_cache(model, tmp_path / "cache")
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
    assert outcomes.count(0) < 16
    assert outcomes.count(2) > 8


@pytest.mark.parametrize("window", [None, 70])
def test_chunks_that_are_longer_than_the_readers_are_cut(
    window: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without budgets decoded tokens and long prompts rest in pieces of any length; windows let go of the first."""
    monkeypatch.setattr("trunkline.kv_cache.cache.DECODE_BUFFER_TOKENS", 8)
    ids = tokens(2, 400)
    model = build("mistral", sliding_window=window).eval()
    expected = own_logits(model, ids)
    trunkline.stream(model, chunk_size=150)
    cache = trunkline.prefill(model, ids[:, :200])
    trunkline.prefill(model, ids[:, 200:280], cache=cache)
    trunkline.prefill(model, ids[:, 280:281], cache=cache)
    assert cache.links[0].stretch.passed == [0 if window is None else 1] * 3
    trunkline.save_cache(model, cache, tmp_path / "cache")
    trunkline.unstream(model)
    trunkline.stream(model, chunk_size=32, device_budget=1_500_000, offload_dir=tmp_path)
    loaded = trunkline.load_cache(model, tmp_path / "cache")
    stretches = [link.stretch for link in loaded.links]
    assert max(len(chunk) for stretch in stretches for chunk in stretch.chunks) <= 32
    assert [(stretch.start, stretch.stop) for stretch in stretches] == [
        (link.stretch.start, link.stop) for link in cache.links
    ] + [(280, 281)]
    step_through(loaded, model, ids, expected, [282, 283, 350, 351, 400], 1e-9)
    trunkline.save_cache(model, loaded, tmp_path / "again")
    trunkline.unstream(model)
    trunkline.stream(model, chunk_size=64)
    again = trunkline.load_cache(model, tmp_path / "again")
    again.crop(-10)
    step_through(again, model, ids, expected, [391, 400], 1e-9)


def test_a_fork_where_there_is_room_for_one_open_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that both have in theirs move on, and both go on."""
    monkeypatch.setattr("trunkline.kv_cache.cache.DECODE_BUFFER_TOKENS", 64)
    model, ids = build("llama").eval(), tokens(1, 200)
    expected = own_logits(model, ids)
    trunkline.stream(model, chunk_size=16, device_budget=200_000, offload_dir=tmp_path)
    cache = trunkline.prefill(model, ids[:, :100])
    step_through(cache, model, ids, expected, [101, 110], 1e-9)
    left = cache.tiers.unreserved_bytes("device")
    assert left is not None
    assert left < cache.open_bytes(1) * 3.5  # of which there are two, with the room to read and to move
    forks = [cache.fork() for _ in range(3)]
    for stop in (111, 115):
        step_through(forks[0], model, ids, expected, [stop], 1e-9)
    forks.clear()
    step_through(cache, model, ids, expected, [111, 130, 200], 1e-9)
    assert trunkline.stats(model).peaks["device"] <= 200_000


def test_a_damaged_cache_is_an_error_that_says_so(tmp_path: Path) -> None:
    model = build("llama").eval()
    trunkline.stream(model, chunk_size=16, device_budget=1_000_000, offload_dir=tmp_path)
    for name in ("rest.safetensors", "stretch-00000-chunk-00001.safetensors"):
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


def test_what_was_forgotten_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.kv_cache.cache.DECODE_BUFFER_TOKENS", 8)
    model, ids = build("llama").eval(), tokens(1, 100)
    expected = own_logits(model, ids)
    trunkline.stream(model, chunk_size=16)
    cache = trunkline.prefill(model, ids)
    cache.crop(-67)
    trunkline.save_cache(model, cache, tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("stretch-*"))) == 3, "33 tokens in chunks of 16"
    step_through(trunkline.load_cache(model, tmp_path / "cache"), model, ids, expected, [34, 35, 100], 1e-9)
