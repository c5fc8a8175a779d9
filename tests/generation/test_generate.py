"""Generation on a streamed model: transformers' own, token for token."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from support_matrix import ROWS
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import trunkline


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


def both(model: Any, ids: Tensor, settings: dict[str, Any], **given: Any) -> tuple[Tensor, Tensor]:
    """Generate with the model, and with the same model streamed."""
    model.eval()
    model.generation_config.pad_token_id = 0
    torch.manual_seed(3)
    expected = model.generate(ids, **given)
    trunkline.stream(model, **settings)
    torch.manual_seed(3)
    found = model.generate(ids, **given)
    trunkline.unstream(model)
    return expected, found


METHODS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "do_sample": False},
    "beam sampling": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", ["device", "disk"])
def test_every_decoding_method_gives_the_same_tokens(
    method: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trunkline.kv_cache.cache.DECODE_BUFFER_TOKENS", 8)
    settings = {"chunk_size": 16}
    if place == "disk":
        settings |= {"device_budget": 600_000, "offload_dir": tmp_path}
    rows = 1 if method == "prompt lookup" else 2
    expected, found = both(
        build("llama"), tokens(rows, 37), settings, max_new_tokens=20, eos_token_id=None, **METHODS[method]
    )
    assert expected.tolist() == found.tolist()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_assisted_generation_with_a_streamed_assistant(is_streamed: bool, tmp_path: Path) -> None:
    model, ids = build("llama").eval(), tokens(1, 60)
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = 99  # is never drawn
    helper, noise = copy.deepcopy(model), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in helper.parameters():
            p += 0.01 * torch.randn(p.shape, generator=noise, dtype=p.dtype)
    given = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids, **given)
    trunkline.stream(model, chunk_size=16, device_budget=600_000, offload_dir=tmp_path)
    if is_streamed:
        trunkline.stream(helper, chunk_size=16)
    calls: list[int] = []
    helper.register_forward_hook(lambda *_: calls.append(1))
    assert model.generate(ids, assistant_model=helper, **given).tolist() == expected.tolist()
    cache = trunkline.prefill(model, ids[:, :40])
    found = trunkline.generate(model, ids[:, 40:], cache=cache, assistant_model=helper, **given)
    assert found.tolist() == expected[:, 40:].tolist()
    assert len(calls) > 10


FAMILIES = ("Mistral", "Gemma 2", "Gemma 3", "gpt-oss", "DeepSeek-V3", "Qwen3-MoE", "GPT-2", "Llama 4", "Phi")


@pytest.mark.parametrize("row", [row for row in ROWS if row.family in FAMILIES], ids=lambda row: row.family)
def test_families_generate_the_same_tokens(row: Any) -> None:
    expected, found = both(row.build(), tokens(1, 30), {"chunk_size": 11}, max_new_tokens=8, do_sample=False)
    assert expected.tolist() == found.tolist()


def test_padded_prompts_generate_the_same_tokens() -> None:
    model, ids = build("llama"), tokens(3, 24)
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 17, 5)):
        ids[row, :pad] = mask[row, :pad] = 0
    given = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected, found = both(model, ids, {"chunk_size": 8}, **given)
    assert expected.tolist() == found.tolist()
    trunkline.stream(model, chunk_size=8)
    left = trunkline.generate(model, ids, **given)
    right = torch.stack([row.roll(-pad) for row, pad in zip(ids, (0, 17, 5), strict=True)])
    moved = trunkline.generate(model, right, **{**given, "attention_mask": (right != 0).long()})
    assert left.tolist() == moved.tolist() == expected.tolist()


class _Heard(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


class _After(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 40)


def test_stopping_streaming_and_scores_are_transformers_own() -> None:
    model, ids = build("llama").eval(), tokens(1, 33)
    trunkline.stream(model, chunk_size=16)
    heard = _Heard()
    found = trunkline.generate(
        model, ids, max_new_tokens=30, do_sample=False, eos_token_id=None, streamer=heard,
        stopping_criteria=StoppingCriteriaList([_After()]),
        logits_processor=LogitsProcessorList([lambda _, scores: scores.index_fill(1, torch.tensor([5]), -torch.inf)]),
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    assert found.sequences.shape == (1, 40)
    assert heard.ended
    assert heard.tokens == found.sequences[0].tolist()
    assert 5 not in found.sequences[0, 33:].tolist()
    assert len(found.scores) == 7


def test_many_continuations_of_one_prefill() -> None:
    """One prefill serves all, and does not change."""
    model, prefix = build("llama").eval(), tokens(1, 50)
    questions = [tokens(1, n, seed=n) for n in (1, 4, 13)]
    how = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [model.generate(torch.cat([prefix, each], 1), **how)[:, 50:] for each in questions]
    behind = model.generate(prefix, **how)[:, 50:]
    trunkline.stream(model, chunk_size=16)
    cache = trunkline.prefill(model, prefix)
    for each, right in zip(questions, expected, strict=True):
        assert trunkline.generate(model, each, cache=cache, **how).tolist() == right.tolist()
    assert trunkline.generate(model, cache=cache, **how).tolist() == behind.tolist()
    assert cache.length == 50
    # Several rows over the one row of the cache, and several draws of one.
    rows = torch.cat([tokens(1, 4, seed=4), tokens(1, 4, seed=8)])
    unstreamed = trunkline.unstream(model)
    both_rows = unstreamed.generate(torch.cat([prefix.expand(2, -1), rows], 1), **how)[:, 50:]
    torch.manual_seed(0)
    drawn = {**how, "do_sample": True, "num_return_sequences": 4}
    draws = unstreamed.generate(torch.cat([prefix, rows[:1]], 1), **drawn)[:, 50:]
    trunkline.stream(model, chunk_size=16)
    cache = trunkline.prefill(model, prefix)
    assert trunkline.generate(model, rows, cache=cache, **how).tolist() == both_rows.tolist()
    torch.manual_seed(0)
    assert trunkline.generate(model, rows[:1], cache=cache, **drawn).tolist() == draws.tolist()


def test_transformers_own_generate_takes_a_cache() -> None:
    """With the cached tokens and others; or with the cached tokens alone, whose last is then read again."""
    model, ids = build("llama").eval(), tokens(2, 60)
    how = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, **how)
    trunkline.stream(model, chunk_size=16)
    for read in (1, 40, 59, 60):
        cache = trunkline.prefill(model, ids[:, :read])
        assert model.generate(ids, past_key_values=cache, **how).tolist() == expected.tolist()
        assert cache.length == 68  # transformers' own fills the cache that it is given


@pytest.mark.parametrize("place", ["device", "disk"])
@pytest.mark.parametrize("window", [None, 20])
def test_a_loaded_cache_equals_the_saved_one(
    place: str, window: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trunkline.kv_cache.cache.DECODE_BUFFER_TOKENS", 8)
    model, ids, more = build("mistral", sliding_window=window).eval(), tokens(2, 70), tokens(2, 30, seed=2)
    settings = {"chunk_size": 16}
    if place == "disk":
        settings |= {"device_budget": 600_000, "offload_dir": tmp_path}
    how = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    trunkline.stream(model, **settings)
    cache = trunkline.prefill(model, ids)
    trunkline.prefill(model, more[:, :2], cache=cache)
    expected = trunkline.generate(model, cache=cache, **how)
    trunkline.save_cache(model, cache, tmp_path / "cache")
    assert trunkline.generate(model, cache=cache, **how).tolist() == expected.tolist()
    trunkline.unstream(model)
    trunkline.stream(model, chunk_size=48)  # other settings may read it
    loaded = trunkline.load_cache(model, tmp_path / "cache")
    torch.testing.assert_close(loaded.logits, cache.logits, rtol=0, atol=0)
    assert (loaded.length, loaded.documents) == (cache.length, cache.documents)
    assert trunkline.generate(model, cache=loaded, **how).tolist() == expected.tolist()
    trunkline.prefill(model, more[:, 2:], cache=loaded)  # and goes on
    trunkline.unstream(model)
    with torch.no_grad():
        logits = model(torch.cat([ids, more], 1), use_cache=False).logits
    torch.testing.assert_close(loaded.logits[:, 0], logits[:, -1], rtol=1e-9, atol=1e-9)


def test_a_loaded_cache_leaves_room_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device holds as much of it as leaves room for decoded tokens and another chunk of prompt."""
    monkeypatch.setattr("trunkline.kv_cache.cache.DECODE_BUFFER_TOKENS", 8)  # so that they are flushed while decoding
    model, ids, more = build("llama").eval(), tokens(1, 600), tokens(1, 200, seed=2)
    how = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    trunkline.stream(model, chunk_size=64)
    cache = trunkline.prefill(model, ids)
    trunkline.save_cache(model, cache, tmp_path / "cache")
    trunkline.prefill(model, more, cache=cache)
    expected = trunkline.generate(model, cache=cache, **how)
    needed = cache.nbytes
    trunkline.unstream(model)
    for share in (0.4, 0.8):
        trunkline.stream(model, chunk_size=32, device_budget=int(share * needed), offload_dir=tmp_path)
        loaded = trunkline.load_cache(model, tmp_path / "cache")
        assert trunkline.stats(model).peaks["device"] > 0.5 * share * needed  # and no more room than that
        trunkline.prefill(model, more, cache=loaded)
        assert trunkline.generate(model, cache=loaded, **how).tolist() == expected.tolist()
        trunkline.unstream(model)


