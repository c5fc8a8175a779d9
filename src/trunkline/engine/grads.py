"""Gradients of parameters, summed over chunks in fp32 and rounded once.

A parameter gets its share from every chunk of its layer (a tied one from head and embedding too). The shares are summed
here in fp32, or fp64 for fp64 parameters, whatever the parameter's own dtype: summed in bf16, the error of 256 tiles is
seven times as large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from trunkline.engine.replay import autocast_type


def differentiate(
    outputs: Sequence[Tensor], wanted: Sequence[Tensor], gradients: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients of one chunk by plain autograd; None where the chunk did not touch what is wanted.

    Outside autocast, as `backward()` is: inside, it would round the gradients of what a model keeps in fp32.
    """
    with torch.autocast(autocast_type(gradients[0].device), enabled=False):
        return list(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True))


def depends_on(output: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether any of these parameters is in the graph of `output`."""
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


Reduced = Callable[[Sequence[Parameter], Sequence[Tensor | None]], Sequence[Tensor | None]]


class GradientSums:
    """Running sums of the gradients of some parameters."""

    def __init__(self) -> None:
        self._sums: dict[Parameter, Tensor] = {}

    def add(self, parameters: Sequence[Parameter], gradients: Sequence[Tensor | None]) -> None:
        """Add one chunk's gradients; None where a chunk did not touch the parameter."""
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

    def deliver(self, parameters: Sequence[Parameter], reduced: Reduced) -> None:
        """Accumulate the sums of these parameters into `.grad`.

        It goes through autograd's own accumulation at the leaf, so that hooks registered on a parameter run, once.

        Args:
            parameters: whose sums are complete.
            reduced: makes of parameters and their sums what is added to `.grad`; see `Decoder.reduce_grads`.
        """
        gradients = reduced(parameters, [self._sums.pop(parameter, None) for parameter in parameters])
        ready = [(p, gradient) for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
        if ready:
            torch.autograd.backward([p for p, _ in ready], [gradient for _, gradient in ready])
