"""Tensor parallelism in an estimate: one rank's shard of every matrix, in a simulated group of ranks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from trunkline.distributed.tp import parallelize
from trunkline.hf import probe
from trunkline.hf.decoder import HuggingFaceDecoder
from trunkline.plan.meta_model import MetaModel

_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")


@contextlib.contextmanager
def tp_shard(meta_model: MetaModel, tp: int) -> Iterator[MetaModel]:
    """Yield the model as one of `tp` ranks has it; the model itself with one rank, or if it is such a shard already.

    For a shard this process has a simulated process group until the context ends.

    Raises:
        ValueError: the model has no tensor-parallel plan, or this process has joined a job, whose process group
            excludes a simulated one.
    """
    if tp == 1 or meta_model.full_model is not None:
        yield meta_model
        return
    if dist.is_initialized():
        raise ValueError(
            f"tp={tp}: this process has joined a job, and tensor parallelism is estimated in one that has not: start "
            "it without torchrun."
        )
    # This import registers the process group backend "fake", whose collectives do nothing.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    try:
        model = copy.deepcopy(meta_model.model)
        parallelize(model, init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",)), blank=True).suspend()
        decoder = HuggingFaceDecoder(model)
        yield MetaModel(model, decoder, probe.attention_spans(decoder), meta_model.device, meta_model.model)
    finally:
        dist.destroy_process_group()


def bytes_sent(func: Any, args: tuple[Any, ...], ranks: int) -> int | None:
    """Return the bytes that one of `ranks` ranks sends in a collective operator, 0 for a wait; None for all others."""
    if func.namespace not in _COLLECTIVE_NAMESPACES:
        return None
    name = func._schema.name
    if "wait" in name or "wrap" in name:
        return 0
    sizes = [x.nbytes for x in tensors_in(args)]
    if "allreduce" in name or "all_reduce" in name:
        return 2 * sum(sizes) * (ranks - 1) // ranks
    if "gather" in name and len(sizes) > 1:  # input and output are both arguments
        return max(sizes) * (ranks - 1) // ranks
    return sum(sizes) * (ranks - 1) // (1 if "gather" in name else ranks)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments of an operator, those in lists and tuples included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
