"""DeepSpeed Ulysses (arXiv 2309.14509): tokens are divided over ranks outside attention, heads inside.

One all-to-all turns q, k, v of a rank's tokens (all heads) into those of the rank's heads (all tokens); another turns
the output back. Heads that the ranks do not divide (few key/value heads) are repeated, and the gradients of the copies
summed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from trunkline.attention.kv_gather import Pending
from trunkline.distributed.comm import Collectives, join_rows, split_rows
from trunkline.distributed.interleave import Interleaver


class Ulysses:
    """All-to-alls of one group of ranks. While one is in flight the interleaver runs another chunk's call.

    T is the tokens of one rank; size * T are those of all ranks of the group, in rank order.

    Args:
        comm: collectives of the ranks, in the order of their tokens.
        interleaver: scheduler of the calls that exchange.
    """

    def __init__(self, comm: Collectives, interleaver: Interleaver) -> None:
        self.comm = comm
        self.interleaver = interleaver
        self.size = comm.size

    def num_heads(self, heads: int) -> int:
        """Return the number of heads of each rank in attention, copies included, for a model's number of heads."""
        return math.lcm(heads, self.size) // self.size

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Exchange tensors (B, heads, T, D) of this rank's tokens for (B, local heads, size * T, D); differentiable."""
        pending = self.start_to_heads(*(x.detach() for x in tensors))
        # Pause before the node exists: a switch inside its forward would expose autograd's state to the other call.
        self.interleaver.pause()
        out: tuple[Tensor, ...] = _ToHeads.apply(self, pending, *tensors)  # type: ignore[no-untyped-call]
        return out

    def to_tokens(self, o: Tensor, pending: Pending[tuple[Tensor, ...]] | None = None) -> Tensor:
        """Exchange an output (B, local heads, size * T, D) for (B, heads, T, D) of this rank's tokens; differentiable.

        Args:
            o: the output; its values are not read if `pending` is given.
            pending: result of `start_output`, if the exchange is in flight already; None starts it here.
        """
        if pending is None:
            pending = self.start_output(o.detach())
            self.interleaver.pause()
        out: Tensor = _ToTokens.apply(self, pending, o)  # type: ignore[no-untyped-call]
        return out

    def start_output(self, o: Tensor) -> PendingTokens:
        """Start `to_tokens` of an output (B, local heads, size * T, D) outside the graph."""
        return self.start_to_tokens((o,), (o.shape[1] * self.size,))

    def start_to_heads(self, *tensors: Tensor) -> PendingHeads:
        """Start to exchange tensors (B, heads, T, D) for (B, local heads, size * T, D). Not differentiable."""
        size, parts, shapes = self.size, [], []
        for x in tensors:
            batch, heads, length, dim = x.shape
            local = self.num_heads(heads)
            if local * size != heads:
                x = x.repeat_interleave(local * size // heads, dim=1)
            # (B, size, local, T, D) to (size, B, local, T, D)
            parts.append(x.reshape(batch, size, local, length, dim).transpose(0, 1).reshape(size, -1))
            shapes.append((batch, local, length, dim))
        return PendingHeads(self._exchange(parts), shapes, [x.dtype for x in tensors])

    def start_to_tokens(self, tensors: tuple[Tensor, ...], heads: tuple[int, ...]) -> PendingTokens:
        """Start the reverse exchange. Copies of a head are summed, in fp32 or wider. Not differentiable.

        Args:
            tensors: (B, local heads, size * T, D) each.
            heads: the model's number of heads of each tensor, without copies.
        """
        size = self.size
        shapes = [(size, *x.shape[:2], x.shape[2] // size, x.shape[3]) for x in tensors]
        parts = [split_rows(x, size) for x in tensors]
        return PendingTokens(self._exchange(parts), shapes, heads, [x.dtype for x in tensors])

    def _exchange(self, parts: list[Tensor]) -> Pending[Tensor]:
        """Start one all-to-all of several tensors, (size, n) each, side by side in their widest dtype."""
        dtype = parts[0].dtype
        for x in parts:
            dtype = torch.promote_types(dtype, x.dtype)
        packed = torch.cat([x.to(dtype) for x in parts], 1) if len(parts) > 1 else parts[0].to(dtype).contiguous()
        return self.comm.all_to_all(packed)


@dataclass(frozen=True, slots=True)
class PendingHeads(Pending[tuple[Tensor, ...]]):
    """Result of `start_to_heads`: (B, local heads, size * T, D) each."""

    packed: Pending[Tensor]
    shapes: Sequence[tuple[int, ...]]  # (B, local heads, T, D)
    dtypes: list[torch.dtype]

    @override
    def wait(self) -> tuple[Tensor, ...]:
        columns = torch.split(self.packed.wait(), [math.prod(shape) for shape in self.shapes], 1)
        triples = zip(columns, self.shapes, self.dtypes, strict=True)
        return tuple(join_rows(x, shape).to(dtype) for x, shape, dtype in triples)


@dataclass(frozen=True, slots=True)
class PendingTokens(Pending[tuple[Tensor, ...]]):
    """Result of `start_to_tokens`: (B, heads, T, D) each."""

    packed: Pending[Tensor]
    shapes: Sequence[tuple[int, ...]]  # (size, B, local heads, T, D)
    heads: tuple[int, ...]  # without copies
    dtypes: list[torch.dtype]

    @override
    def wait(self) -> tuple[Tensor, ...]:
        columns = torch.split(self.packed.wait(), [math.prod(shape[1:]) for shape in self.shapes], 1)
        out = []
        for x, shape, heads, dtype in zip(columns, self.shapes, self.heads, self.dtypes, strict=True):
            size, batch, local, length, dim = shape
            x = x.reshape(shape).transpose(0, 1).reshape(batch, size * local, length, dim)
            copies = size * local // heads
            if copies > 1:
                x = x.reshape(batch, heads, copies, length, dim).sum(2, dtype=torch.promote_types(dtype, torch.float32))
            out.append(x.to(dtype))
        return tuple(out)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ulysses: Ulysses, pending: PendingHeads, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ulysses = ulysses
        ctx.heads = tuple(x.shape[1] for x in tensors)
        ctx.set_materialize_grads(False)
        return pending.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        present = tuple(x for x in grads if x is not None)
        if not present:  # head groups deliver gradients of q, k, v by themselves
            return None, None, *grads
        assert len(present) == len(grads)
        pending = ctx.ulysses.start_to_tokens(present, ctx.heads)
        ctx.ulysses.interleaver.run_next()
        return None, None, *pending.wait()


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ulysses: Ulysses, pending: Pending[tuple[Tensor, ...]], o: Tensor) -> Tensor:
        ctx.ulysses = ulysses
        return pending.wait()[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[None, None, Tensor]:
        pending = ctx.ulysses.start_to_heads(do)
        ctx.ulysses.interleaver.run_next()
        return None, None, pending.wait()[0]
