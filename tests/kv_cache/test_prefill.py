"""Prefill, and tokens that extend it, against the model's own forward: the same logits in every tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from oracle import positions
from stepping import own_logits, settings_of, step_through, tokens
from support_matrix import ROWS, Row

import trunkline

SEQ = 150


@pytest.fixture(autouse=True)
def _short_decode_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush every eight decoded tokens, so that short tests flush too."""
    monkeypatch.setattr("trunkline.kv_cache.cache.DECODE_BUFFER_TOKENS", 8)


@pytest.mark.parametrize("place", ["device", "some", "disk"])
@pytest.mark.parametrize("chunk_size", [7, 64, 1_000])
def test_logits_are_the_models_own(tmp_path: Path, chunk_size: int, place: str) -> None:
    model, ids = build("llama").eval(), tokens(2, SEQ)
    expected = own_logits(model, ids)
    trunkline.stream(model, chunk_size=chunk_size, **settings_of(tmp_path, place))
    cache = trunkline.prefill(model, ids[:, :100])
    assert cache.logits is not None
    assert cache.logits.shape == (2, 1, 97)
    torch.testing.assert_close(cache.logits[:, 0], expected[:, 99], rtol=1e-9, atol=1e-9)
    step_through(cache, model, ids, expected, [101, 102, 103, 120, 121, 150], 1e-9)
    assert cache.length == SEQ


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.family)
def test_logits_of_every_family(row: Row, tmp_path: Path) -> None:
    model, ids = row.build().eval(), tokens(1, 60)
    expected = own_logits(model, ids)
    tol = 1e-9 if row.dtype == torch.float64 and row.tolerance is None else 2e-4
    for settings in ({}, {"device_budget": 400_000, "offload_dir": tmp_path}):
        trunkline.stream(model, chunk_size=11, **settings)
        cache = trunkline.prefill(model, ids[:, :37])
        step_through(cache, model, ids, expected, [37 + 1, 39, 48, 60], tol)
        trunkline.unstream(model)


def test_a_long_extension_is_cut_into_chunks(tmp_path: Path) -> None:
    model, ids = build("llama").eval(), tokens(2, SEQ)
    expected = own_logits(model, ids)
    for place in ("device", "disk"):
        trunkline.stream(model, chunk_size=16, **settings_of(tmp_path, place))
        cache = trunkline.prefill(model, ids[:, :3])
        step_through(cache, model, ids, expected, [60, 61, 129, 150], 1e-9)
        trunkline.unstream(model)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_give_the_logits_of_rows_alone(side: str, tmp_path: Path) -> None:
    model, lengths = build("llama").eval(), [40, 13, 27]
    ids, more = tokens(3, 40), tokens(3, 5, seed=2)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        at = slice(0, 40 - length) if side == "left" else slice(length, None)
        mask[row, at] = ids[row, at] = 0
    alone = [torch.cat([ids[row][mask[row] == 1], more[row]])[None] for row in range(3)]
    expected = [own_logits(model, each)[0] for each in alone]
    for settings in ({"chunk_size": 8}, {"chunk_size": 16, "device_budget": 250_000, "offload_dir": tmp_path}):
        trunkline.stream(model, **settings)
        cache = trunkline.prefill(model, ids, attention_mask=mask)
        for step in range(6):
            assert cache.logits is not None
            for row, length in enumerate(lengths):
                torch.testing.assert_close(cache.logits[row, 0], expected[row][length - 1 + step], rtol=1e-9, atol=1e-9)
            if step < 5:
                trunkline.prefill(model, more[:, step : step + 1], cache=cache)
        trunkline.unstream(model)


def test_a_packed_row_continues_its_last_document() -> None:
    model, ids, more = build("llama").eval(), tokens(1, 60), tokens(1, 12, seed=2)
    expected = own_logits(model, torch.cat([ids[:, 43:], more], 1))[0]
    trunkline.stream(model, chunk_size=16)
    for given in (
        {"position_ids": positions([[20, 23, 17]])},
        {"document_ids": torch.tensor([[0] * 20 + [1] * 23 + [2] * 17])},
    ):
        cache = trunkline.prefill(model, ids, **given)
        assert cache.logits is not None
        torch.testing.assert_close(cache.logits[0, 0], expected[16], rtol=1e-9, atol=1e-9)
        trunkline.prefill(model, more[:, :1], cache=cache)
        trunkline.prefill(model, more[:, 1:], cache=cache, logits_to_keep=11)
        torch.testing.assert_close(cache.logits[0], expected[18:], rtol=1e-9, atol=1e-9)


