"""Model states of one rank (parameters, gradients, optimizer state): their bytes, and the time of an optimizer step."""

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
    """AdamW as `trunkline train` uses it: two moments of every trained parameter.

    Attributes:
        fp32_master: update float32 master copies of bfloat16 parameters, and accumulate gradients in float32.
    """

    fp32_master: bool = True

    def state_dtype(self, parameter: Parameter) -> torch.dtype:
        """Return the dtype of a parameter's moments, and of its master copy."""
        master = self.fp32_master and parameter.dtype == torch.bfloat16
        return torch.float32 if master else parameter.dtype


@dataclass(frozen=True, slots=True)
class ModelStates:
    """Bytes of one rank's model states.

    Attributes:
        device: bytes held on the device through all of a step, by label: `parameters`, `optimizer`, and `gradients of
            earlier micro-batches`. Empty with offload.
        host: the same in host memory, with offload; else empty.
        updated: bytes that the optimizer step reads and writes.
        step: bytes on the device that the optimizer step needs beside `device`, gradients included; 0 with offload.
    """

    device: Counter[str]
    host: Counter[str]
    updated: int
    step: int

    def seconds(self, hardware: Hardware, *, offload: bool, devices: int = 1) -> float:
        """Return the seconds of an optimizer step, which memory bandwidth bounds.

        Args:
            hardware: profile.
            offload: the step runs in host memory, whose bandwidth the devices of a node share.
            devices: devices of all nodes that run it at the same time; no effect without `offload`.
        """
        if offload:
            return self.updated * min(devices, hardware.devices_per_node) / hardware.host_bandwidth
        return self.updated / hardware.memory_rate("pointwise", max(self.updated, 1))


def loading_bytes(model: nn.Module, sharding_spec: ShardingSpec, ranks: int, tp: int) -> int:
    """Return the bytes of host memory in which each process builds the whole model before sharding; 0 without it.

    Args:
        model: unsharded model.
        sharding_spec: sharding of its parameters.
        ranks: ranks that parameters are sharded over.
        tp: tensor-parallel ranks.
    """
    if not sharding_spec.is_sharded(ranks) and tp == 1:
        return 0
    return sum(p.numel() * sharding_spec.itemsize(p, ranks) for p in model.parameters())


def model_states_of(
    model: nn.Module, sharding_spec: ShardingSpec, ranks: int, optimizer: AdamWSpec | None, *, micro_batches: int = 1
) -> ModelStates:
    """Compute the model states of one rank.

    Args:
        model: model before sharding, in full or as one tensor-parallel rank has it.
        sharding_spec: sharding of its parameters.
        ranks: ranks that parameters are sharded over.
        optimizer: optimizer of the trained parameters; None counts parameters only.
        micro_batches: micro-batches of a step; with more than one, accumulated gradients stay on the device through
            the last. With offload they are not counted.
    """
    is_sharded = sharding_spec.is_sharded(ranks)
    shards = ranks if is_sharded else 1
    offload = sharding_spec.offload and is_sharded
    parameters = optimizer_state = updated = step = accumulated = 0
    for parameter in model.parameters():
        numel = -(-local(parameter).numel() // shards)
        itemsize = sharding_spec.itemsize(parameter, ranks)
        parameters += numel * itemsize
        if optimizer is None or not parameter.requires_grad:
            continue
        size = max(optimizer.state_dtype(parameter).itemsize, itemsize)
        has_master = size != itemsize
        optimizer_state += numel * size * (3 if has_master else 2)  # two moments, and the master copy
        step += numel * size
        # Over ranks, gradients of earlier micro-batches wait unsharded and in float32, to be reduced once.
        accumulated += local(parameter).numel() * 4 if ranks > 1 else numel * size
        # Gradient and parameter are read, both moments read and written, the parameter written: 8 accesses. A master
        # copy is also written back to its bfloat16 parameter.
        updated += numel * (8 * size + (itemsize if has_master else 0))
    held = Counter({"parameters": parameters, "optimizer": optimizer_state})
    if micro_batches > 1:
        held["gradients of earlier micro-batches"] = 0 if offload else accumulated
    held = +held  # without zeros
    return ModelStates(Counter() if offload else held, held if offload else Counter(), updated, 0 if offload else step)
