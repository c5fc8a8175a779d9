"""Prefill and decoding over ranks: the same logits and tokens as one process."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import others_in_soak
from families import build
from oracle import tokens

import trunkline
from distributed.processes import run

STOPS = [61, 62, 63, 80, 121]


def expected_of(family: str, ids: torch.Tensor, **overrides: Any) -> tuple[Any, torch.Tensor]:
    model = build(family, **overrides).eval()
    with torch.no_grad():
        return model, model(ids, use_cache=False).logits


@patch("trunkline.kv_cache.cache.DECODE_BUFFER_TOKENS", 8)
def read(
    parallel_dims: dict[str, int], zero: int | None, folder: str, settings: dict[str, Any], overrides: dict[str, Any]
) -> float:
    """Return the largest error of logits after a prompt, and after the tokens that follow it."""
    ids = tokens(2, 121)
    model, expected = expected_of("mistral", ids, num_attention_heads=8, num_key_value_heads=4, head_dim=4, **overrides)
    mesh = trunkline.init_mesh(**parallel_dims)
    if zero is not None:
        trunkline.shard(model, mesh, zero=zero)
    trunkline.stream(model, mesh=mesh, chunk_size=16, **({**settings, "offload_dir": folder} if settings else {}))
    cache, error = trunkline.prefill(model, ids[:, :60]), 0.0
    for stop in STOPS:
        trunkline.prefill(model, ids[:, cache.length : stop], cache=cache)
        error = max(error, float((cache.logits[:, 0] - expected[:, stop - 1]).abs().max()))
    return error


SP, CP, LARGE = {"sp": 2}, {"cp": 2}, 400_000


@pytest.mark.parametrize(
    ("parallel_dims", "zero", "budget", "window"),
    others_in_soak(
        itertools.product((SP, CP), (None, 3), (None, LARGE), (None, 20)),
        [(SP, None, LARGE, None), (CP, None, None, 20), (SP, 3, None, 20), (CP, 3, LARGE, None)],
    ),
)  # fmt: skip
def test_logits_of_two_ranks(
    parallel_dims: dict[str, int], zero: int | None, budget: int | None, window: int | None, tmp_path: Path
) -> None:
    settings = {} if budget is None else {"device_budget": budget}
    errors = run(2, read, parallel_dims, zero, str(tmp_path), settings, {"sliding_window": window})
    assert max(errors) < 1e-9


@patch("trunkline.kv_cache.cache.DECODE_BUFFER_TOKENS", 8)
def go_on(folder: str) -> float:
    """Return the largest error of logits while tokens are decoded after a prompt that ranks have padded."""
    ids = tokens(1, 60)
    model, expected = expected_of(
        "mistral", ids, num_attention_heads=8, num_key_value_heads=4, head_dim=4, sliding_window=None
    )
    mesh = trunkline.init_mesh(sp=2)
    trunkline.stream(model, mesh=mesh, chunk_size=64, device_budget=4_000_000, offload_dir=folder)
    cache, worst = trunkline.prefill(model, ids[:, :13]), 0.0
    for place in range(13, 60):
        trunkline.prefill(model, ids[:, place : place + 1], cache=cache)
        worst = max(worst, float((cache.logits[:, 0] - expected[:, place]).abs().max()))
    assert len(cache.segments) < 5
    return worst


def test_decoding_after_a_padded_prompt(tmp_path: Path) -> None:
    assert max(run(2, go_on, str(tmp_path))) < 1e-9


@pytest.mark.soak
@pytest.mark.parametrize("parallel_dims", [{"sp": 2, "cp": 2}, {"sp": 4}, {"cp": 4}, {"dp": 2, "sp": 2}], ids=str)
def test_logits_of_four_ranks(parallel_dims: dict[str, int], tmp_path: Path) -> None:
    errors = run(4, read, parallel_dims, 3, str(tmp_path), {"device_budget": 400_000}, {"sliding_window": 20})
    assert max(errors) < 1e-9


def write(parallel_dims: dict[str, int], folder: str) -> list[Any]:
    """Return the tokens of transformers, of `generate` after a prompt, and after a cache loaded from disk."""
    model, ids = build("llama").eval(), tokens(2, 60)
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, **how)
    mesh = trunkline.init_mesh(**parallel_dims)
    trunkline.stream(model, mesh=mesh, chunk_size=16)
    found = trunkline.generate(model, ids, **how)
    cache = trunkline.prefill(model, ids)
    trunkline.save_cache(model, cache, Path(folder) / "cache")
    again = trunkline.generate(model, cache=trunkline.load_cache(model, Path(folder) / "cache"), **how)
    return [expected.tolist(), found.tolist(), torch.cat([ids, again], 1).tolist()]


@pytest.mark.parametrize("parallel_dims", [{"sp": 2}, {"cp": 2}], ids=str)
def test_generated_tokens(parallel_dims: dict[str, int], tmp_path: Path) -> None:
    for expected, found, again in run(2, write, parallel_dims, str(tmp_path)):
        assert found == expected
        assert again == expected


@patch("trunkline.kv_cache.cache.DECODE_BUFFER_TOKENS", 8)
def read_padded(parallel_dims: dict[str, int]) -> float:
    """Return the largest error of logits for rows with different padding, decoded several tokens at a time."""
    ids, more = tokens(3, 40), tokens(3, 30)
    pads = (0, 37, 20)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    model = build("mistral", sliding_window=9).eval()
    with torch.no_grad():
        alone = [torch.cat([ids[row, pad:], more[row]])[None] for row, pad in enumerate(pads)]
        expected = [model(each, use_cache=False).logits[0, -30:] for each in alone]
    trunkline.stream(model, mesh=trunkline.init_mesh(**parallel_dims), chunk_size=16)
    cache, error = trunkline.prefill(model, ids, attention_mask=mask), 0.0
    for stop in (1, 2, 7, 13, 14, 30):
        trunkline.prefill(model, more[:, cache.length - 40 : stop], cache=cache)
        for row in range(3):
            error = max(error, float((cache.logits[row, 0] - expected[row][stop - 1]).abs().max()))
    return error


@pytest.mark.parametrize("parallel_dims", [{"sp": 2}, {"cp": 2}], ids=str)
def test_rows_with_different_padding(parallel_dims: dict[str, int]) -> None:
    assert max(run(2, read_padded, parallel_dims)) < 1e-9


@patch("trunkline.kv_cache.cache.DECODE_BUFFER_TOKENS", 8)
def load_in_pieces(parallel_dims: dict[str, int], folder: str) -> tuple[int, float]:
    """Load a cache of longer chunks under budgets; return its longest chunk, and the largest error of logits."""
    ids = tokens(2, 121)
    model, expected = expected_of("mistral", ids, num_attention_heads=8, num_key_value_heads=4, head_dim=4)
    mesh = trunkline.init_mesh(**parallel_dims)
    trunkline.stream(model, mesh=mesh, chunk_size=32)
    cache = trunkline.prefill(model, ids[:, :45])
    trunkline.save_cache(model, trunkline.prefill(model, ids[:, 45:60], cache=cache), f"{folder}/cache")
    trunkline.unstream(model)
    trunkline.stream(model, mesh=mesh, chunk_size=8, device_budget=120_000, offload_dir=folder)
    loaded, error = trunkline.load_cache(model, f"{folder}/cache"), 0.0
    longest = max(len(chunk) for view in loaded.segments for chunk in view.segment.chunks)
    for stop in STOPS:
        trunkline.prefill(model, ids[:, loaded.length : stop], cache=loaded)
        error = max(error, float((loaded.logits[:, 0] - expected[:, stop - 1]).abs().max()))
    return longest, error


@pytest.mark.parametrize(("parallel_dims", "most"), [({"sp": 2}, 8), ({"cp": 2}, 16)], ids=["sp2", "cp2"])
def test_longer_chunks_are_split_on_load(parallel_dims: dict[str, int], most: int, tmp_path: Path) -> None:
    for longest, error in run(2, load_in_pieces, parallel_dims, str(tmp_path)):
        assert longest == most
        assert error < 1e-9
