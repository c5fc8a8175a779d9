"""Saving and loading of caches: a long prompt is read once, and used in many processes."""

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
from trunkline.kv_cache import cache_files
from trunkline.kv_cache.cache import StreamedCache

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_IGNORED_CONFIG = (  # settings that do not change keys and values
    "_attn_implementation",
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
)


def save_cache(model: nn.Module, cache: StreamedCache, folder: str | Path) -> None:
    """Write a cache to a folder: safetensors, chunk by chunk from any tier, and a JSON page.

    Over ranks every rank calls this and writes its own part.

    Args:
        model: the streamed model of the cache.
        cache: from `trunkline.prefill`; it does not change.
        folder: must not exist; it appears once it is complete.

    Raises:
        ValueError: the folder exists, the cache is empty, or it is another model's.
    """
    forward = streamed_forward(model, "save_cache")
    if not cache.belongs_to(forward.tiers):
        raise ValueError("this cache is another model's, or of other settings of stream(): it cannot be saved here.")
    cache_files.save(cache, _part(Path(folder), forward), _identity(forward))


def load_cache(model: nn.Module, folder: str | Path) -> StreamedCache:
    """Load a cache that `save_cache` wrote into the tiers of a model.

    Args:
        model: streamed, with the weights that filled the cache; chunk size and budgets may differ.
        folder: written by `save_cache`.

    Returns:
        The cache.

    Raises:
        ValueError: the folder holds no cache, or that of another model or mesh; or it does not fit in the budgets.
    """
    forward = streamed_forward(model, "load_cache")
    cache = forward.new_cache()
    device, config = forward.decoder.device, forward.decoder.model.config.get_text_config()
    cache_files.load(
        cache, _part(Path(folder), forward), _identity(forward), device,
        hidden=config.hidden_size * next(forward.decoder.model.parameters()).dtype.itemsize,
        chunk_tokens=forward.config.chunk_tokens(device), size=forward.ranks.size,
    )  # fmt: skip
    return cache


def _part(folder: Path, forward: StreamedForward) -> Path:
    """Return the folder of this rank's part."""
    return folder / forward.ranks.name if forward.ranks.name else folder


def _identity(forward: StreamedForward) -> dict[str, Any]:
    """Return the identity of a model and rank: a cache is used only with an equal one."""
    model = forward.decoder.model
    config = {name: value for name, value in model.config.to_dict().items() if name not in _IGNORED_CONFIG}
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