def test_a_saved_cache_is_complete_and_bound_to_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = build("llama").eval(), build("llama", seed=1).eval()
    trunkline.stream(model, chunk_size=16)
    trunkline.stream(other, chunk_size=16)
    cache, folder = trunkline.prefill(model, tokens(1, 40)), tmp_path / "cache"
    with monkeypatch.context() as patched:
        patched.setattr(json, "dumps", lambda *_, **__: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(OSError, match="no space left"):
            trunkline.save_cache(model, cache, folder)
    assert not folder.exists()
    trunkline.save_cache(model, cache, folder)
    with pytest.raises(ValueError, match="exists: give a new folder"):
        trunkline.save_cache(model, cache, folder)
    with pytest.raises(ValueError, match=r"another model \(weights is"):
        trunkline.load_cache(other, folder)
    with pytest.raises(ValueError, match="another model's"):
        trunkline.save_cache(other, cache, tmp_path / "other")
    with pytest.raises(ValueError, match="holds no cache that can be read"):
        trunkline.load_cache(model, tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds nothing yet"):
        trunkline.save_cache(model, type(cache)(trunkline.api.tiers_of(model), 3), tmp_path / "empty")


def test_wrong_arguments_are_refused() -> None:
    model = build("llama").eval()
    with pytest.raises(ValueError, match=r"generate: LlamaForCausalLM is not streamed"):
        trunkline.generate(model, tokens(1, 3))
    trunkline.stream(model, chunk_size=16)
    cache = trunkline.prefill(model, tokens(1, 9))
    with pytest.raises(ValueError, match="there is nothing to go on from"):
        trunkline.generate(model)
    with pytest.raises(ValueError, match=r"past_key_values is not an argument of trunkline\.generate"):
        trunkline.generate(model, tokens(1, 3), past_key_values=cache)
    with pytest.raises(ValueError, match="padding behind the cache"):
        trunkline.generate(model, tokens(1, 3), cache=cache, attention_mask=torch.tensor([[0, 1, 1]]))
    trunkline.unstream(model)
    full = model(tokens(1, 9), use_cache=True).past_key_values
    trunkline.stream(model, chunk_size=16)
    with pytest.raises(
        ValueError, match="that holds tokens: a streamed LlamaForCausalLM goes on from a cache of its own"
    ):
        model(tokens(1, 1), past_key_values=full, use_cache=True)
    with pytest.raises(ValueError, match="labels go without a cache"):
        model(tokens(1, 5), labels=tokens(1, 5), use_cache=True)
