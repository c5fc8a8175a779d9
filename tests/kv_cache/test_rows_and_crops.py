"""Caches between forwards: rows are selected, tokens cropped, caches copied; and errors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from torch import Tensor
from transformers import DynamicCache

import trunkline
from trunkline.api import tiers_of
from trunkline.offload.storage import ScratchFile, TierError

HOW = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def _short_decode_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush every eight decoded tokens, so that short tests flush too."""
    monkeypatch.setattr("trunkline.kv_cache.cache.DECODE_BUFFER_TOKENS", 8)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


def streamed(family: str = "llama", *, chunk_size: int = 16, **settings: Any) -> tuple[Any, Any]:
    """Build a streamed model, and the same model unstreamed."""
    own = {name: settings.pop(name) for name in ("sliding_window",) if name in settings}
    model, plain = build(family, **own).eval(), build(family, **own).eval()
    trunkline.stream(model, chunk_size=chunk_size, **settings)
    return model, plain


def last(plain: Any, ids: Tensor, **given: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = plain(input_ids=ids, use_cache=False, **given).logits[:, -1]
    return logits


def check(cache: trunkline.StreamedCache, expected: Tensor) -> None:
    assert cache.logits is not None
    torch.testing.assert_close(cache.logits[:, -1], expected, rtol=1e-9, atol=1e-9)


def test_crop_after_a_long_extension() -> None:
    """The decode buffer is empty then: its old contents do not count."""
    model, plain = streamed()
    ids = tokens(1, 60)
    cache = trunkline.prefill(model, ids[:, :20])
    trunkline.prefill(model, ids[:, 20:23], cache=cache)
    trunkline.prefill(model, ids[:, 23:50], cache=cache)
    cache.crop(-4)
    trunkline.prefill(model, ids[:, 46:47], cache=cache)
    check(cache, last(plain, ids[:, :47]))


@pytest.mark.parametrize("stop", [5, 12, 17, 24, 29])
def test_crop_keeps_positions_and_documents(stop: int) -> None:
    """Positions continue from the last token left, also where documents do not begin at 0."""
    model, _ = streamed()
    positions = torch.tensor([[*range(5, 17), *range(12, 30)]])
    documents = torch.tensor([[0] * 12 + [1] * 18])
    cache = trunkline.prefill(model, tokens(1, 30), position_ids=positions, document_ids=documents)
    cache.crop(stop - 30)
    assert cache.next_positions.tolist() == [[int(positions[0, stop - 1]) + 1]]
    assert cache.documents == (((0, 12) if stop > 12 else (0,)),)


def test_one_row_can_be_selected() -> None:
    model, plain = streamed()
    ids, more = tokens(3, 40), tokens(1, 12, seed=2)
    cache = trunkline.prefill(model, ids)
    cache.batch_select_indices(torch.tensor([1]))
    for stop in (1, 12):
        trunkline.prefill(model, more[:, cache.length - 40 : stop], cache=cache)
        check(cache, last(plain, torch.cat([ids[1:2], more[:, :stop]], 1)))


def test_repeated_tokens_are_new_tokens() -> None:
    model, plain = streamed()
    ids = tokens(1, 6)
    cache = trunkline.prefill(model, ids)
    trunkline.prefill(model, ids, cache=cache)
    check(cache, last(plain, torch.cat([ids, ids], 1)))
    cache = trunkline.prefill(model, ids)
    output = model(input_ids=ids, past_key_values=cache, use_cache=True)
    torch.testing.assert_close(output.logits[:, -1], last(plain, torch.cat([ids, ids], 1)), rtol=1e-9, atol=1e-9)
    one = plain.generate(ids[:, :1], **HOW)
    assert model.generate(ids[:, :1], **HOW).tolist() == one.tolist()


def test_the_last_token_can_be_read_again_where_a_document_begins_with_it() -> None:
    """A document of one token, and a row that is one token and padding."""
    model, plain = streamed()
    ids = tokens(1, 30)
    cache = trunkline.prefill(model, ids, position_ids=torch.tensor([[*range(29), 0]]))
    expected = plain.generate(ids[:, 29:], **HOW)[:, 1:]
    assert trunkline.generate(model, cache=cache, **HOW).tolist() == expected.tolist()
    rows, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    rows[1, :19] = mask[1, :19] = 0
    expected = plain.generate(rows, attention_mask=mask, **HOW)
    cache = trunkline.prefill(model, rows, attention_mask=mask)
    assert trunkline.generate(model, cache=cache, **HOW).tolist() == expected[:, 20:].tolist()
    assert model.generate(rows, attention_mask=mask, past_key_values=cache, **HOW).tolist() == expected.tolist()


def test_padding_of_one_token_is_not_seen() -> None:
    model, plain = streamed()
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[1, 0] = 0
    for given, tol in (({}, 1e-9), ({"position_ids": torch.arange(20).expand(2, -1)}, 1e-5)):  # rotary angles are fp32
        cache = trunkline.prefill(model, ids, attention_mask=mask, **given)
        assert cache.documents == ((0,), (0, 1))
        assert cache.logits is not None
        torch.testing.assert_close(cache.logits[1:, 0], last(plain, ids[1:, 1:]), rtol=tol, atol=tol)


def test_copies_are_forks() -> None:
    model, plain = streamed()
    ids, more = tokens(1, 20), tokens(2, 5, seed=2)
    cache = trunkline.prefill(model, ids)
    for own in (copy.copy(cache), copy.deepcopy(cache)):
        for row in range(2):
            each = copy.deepcopy(own)
            for at in range(5):
                trunkline.prefill(model, more[row : row + 1, at : at + 1], cache=each)
            check(each, last(plain, torch.cat([ids, more[row : row + 1]], 1)))
        assert own.length == 20


def test_failures_leave_rows_as_they_were(tmp_path: Path) -> None:
    """More rows than the device has room for; an error in a layer while rows are repeated."""
    model, plain = streamed(device_budget=150_000, offload_dir=tmp_path)
    ids = tokens(1, 60)
    cache = trunkline.prefill(model, ids)
    trunkline.prefill(model, ids[:, :3], cache=cache)
    with pytest.raises(ValueError, match="no room for"):
        cache.batch_repeat_interleave(64)
    layer = model.model.layers[1]
    layer.forward = lambda *_, **__: (_ for _ in ()).throw(RuntimeError("on the way"))
    with pytest.raises(RuntimeError, match="on the way"):
        trunkline.prefill(model, tokens(2, 1), cache=cache)
    del layer.forward
    with pytest.raises(ValueError, match="training mode"):
        model.train().generate(torch.cat([ids, ids[:, :3]], 1), past_key_values=cache, **HOW)
    model.eval()
    assert (cache.length, cache.batch_size) == (63, 1)
    trunkline.prefill(model, ids[:, 3:4], cache=cache)
    check(cache, last(plain, torch.cat([ids, ids[:, :4]], 1)))


def test_a_failed_read_leaks_no_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = streamed(device_budget=110_000, offload_dir=tmp_path)
    ids = tokens(1, 200)
    cache = trunkline.prefill(model, ids[:, :199])

    def failing(*_: object) -> None:
        raise TierError("reading failed")

    account = tiers_of(model).budgets["device"]
    before = account.held
    for _ in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(ScratchFile, "read", failing)
            with pytest.raises(TierError, match="reading failed"):
                trunkline.prefill(model, ids[:, 199:], cache=cache)
        assert account.held == before  # at once, and not when somebody collects garbage
    trunkline.prefill(model, ids[:, 199:], cache=cache)
    check(cache, last(plain, ids))
    assert trunkline.stats(model).peaks["device"] <= 110_000


def test_a_cache_from_inference_mode_can_be_extended_outside() -> None:
    model, plain = streamed()
    ids = tokens(1, 30)
    with torch.inference_mode():
        cache = trunkline.prefill(model, ids[:, :20])
        trunkline.prefill(model, ids[:, 20:21], cache=cache)
    fork = cache.fork()
    for each in (cache, fork):
        for at in range(21, 30):
            trunkline.prefill(model, ids[:, at : at + 1], cache=each)
        check(each, last(plain, ids))


def test_rejected_candidates_can_be_cropped_with_a_window() -> None:
    """Transformers announces that tokens may be cropped again."""
    model, plain = streamed("mistral", sliding_window=20)
    ids = tokens(1, 30).repeat(1, 8)
    how = {**HOW, "max_new_tokens": 24, "prompt_lookup_num_tokens": 60}
    assert model.generate(ids, **how).tolist() == plain.generate(ids, **how).tolist()


def test_penalties_see_the_cache_and_streamers_do_not() -> None:
    model, plain = streamed()
    ids, question = tokens(1, 40), tokens(1, 5, seed=2)
    cache = trunkline.prefill(model, ids)
    how = {**HOW, "repetition_penalty": 1.8, "no_repeat_ngram_size": 2}
    expected = plain.generate(torch.cat([ids, question], 1), **how)[:, 40:]
    assert trunkline.generate(model, question, cache=cache, **how).tolist() == expected.tolist()
    heard: list[int] = []

    class Heard:
        def put(self, value: Tensor) -> None:
            heard.extend(value.flatten().tolist())

        def end(self) -> None:
            heard.append(-1)

    found = trunkline.generate(model, cache=cache, streamer=Heard(), return_dict_in_generate=True, **HOW)
    assert found.sequences.tolist() == plain.generate(ids, **HOW)[:, 40:].tolist()
    assert heard == [*found.sequences[0].tolist(), -1]


def test_a_prompt_behind_every_window_is_dropped(tmp_path: Path) -> None:
    """Its segments are dropped, and not saved."""
    model, plain = streamed("mistral", sliding_window=20)
    ids = tokens(1, 180)
    cache = trunkline.prefill(model, ids[:, :40])
    for stop in range(41, 180):
        trunkline.prefill(model, ids[:, stop - 1 : stop], cache=cache)
    assert len(cache.segments) < 12
    trunkline.save_cache(model, cache, tmp_path / "cache")
    loaded = trunkline.load_cache(model, tmp_path / "cache")
    for each in (cache, loaded):
        with pytest.raises(ValueError, match="crop to 60 tokens: layer 0 sees 20 tokens"):
            each.crop(-119)
        trunkline.prefill(model, ids[:, 179:], cache=each)
        check(each, last(plain, ids))


def test_other_cache_classes_are_refused() -> None:
    model, _ = streamed()
    with pytest.raises(ValueError, match=r"a StaticCache \(cache_implementation\) has no effect"):
        model.generate(tokens(1, 9), cache_implementation="static", **HOW)
    with pytest.raises(ValueError, match="cache is a DynamicCache: a streamed model fills one of its own"):
        trunkline.prefill(model, tokens(1, 9), cache=DynamicCache())  # type: ignore[arg-type]
    cache = trunkline.prefill(model, tokens(1, 9))
    with pytest.raises(ValueError, match="input_ids has no tokens after the 9 of the cache"):
        model.generate(tokens(1, 4, seed=2), past_key_values=cache, **HOW)
