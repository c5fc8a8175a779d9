"""Norm and clipping of gradients that are sharded in different ways, as with tensor parallelism."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trunkline.distributed import failure


def clip_grad_norm_(parameters: nn.Module | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients in place so that their total norm over all ranks is at most `max_norm`.

    `torch.nn.utils.clip_grad_norm_` refuses gradients that are sharded along different axes, as with tensor
    parallelism. All ranks call this one, with the same parameters.

    Args:
        parameters: a model, or parameters; parameters without a gradient are skipped. Gradients that are no DTensors
            must be equal on every rank.
        max_norm: the largest norm.

    Returns:
        The norm before scaling, equal on every rank: 0-dim, fp32 (fp64 if all gradients are).

    Raises:
        ValueError: `max_norm` is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm!r}: give a number above 0.")
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    gradients = [p.grad for p in given if p.grad is not None]
    norm = total_norm(gradients)
    factor = (max_norm / (norm + 1e-6)).clamp_max(1.0)
    for gradient in gradients:
        part = local(gradient)
        part.mul_(factor.to(device=part.device, dtype=part.dtype))
    return norm


def local(x: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; any other tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Compute the norm of all gradients as one vector; each element counts once, however it is sharded.

    All ranks call it, with the same gradients in the same order.

    Args:
        gradients: DTensors, or tensors that are equal on every rank.

    Returns:
        The norm, equal on every rank: 0-dim, fp32 (fp64 if all gradients are); 0 without gradients.
    """
    squares: defaultdict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = defaultdict(list)
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    for gradient in gradients:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        dtype = wide if dtype in (None, wide) else torch.float32
        # Gradients sharded alike share their collectives: one all-reduce of the sum of squares along each axis.
        key = None
        if isinstance(gradient, DTensor):
            axes = tuple(axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate())
            key = gradient.device_mesh, axes
            device = torch.device(gradient.device_mesh.device_type)
        squares[key].append(torch.linalg.vector_norm(local(gradient), dtype=wide).square())
    totals = []
    for key, parts in squares.items():
        total = torch.stack([part.to(parts[0].device, torch.float64) for part in parts]).sum()
        if key is not None:
            mesh, axes = key
            total = total.to(device)
            with failure.guard():
                for axis in axes:
                    dist.all_reduce(total, group=mesh.get_group(axis))
        totals.append(total)
    if not totals:
        return torch.zeros(())
    return torch.stack([total.to(totals[-1].device) for total in totals]).sum().sqrt().to(dtype)
