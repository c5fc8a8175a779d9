"""Trunkline: train Hugging Face language models on very long contexts, chunk by chunk, with exact gradients."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trunkline.api import stats, stream, unstream
    from trunkline.config import Progress, StreamConfig
    from trunkline.distributed.failure import RankError
    from trunkline.distributed.fsdp import no_sync, shard
    from trunkline.distributed.grad_norm import clip_grad_norm_
    from trunkline.distributed.mesh import ParallelDims, init_mesh
    from trunkline.generation.cache_io import load_cache, save_cache
    from trunkline.generation.prefill import generate, prefill
    from trunkline.kv_cache.cache import StreamedCache
    from trunkline.offload.stats import Stats
    from trunkline.plan.estimate import Estimate, estimate

__version__ = "0.1.0"
__all__ = [
    "Estimate", "ParallelDims", "Progress", "RankError", "Stats", "StreamConfig", "StreamedCache", "clip_grad_norm_",
    "estimate", "generate", "init_mesh", "load_cache", "no_sync", "prefill", "save_cache", "shard", "stats", "stream",
    "unstream",
]  # fmt: skip

_HOME = {
    "Estimate": "trunkline.plan.estimate",
    "ParallelDims": "trunkline.distributed.mesh",
    "Progress": "trunkline.config",
    "RankError": "trunkline.distributed.failure",
    "Stats": "trunkline.offload.stats",
    "StreamConfig": "trunkline.config",
    "StreamedCache": "trunkline.kv_cache.cache",
    "clip_grad_norm_": "trunkline.distributed.grad_norm",
    "estimate": "trunkline.plan.estimate",
    "generate": "trunkline.generation.prefill",
    "init_mesh": "trunkline.distributed.mesh",
    "load_cache": "trunkline.generation.cache_io",
    "no_sync": "trunkline.distributed.fsdp",
    "prefill": "trunkline.generation.prefill",
    "save_cache": "trunkline.generation.cache_io",
    "shard": "trunkline.distributed.fsdp",
    "stats": "trunkline.api",
    "stream": "trunkline.api",
    "unstream": "trunkline.api",
}


def __dir__() -> list[str]:
    """Return the public names, those not imported yet included."""
    return [*__all__, "__all__", "__doc__", "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `trunkline --help` need not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
