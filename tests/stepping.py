"""Extension of caches step by step, compared with the model's own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import trunkline
from trunkline.kv_cache.cache import StreamedCache


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


def own_logits(model: Any, ids: Tensor, **given: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False, **given).logits
    return logits


def settings_of(tmp_path: Path, place: str) -> dict[str, Any]:
    """Return settings with which keys and values are on the device, partly on the device, or on disk."""
    budgets = {"device": None, "some": 600_000, "disk": 420_000}
    return {} if budgets[place] is None else {"device_budget": budgets[place], "offload_dir": tmp_path}


def step_through(cache: StreamedCache, model: Any, ids: Tensor, expected: Tensor, stops: list[int], tol: float) -> None:
    """Extend a cache up to each stop, and compare the logits of the last token each time."""
    for stop in stops:
        trunkline.prefill(model, ids[:, cache.length : stop], cache=cache)
        assert cache.logits is not None
        torch.testing.assert_close(cache.logits[:, -1], expected[:, stop - 1], rtol=tol, atol=tol)
