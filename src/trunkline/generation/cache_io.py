"""Caches on disk: what took long to read once need not be read again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trunkline.api import streamed_forward
from trunkline.forward import StreamedForward
from trunkline.kv_cache import checkpoint
from trunkline.kv_cache.cache import StreamedCache

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_PASSING = ("_attn_implementation", "_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")


def save_cache(model: nn.Module, cache: StreamedCache, folder: str | Path) -> None:
    """Write a cache: safetensors, chunk by chunk from whichever tier, and a page of JSON.

    Over ranks every rank calls this and writes its own part.

    Args:
        model: whose cache it is, streamed.
        cache: from `trunkline.prefill`; it stays as it is.
        folder: new; whole or not there.

    Raises:
        ValueError: the folder exists, the cache holds nothing, or it is another model's.
    """
    forward = streamed_forward(model, "save_cache")
    if not cache.belongs_to(forward.tiers):
        raise ValueError("this cache is another model's, or of other settings of stream(): it cannot be saved here.")
    checkpoint.save(cache, _part(Path(folder), forward), _identity(forward))


def load_cache(model: nn.Module, folder: str | Path) -> StreamedCache:
    """Read a cache that `save_cache` wrote, into the tiers of a model.

    Args:
        model: streamed; the same weights as it was filled with, any chunk size and budgets.
        folder: where it is.

    Returns:
        The cache, to go on from.

    Raises:
        ValueError: there is no cache there, it is another model's or another mesh's, or it does not fit in the budgets.
    """
    forward = streamed_forward(model, "load_cache")
    cache = forward.new_cache()
    device, config = forward.decoder.device, forward.decoder.model.config.get_text_config()
    checkpoint.load(
        cache, _part(Path(folder), forward), _identity(forward), device,
        hidden=config.hidden_size * next(forward.decoder.model.parameters()).dtype.itemsize,
        chunk_tokens=forward.config.chunk_tokens(device), size=forward.ranks.size,
    )  # fmt: skip
    return cache


def _part(folder: Path, forward: StreamedForward) -> Path:
    """Where this rank has its part."""
    return folder / forward.ranks.name if forward.ranks.name else folder


def _identity(forward: StreamedForward) -> dict[str, Any]:
    """What says of a model whether a cache is its own."""
    model = forward.decoder.model
    config = {name: value for name, value in model.config.to_dict().items() if name not in _PASSING}
    text = json.dumps(config, sort_keys=True, default=str)
    total = 0
    for number, parameter in enumerate(model.parameters(), 1):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        bits = local.detach().contiguous().view(_BITS[local.dtype.itemsize])
        total = (total * 31 + int(bits.sum(dtype=torch.long)) + number) % 2**61
    return {
        "class": type(model).__name__, "config": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        "weights": total, "rank": forward.ranks.name,
    }  # fmt: skip