def test_a_document_may_begin_in_an_extension() -> None:
    model, ids, more = build("llama").eval(), tokens(1, 20), tokens(1, 9, seed=2)
    expected = own_logits(model, more)[0, -1]
    trunkline.stream(model, chunk_size=16)
    cache = trunkline.prefill(model, ids)
    trunkline.prefill(model, more[:, :5], position_ids=torch.arange(5)[None], cache=cache)
    trunkline.prefill(model, more[:, 5:], cache=cache)
    assert cache.logits is not None
    torch.testing.assert_close(cache.logits[0, 0], expected, rtol=1e-9, atol=1e-9)


def test_logits_to_keep_returns_the_last_logits() -> None:
    model, ids = build("llama").eval(), tokens(2, 50)
    expected = own_logits(model, ids)
    trunkline.stream(model, chunk_size=16)
    for keep in (1, 2, 17, 50, 80):
        cache = trunkline.prefill(model, ids, logits_to_keep=keep)
        assert cache.logits is not None
        torch.testing.assert_close(cache.logits, expected[:, -keep:], rtol=1e-9, atol=1e-9)


def test_a_window_keeps_only_visible_keys(tmp_path: Path) -> None:
    """The cache holds the window, its margin, two chunks and the decode buffer, whatever the prompt's length."""
    window, chunk = 20, 16
    model = build("mistral", torch.float32, sliding_window=window).eval()
    for settings in ({}, {"device_budget": 250_000, "offload_dir": tmp_path}):
        trunkline.stream(model, chunk_size=chunk, **settings)
        sizes = []
        for length in (100, 300):
            cache = trunkline.prefill(model, tokens(1, length))
            for at in range(25):
                trunkline.prefill(model, tokens(1, 1, seed=at), cache=cache)
            sizes.append(cache.nbytes)
        token = 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head dim, bytes
        assert max(sizes) <= token * (window + 32 + 2 * chunk + 8)
        assert max(sizes) - min(sizes) <= token * chunk
        trunkline.unstream(model)


