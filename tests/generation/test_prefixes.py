"""Prefix sharing: each cache is that of its text, and no common prefix is read twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import build

import trunkline
from trunkline.generation import prefixes
from trunkline.generation.prefixes import Prefixes, common_length


def _texts(seed: int, count: int = 12, length: int = 40) -> list[np.ndarray]:
    """Draw different texts of two token ids, so that they branch often; some are prefixes of others."""
    draw = np.random.default_rng(seed)
    found = {tuple(draw.integers(5, 7, draw.integers(1, 6)).tolist()) for _ in range(count)}
    trunk = draw.integers(5, 97, length).tolist()
    found |= {(*trunk[:at], *draw.integers(5, 97, 3).tolist()) for at in (10, 20, 30)} | {tuple(trunk)}
    found |= {tuple(trunk[:20])}
    return [np.array(each, np.uint16) for each in draw.permutation(np.array(sorted(found), dtype=object))]


def _nodes(texts: list[np.ndarray]) -> int:
    """Count the nodes of the prefix tree."""
    return len({tuple(text[:stop]) for text in texts for stop in range(1, len(text) + 1)})


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_text_gets_its_cache_and_no_token_is_read_twice(
    seed: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, texts, read = build("mistral", sliding_window=window).eval(), _texts(seed), []
    with torch.no_grad():
        expected = [model(torch.from_numpy(t.astype(np.int64))[None], use_cache=False).logits[0, -1] for t in texts]

    def counted(model: Any, ids: torch.Tensor, **given: Any) -> trunkline.StreamedCache:
        read.append(ids.shape[1])
        return trunkline.prefill(model, ids, **given)

    monkeypatch.setattr(prefixes, "prefill", counted)
    trunkline.stream(model, chunk_size=8)
    found = {}
    for index, cache in Prefixes(texts).read(model, least=1):
        assert cache.tokens[0].tolist() == texts[index].tolist()
        found[index] = cache.logits[0, -1]
    assert sorted(found) == list(range(len(texts)))
    for index, right in enumerate(expected):
        torch.testing.assert_close(found[index], right, rtol=1e-9, atol=1e-9)
    assert sum(read) == _nodes(texts)
    # Prefixes shorter than `least` are read again.
    read.clear()
    for index, cache in Prefixes(texts).read(model, least=15):
        torch.testing.assert_close(cache.logits[0, -1], expected[index], rtol=1e-9, atol=1e-9)
    assert _nodes(texts) < sum(read) < sum(map(len, texts))
    read.clear()
    list(Prefixes(texts).read(model, least=1_000))
    assert sorted(read) == sorted(map(len, texts))


def test_order_and_shared_lengths() -> None:
    texts = [np.array(each) for each in ([3, 1], [2, 9, 9], [2], [2, 9, 4])]
    found = Prefixes(texts)
    assert (found.order, found.shared) == ([2, 3, 1, 0], [1, 2, 0])
    assert found.sharing(2) == {1, 3}
    assert found.sharing(1) == {1, 2, 3}
    assert Prefixes([]).order == []
    assert [common_length(texts[0], texts[1]), common_length(texts[1], texts[2])] == [0, 1]
