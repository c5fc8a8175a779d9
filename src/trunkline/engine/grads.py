"""Gradients of parameters, summed over chunks in fp32 and rounded once.

A parameter gets a share of its gradient from every chunk of its layer (a tied one from head and embedding, too). The
shares are summed here in fp32, or fp64 for fp64 parameters, whatever the parameter's own dtype: summed in bf16, the
error of 256 tiles is seven times as large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from trunkline.engine.replay import autocast_type

ReduceGrads = Callable[[Sequence[Parameter], Sequence[Tensor | None]], Sequence[Tensor | None]]


def differentiate(
    outputs: Sequence[Tensor], wanted: Sequence[Tensor], gradients: Sequence[Tensor]
) -> list[Tensor | None]:
    """Compute the gradients of one chunk by plain autograd.

    It runs outside autocast, as `backward()` does: inside, autocast would round the gradients of what a model keeps in
    fp32.

    Args:
        outputs: tensors to go backward from.
        wanted: leaves of their graph.
        gradients: gradients of `outputs`.

    Returns:
        Gradients of `wanted`, in their dtypes; None where the chunk did not use a leaf.
    """
    with torch.autocast(autocast_type(gradients[0].device), enabled=False):
        return list(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True))


def depends_on(output: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Tell whether a tensor's autograd graph reaches any of these leaves (from `ParameterAccess.graph_params`)."""
    searched = {id(parameter) for parameter in parameters}
    seen: set[Any] = set()
    todo = [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in searched:
            return True
        todo.extend(following for following, _ in node.next_functions)
    return False


class GradientSums:
    """Running sums of parameter gradients over this rank's chunks, fp32 or wider."""

    def __init__(self) -> None:
        self._sums: dict[Parameter, Tensor] = {}

    def add(self, parameters: Sequence[Parameter], gradients: Sequence[Tensor | None]) -> None:
        """Add one chunk's gradients, in the order of `parameters`; None where the chunk did not use a parameter."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is None:
                continue
            total = self._sums.get(parameter)
            if total is None:
                # A gradient may be a view of something larger, or expanded: the sum is a tensor of its own.
                wide = torch.promote_types(gradient.dtype, torch.float32)
                self._sums[parameter] = gradient.to(wide, copy=True, memory_format=torch.contiguous_format)
            else:
                total.add_(gradient)

    def scale_(self, factor: Tensor) -> None:
        """Multiply every sum by `factor` (0-dim)."""
        for total in self._sums.values():
            total.mul_(factor)

    def deliver(self, parameters: Sequence[Parameter], reduce_grads: ReduceGrads) -> None:
        """Reduce the sums of these parameters over ranks, add them to `.grad`, and drop the sums.

        The gradients go through autograd's own accumulation at the leaf, so that hooks on a parameter run, once. A
        parameter without a sum on this rank takes part in the reduction, too.

        Args:
            parameters: parameters whose sums are complete.
            reduce_grads: reduces sums over ranks and casts them; see `ParameterAccess.reduce_grads`.
        """
        gradients = reduce_grads(parameters, [self._sums.pop(parameter, None) for parameter in parameters])
        ready = [(p, gradient) for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
        if ready:
            torch.autograd.backward([p for p, _ in ready], [gradient for _, gradient in ready])
