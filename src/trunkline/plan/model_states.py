"""Parameters, gradients and optimizer state of one rank: what they take where, and what an optimizer step costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import Parameter

from trunkline.distributed.grad_norm import local
from trunkline.plan.hardware import Hardware
from trunkline.plan.simulated_sharding import ShardingSpec


@dataclass(frozen=True, slots=True)
class AdamWSpec:
    """The optimizer of `trunkline train`: two moments of every trained parameter.

    Attributes:
        fp32_master: it works on float32 copies of bfloat16 parameters, and collects gradients in float32.
    """

    fp32_master: bool = True

    def state_dtype(self, parameter: Parameter) -> torch.dtype:
        """In which the optimizer works on a parameter."""
        master = self.fp32_master and parameter.dtype == torch.bfloat16
        return torch.float32 if master else parameter.dtype


@dataclass(frozen=True, slots=True)
class ModelStates:
    """Bytes of one rank.

    Attributes:
        device: held on the device from step to step, by what it is.
        host: in host memory.
        updated: bytes that the optimizer step reads and writes.
        step: bytes that it takes on the device beside all that, gradients among them.
    """

    device: Counter[str]
    host: Counter[str]
    updated: int
    step: int

    def seconds(self, hardware: Hardware, *, offload: bool, devices: int = 1) -> float:
        """Of an optimizer step, of so many devices at a time."""
        if offload:
            return self.updated * min(devices, hardware.devices_per_node) / hardware.host_bandwidth
        return self.updated / hardware.memory_rate("pointwise", max(self.updated, 1))


def loading_bytes(model: nn.Module, sharding_spec: ShardingSpec, ranks: int, tp: int) -> int:
    """Host memory in which each rank builds a model whose parameters will be cut; 0 for one that is built in its place.

    Args:
        model: whole.
        sharding_spec: how it will be spread over ranks.
        ranks: that it is spread over.
        tp: ranks that its matrices are cut for.
    """
    is_cut = sharding_spec.cuts(ranks)
    if not is_cut and tp == 1:
        return 0
    return sum(p.numel() * ((is_cut and sharding_spec.dtype) or p.dtype).itemsize for p in model.parameters())


def model_states_of(
    model: nn.Module, sharding_spec: ShardingSpec, ranks: int, optimizer: AdamWSpec | None, *, micro_batches: int = 1
) -> ModelStates:
    """What one rank holds.

    Args:
        model: whole.
        sharding_spec: how it is spread over ranks.
        ranks: that it is spread over.
        optimizer: of its trained parameters; None for none.
        micro_batches: of a step: with more than one, gradients of earlier ones are held through the last.
    """
    is_cut = sharding_spec.cuts(ranks)
    cut = ranks if is_cut else 1
    offload = sharding_spec.offload and is_cut
    weights = moments = masters = updated = step = earlier = 0
    for parameter in model.parameters():
        count = -(-local(parameter).numel() // cut)
        resting = (sharding_spec.dtype if is_cut and sharding_spec.dtype is not None else parameter.dtype).itemsize
        weights += count * resting
        if optimizer is None or not parameter.requires_grad:
            continue
        size = max(optimizer.state_dtype(parameter).itemsize, resting)
        moments += 2 * count * size
        if size != resting:
            masters += count * size
        step += count * size
        # Over ranks they wait to be reduced together, whole on each and in float32.
        earlier += local(parameter).numel() * 4 if ranks > 1 else count * size
        # Gradient and parameter are read, both moments read and written, the parameter written; its image, too.
        updated += count * (8 * size + (resting if size != resting else 0))
    held = Counter({"parameters": weights, "optimizer": moments + masters})
    if micro_batches > 1:
        held["gradients of earlier micro-batches"] = 0 if offload else earlier
    held += Counter()  # nothing that is zero
    return ModelStates(Counter() if offload else held, held if offload else Counter(), updated, 0 if offload else step)
