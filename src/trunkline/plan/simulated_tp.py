"""Tensor parallelism in a rehearsal: one rank's part of every matrix, in a group of ranks that are not there."""

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

_NAMESPACES = ("c10d", "_c10d_functional")


@contextlib.contextmanager
def cut(meta_model: MetaModel, tp: int) -> Iterator[MetaModel]:
    """A model as one of `tp` ranks has it, for as long as this lasts; itself where that is one, or it is cut already.

    Raises:
        ValueError: the model has no plan, or this process has joined a job: the group would be in its way.
    """
    if tp == 1 or meta_model.whole is not None:
        yield meta_model
        return
    if dist.is_initialized():
        raise ValueError(
            f"tp={tp}: tensor parallelism is rehearsed in a process that has joined no job: start it without torchrun."
        )
    # The backend that does nothing is registered by this import.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    try:
        model = copy.deepcopy(meta_model.model)
        parallelize(model, init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",)), blank=True).put_aside()
        decoder = HuggingFaceDecoder(model)
        yield MetaModel(model, decoder, probe.attention_spans(decoder), meta_model.device, meta_model.model)
    finally:
        dist.destroy_process_group()


def sent_by(func: Any, args: tuple[Any, ...], ranks: int) -> int | None:
    """Bytes that one rank sends in a collective of so many; None for what is no collective."""
    if func.namespace not in _NAMESPACES:
        return None
    name = func._schema.name
    if "wait" in name or "wrap" in name:
        return 0
    nbytes = sum(x.nbytes for x in _tensors(args))
    if "allreduce" in name or "all_reduce" in name:
        return 2 * nbytes * (ranks - 1) // ranks
    if "gather" in name:  # of what was given and what is gathered, where both are arguments
        largest = max((x.nbytes for x in _tensors(args)), default=0)
        return largest * (ranks - 1) // ranks if len(list(_tensors(args))) > 1 else nbytes * (ranks - 1)
    return nbytes * (ranks - 1) // ranks


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
