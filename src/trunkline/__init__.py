"""Trunkline: train Hugging Face language models on very long contexts, chunk by chunk, with exact gradients."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trunkline.cache.streamed import StreamedCache
    from trunkline.config import Progress, StreamConfig
    from trunkline.generation.prefill import generate, prefill
    from trunkline.generation.saving import load_cache, save_cache
    from trunkline.parallel.alarm import RankError
    from trunkline.parallel.mesh import init_mesh
    from trunkline.parallel.norm import clip_grad_norm_
    from trunkline.parallel.sharding import no_sync, shard
    from trunkline.plan.rehearsal import rehearse
    from trunkline.plan.results import Rehearsal
    from trunkline.streaming import read_meters, stream, unstream
    from trunkline.tiers.meters import Meters

__version__ = "0.1.0"
__all__ = [
    "Meters", "Progress", "RankError", "Rehearsal", "StreamConfig", "StreamedCache", "clip_grad_norm_", "generate",
    "init_mesh", "load_cache", "no_sync", "prefill", "read_meters", "rehearse", "save_cache", "shard", "stream",
    "unstream",
]  # fmt: skip

_HOME = {
    "Meters": "trunkline.tiers.meters",
    "Progress": "trunkline.config",
    "RankError": "trunkline.parallel.alarm",
    "Rehearsal": "trunkline.plan.results",
    "StreamConfig": "trunkline.config",
    "StreamedCache": "trunkline.cache.streamed",
    "clip_grad_norm_": "trunkline.parallel.norm",
    "generate": "trunkline.generation.prefill",
    "init_mesh": "trunkline.parallel.mesh",
    "load_cache": "trunkline.generation.saving",
    "no_sync": "trunkline.parallel.sharding",
    "prefill": "trunkline.generation.prefill",
    "read_meters": "trunkline.streaming",
    "rehearse": "trunkline.plan.rehearsal",
    "save_cache": "trunkline.generation.saving",
    "shard": "trunkline.parallel.sharding",
    "stream": "trunkline.streaming",
    "unstream": "trunkline.streaming",
}


def __dir__() -> list[str]:
    """The public names."""
    return [*__all__, "__all__", "__doc__", "__version__"]


def __getattr__(name: str) -> Any:
    """Import torch and transformers when a name is first used, so that `trunkline --help` need not wait for them."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
