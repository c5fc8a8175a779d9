"""AdamW with decay on matrices only and float32 masters of bfloat16 parameters; the schedule; the gradient norm."""

from __future__ import annotations

import math

import torch
from torch import nn

from trunkline.distributed.grad_norm import local, total_norm
from trunkline.train.recipe import OptimizerSection


def learning_rate(step: int, *, steps: int, settings: OptimizerSection) -> float:
    """Return the rate of one step: linear warm-up, then a cosine down to `lr * min_lr_ratio` at the last step.

    Args:
        step: Step, counted from 0.
        steps: Steps of the run.
        settings: The optimizer's settings.

    Returns:
        The rate: `lr` at the end of the warm-up; 0 only at the last step, where `min_lr_ratio` is 0.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    # The last step is at the floor itself; a run of one step has no way to go.
    share = (step - warmup) / max(1, steps - 1 - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * cosine)


class Optimizer:
    """AdamW over a model's trainable parameters; of sharded ones, over this rank's shards.

    bfloat16 has 8 bits of mantissa: an update smaller than 1/256 of a weight is lost. So with `fp32_master`, where a
    parameter is bfloat16, AdamW works on float32 copies, and the parameters are their rounded images. The copies cost 4
    bytes a parameter, and gradients are collected in float32, too.

    Args:
        model: Its trainable parameters are optimised.
        settings: Rates and decay.

    Raises:
        ValueError: The model has no trainable parameter.
    """

    def __init__(self, model: nn.Module, settings: OptimizerSection) -> None:
        self.settings = settings
        self.parameters: list[torch.Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise ValueError("model: no parameter is trainable (requires_grad is False on all of them).")
        self.has_masters = settings.fp32_master and any(p.dtype == torch.bfloat16 for p in self.parameters)
        if self.has_masters:
            self.optimised = [parameter.detach().to(torch.float32, copy=True) for parameter in self.parameters]
        else:
            self.optimised = [parameter.detach() for parameter in self.parameters]
        groups: dict[tuple[float, object], list[torch.Tensor]] = {}
        for parameter in self.optimised:
            decay = settings.weight_decay if parameter.ndim >= 2 else 0.0
            # One call takes parameters that are spread over ranks in the same way.
            groups.setdefault((decay, getattr(parameter, "device_mesh", None)), []).append(parameter)
        self.adamw = torch.optim.AdamW(
            [{"params": params, "weight_decay": decay} for (decay, _), params in groups.items()],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )

    def collect(self) -> torch.Tensor:
        """Add the gradients of a micro-batch to those collected since the last step, in the masters' type.

        The parameters' own gradients are set to None. Over ranks every rank must call this.

        Returns:
            The norm of all that has been collected, over the shards of all ranks: a float32 scalar.
        """
        for parameter, optimised in zip(self.parameters, self.optimised, strict=True):
            if parameter.grad is None:
                continue
            if optimised.grad is None:
                optimised.grad = parameter.grad.to(optimised.dtype)
            else:
                optimised.grad.add_(parameter.grad)
            parameter.grad = None
        return total_norm(optimised.grad for optimised in self.optimised if optimised.grad is not None)

    def step(self, *, lr: float, scale: float) -> None:
        """Update the parameters from the collected gradients, and drop these.

        Args:
            lr: Learning rate of this step.
            scale: Factor on the gradients, from `clip_scale`; 1 changes nothing.
        """
        if scale != 1.0:
            torch._foreach_mul_([local(x.grad) for x in self.optimised if x.grad is not None], scale)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        if self.has_masters:
            with torch.no_grad():
                torch._foreach_copy_([local(x) for x in self.parameters], [local(x) for x in self.optimised])


def clip_scale(norm: float, clip: float | None) -> float:
    """Return the factor that brings a norm down to `clip`; 1 where it is lower, or for no clipping."""
    return 1.0 if clip is None or norm <= clip else clip / norm