@pytest.mark.parametrize("family", ["llama", "gpt-neox", "gpt2"])
@pytest.mark.parametrize("chunk_size", [16, 100])
def test_a_cache_holds_no_memory_but_keys_and_values(family: str, chunk_size: int) -> None:
    """Also where a layer projects queries, keys and values in one product, and for one chunk."""
    model = build(family, torch.float32).eval()
    trunkline.stream(model, chunk_size=chunk_size)
    cache = trunkline.prefill(model, tokens(1, 100))
    storages = set()
    for store in cache.segments[0].segment.kv:
        held = store.view(0, 100)
        storages |= {(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in held}
    assert sum(nbytes for _, nbytes in storages) == cache.nbytes


def test_prefill_stays_within_the_device_budget(tmp_path: Path) -> None:
    """Keys and values are on disk; the device budget holds for any length."""
    model = build("llama", torch.float32).eval()
    trunkline.stream(model, chunk_size=16, device_budget=70_000, offload_dir=tmp_path)
    peaks = []
    for length in (100, 400):
        cache = trunkline.prefill(model, tokens(1, length))
        trunkline.prefill(model, tokens(1, 1), cache=cache)
        meters = trunkline.stats(model)
        peaks.append(meters.peaks["device"])
        assert meters.peaks["device"] <= 70_000
        assert meters.peaks["disk"] + 70_000 >= cache.nbytes
        del cache
    trunkline.stream(model, chunk_size=16, device_budget=10_000, offload_dir=tmp_path)
    with pytest.raises(ValueError, match="device_budget"):
        trunkline.prefill(model, tokens(1, 100))


def test_a_dropped_cache_frees_its_disk_space(tmp_path: Path) -> None:
    model = build("llama", torch.float32).eval()
    trunkline.stream(model, chunk_size=16, device_budget=70_000, offload_dir=tmp_path, disk_budget=600_000)
    for _ in range(5):  # each takes a third of the disk
        cache = trunkline.prefill(model, tokens(1, 200))
        fork = cache.fork()
        trunkline.prefill(model, tokens(1, 3), cache=fork)
        del cache, fork
    meters = trunkline.stats(model)
    assert meters.peaks["disk"] <= 600_000


def test_forks_share_segments_and_continue_independently(tmp_path: Path) -> None:
    model, ids = build("llama").eval(), tokens(1, 50)
    ways = [torch.cat([ids, tokens(1, 12, seed=seed)], 1) for seed in (2, 3)]
    expected = [own_logits(model, way) for way in ways]
    for settings in ({}, {"device_budget": 250_000, "offload_dir": tmp_path}):
        trunkline.stream(model, chunk_size=16, **settings)
        cache = trunkline.prefill(model, ids)
        before = cache.nbytes
        forks = [cache.fork() for _ in ways]
        for stop in (51, 52, 62):  # in turn
            for fork, way, right in zip(forks, ways, expected, strict=True):
                step_through(fork, model, way, right, [stop], 1e-9)
        assert cache.length == 50
        assert cache.nbytes == before
        assert forks[0].segments[0].segment is forks[1].segments[0].segment
        trunkline.unstream(model)


def test_several_rows_share_one_prefix() -> None:
    """Keys of a row are held once for all its continuations."""
    model, ids = build("llama").eval(), tokens(2, 50)
    more = tokens(6, 12, seed=2)
    expected = own_logits(model, torch.cat([ids.repeat_interleave(3, 0), more], 1))
    trunkline.stream(model, chunk_size=16)
    cache = trunkline.prefill(model, ids)
    before = cache.nbytes
    trunkline.prefill(model, more[:, :1], cache=cache)  # takes six rows for two
    assert cache.nbytes - before < before
    for at in range(1, 12):
        trunkline.prefill(model, more[:, at : at + 1], cache=cache)
    assert cache.logits is not None
    torch.testing.assert_close(cache.logits[:, 0], expected[:, -1], rtol=1e-9, atol=1e-9)
    cache.reorder_cache(torch.tensor([2, 2, 0, 5, 3, 3]))
    rows = torch.cat([ids.repeat_interleave(3, 0), more], 1)[[2, 2, 0, 5, 3, 3]]
    last = tokens(6, 1, seed=5)
    trunkline.prefill(model, last, cache=cache)
    trunkline.unstream(model)
    right = own_logits(model, torch.cat([rows, last], 1))
    torch.testing.assert_close(cache.logits[:, 0], right[:, -1], rtol=1e-9, atol=1e-9)


def test_crop_forgets_the_last_tokens() -> None:
    model, ids = build("llama").eval(), tokens(1, 60)
    expected = own_logits(model, ids)
    trunkline.stream(model, chunk_size=16)
    cache = trunkline.prefill(model, ids[:, :45])
    trunkline.prefill(model, tokens(1, 5, seed=9), cache=cache)
    for stop in (47, 45, 30, 16, 7):  # within the decode buffer, between segments, within a chunk
        cache.crop(stop - cache.length)
        assert cache.length == stop
        if stop > 45:
            continue
        step_through(cache, model, ids, expected, [stop + 1], 1e-9)
    with pytest.raises(ValueError, match="the cache has 8 tokens"):
        cache.crop(-9)


def test_crop_is_refused_where_a_window_has_dropped_keys() -> None:
    model, ids = build("mistral", sliding_window=20).eval(), tokens(1, 100)
    expected = own_logits(model, ids)
    trunkline.stream(model, chunk_size=16)
    cache = trunkline.prefill(model, ids)
    with pytest.raises(ValueError, match="crop to 40 tokens: layer 0 sees 20 tokens"):
        cache.crop(-60)
    cache.crop(-2)
    step_through(cache, model, ids, expected, [99, 100], 1e-9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "input_ids must be token ids"),
        ({"input_ids": torch.full((1, 3), 97)}, "97 is among them"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "must be 0 for padding on the left"),
        ({"attention_mask": torch.zeros(1, 3, dtype=torch.long)}, "a row without any token"),
        ({"position_ids": torch.tensor([[0, 2, 4]])}, "position_ids go from 0 to 2"),
        ({"logits_to_keep": -1}, "logits_to_keep=-1"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    model = build("llama").eval()
    trunkline.stream(model, chunk_size=16)
    with pytest.raises(ValueError, match=message):
        trunkline.prefill(model, **{"input_ids": tokens(1, 3), **given})


def test_wrong_caches_are_refused() -> None:
    model, other = build("llama").eval(), build("llama").eval()
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is not streamed: call trunkline\.stream"):
        trunkline.prefill(model, tokens(1, 3))
    trunkline.stream(model, chunk_size=16)
    trunkline.stream(other, chunk_size=16)
    cache = trunkline.prefill(model, tokens(2, 20))
    logits = cache.logits
    for given, message in (
        ({"input_ids": tokens(3, 2)}, "input_ids has 3 rows, and the cache 2"),
        ({"input_ids": tokens(2, 2), "position_ids": torch.tensor([[7, 8]])}, "position_ids begin at"),
        (
            {"input_ids": tokens(2, 2), "document_ids": torch.zeros(2, 2, dtype=torch.long)},
            "document_ids goes with the first",
        ),
        ({"input_ids": tokens(2, 2), "attention_mask": torch.ones(2, 9)}, r"attention_mask must be of shape \(2, 22\)"),
    ):
        with pytest.raises(ValueError, match=message):
            trunkline.prefill(model, cache=cache, **given)
        assert cache.length == 20
        assert cache.logits is logits
    with pytest.raises(ValueError, match="another model's"):
        trunkline.prefill(other, tokens(2, 2), cache=cache)
    with pytest.raises(ValueError, match="training mode"):
        trunkline.prefill(model.train(), tokens(2, 2), cache=cache)


def test_an_error_in_a_layer_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, ids = build("llama").eval(), tokens(1, 80)
    expected = own_logits(model, ids)
    for settings in ({}, {"device_budget": 250_000, "offload_dir": tmp_path}):
        trunkline.stream(model, chunk_size=16, **settings)
        cache = trunkline.prefill(model, ids[:, :30])
        layer = model.model.layers[2]
        for stop in (31, 80):
            with monkeypatch.context() as patched:
                patched.setattr(layer, "forward", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("on the way")))
                with pytest.raises(RuntimeError, match="on the way"):
                    trunkline.prefill(model, ids[:, 30:stop], cache=cache)
        step_through(cache, model, ids, expected, [31, 32, 80], 1e-9)
        trunkline.unstream(model)


def test_keys_and_values_are_contiguous_by_head(tmp_path: Path) -> None:
    """Decoding reads them faster than in the order of layers, token by token."""
    model, ids = build("llama").eval(), tokens(2, 90)
    trunkline.stream(model, chunk_size=16, **settings_of(tmp_path, "disk"))
    (view,) = trunkline.prefill(model, ids).segments
    for store in view.segment.kv:
        for sequence in store.sequences:
            assert all(x.is_contiguous() for x in sequence.read(range(len(view.segment.chunks))))


@pytest.mark.parametrize(
    ("rows", "prefetch", "budget", "most"),
    [(1, 1, 100_000, 2), (1, 2, 40_000, 8), (1, 2, 100_000, 9), (2, 2, 80_000, 8), (1, 10, 200_000, 11)],
)
def test_decoding_prefetches_more_chunks_where_the_device_has_room(
    rows: int, prefetch: int, budget: int, most: int, tmp_path: Path
) -> None:
    """Eight chunks of keys and values, or `prefetch` if more, beside the one in use; with `prefetch=1` no more."""
    model, ids = build("llama").eval(), tokens(rows, 300)
    expected = own_logits(model, ids)
    trunkline.stream(model, chunk_size=16, device_budget=budget, offload_dir=tmp_path, prefetch=prefetch)
    cache = trunkline.prefill(model, ids[:, :256])
    step_through(cache, model, ids, expected, [257], 1e-9)
    pair, buffer = 16 * rows * sum(cache.token_bytes[0]), cache.decode_buffer_bytes(rows)
    for left in (most, min(most, (budget - 2 * buffer) // pair)):  # a fork's decode buffer takes its own
        trunkline.stats(model)
        step_through(cache, model, ids, expected, [cache.length + 1], 1e-9)
        meters = trunkline.stats(model)
        assert meters.lanes["fetch"].moved == cache.segments[0].segment.nbytes == 48 * pair
        assert meters.peaks["device"] == cache.tiers.budgets["device"].held + left * pair
        assert meters.peaks["device"] <= budget
        fork = cache.fork()
    assert fork.length == 259
