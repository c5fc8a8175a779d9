"""Ulysses: tokens are cut over ranks outside attention, heads inside (DeepSpeed Ulysses, arXiv 2309.14509).

One all-to-all turns queries, keys and values of a rank's tokens and all heads into those of all tokens and the rank's
heads; another turns its output back. Key/value heads fewer than ranks are sent to several, and their gradients summed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trunkline.parallel.comm import Comm, Pending, cut_rows, join_rows


class Ulysses:
    """The exchanges of one group of ranks.

    Args:
        comm: of the ranks, in the order of their tokens.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.size = comm.size

    def num_heads(self, heads: int) -> int:
        """Heads that each rank has in attention, of so many; some of them copies, where that takes it."""
        return math.lcm(heads, self.size) // self.size

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors (B, heads, T, D) of this rank's tokens to (B, own heads, size * T, D)."""
        given: tuple[Tensor, ...] = _ToHeads.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return given

    def to_tokens(self, o: Tensor) -> Tensor:
        """An output (B, own heads, size * T, D) to (B, heads, T, D) of this rank's tokens."""
        given: Tensor = _ToTokens.apply(self, o)  # type: ignore[no-untyped-call]
        return given

    def start_to_heads(self, *tensors: Tensor) -> Heads:
        """The same, under way: what is computed before `wait` does not wait for it. Not differentiable."""
        size, parts, shapes = self.size, [], []
        dtype = tensors[0].dtype
        for x in tensors:
            dtype = torch.promote_types(dtype, x.dtype)
            batch, heads, length, dim = x.shape
            own = self.num_heads(heads)
            if own * size != heads:
                x = x.repeat_interleave(own * size // heads, dim=1)
            # (B, size, own, T, D) to (size, B, own, T, D)
            parts.append(x.reshape(batch, size, own, length, dim).transpose(0, 1).reshape(size, -1))
            shapes.append((batch, own, length, dim))
        return Heads(self._exchange(parts, dtype), shapes, [x.dtype for x in tensors])

    def gather_heads(self, tensors: tuple[Tensor, ...], heads: tuple[int, ...]) -> list[Tensor]:
        """The other way; where heads are copies, sums over these in fp32 or wider.

        Args:
            tensors: (B, own heads, size * T, D).
            heads: how many there are of each without copies.

        Returns:
            (B, heads, T, D) of this rank's tokens.
        """
        size, parts, shapes = self.size, [], []
        dtype = tensors[0].dtype
        for x in tensors:
            dtype = torch.promote_types(dtype, x.dtype)
            batch, own, length, dim = x.shape
            parts.append(cut_rows(x, size))
            shapes.append((size, batch, own, length // size, dim))
        received = self._exchange(parts, dtype).wait()
        given = []
        columns = torch.split(received, [x.shape[1] for x in parts], 1)
        for x, shape, count, like in zip(columns, shapes, heads, tensors, strict=True):
            _, batch, own, length, dim = shape
            x = x.reshape(shape).transpose(0, 1).reshape(batch, size * own, length, dim)
            copies = size * own // count
            if copies > 1:
                wide = torch.promote_types(like.dtype, torch.float32)
                x = x.reshape(batch, count, copies, length, dim).sum(2, dtype=wide)
            given.append(x.to(like.dtype))
        return given

    def _exchange(self, parts: list[Tensor], dtype: torch.dtype) -> Pending:
        """One all-to-all for all of them, each (size, n), side by side."""
        packed = torch.cat([x.to(dtype) for x in parts], 1) if len(parts) > 1 else parts[0].to(dtype).contiguous()
        return self.comm.all_to_all(packed)


@dataclass(frozen=True, slots=True)
class Heads:
    """Tensors of a rank's heads on their way."""

    pending: Pending
    shapes: Sequence[tuple[int, ...]]  # of a rank's part
    dtypes: list[torch.dtype]

    def wait(self) -> tuple[Tensor, ...]:
        """Them, (B, own heads, size * T, D) each."""
        columns = torch.split(self.pending.wait(), [math.prod(shape) for shape in self.shapes], 1)
        triples = zip(columns, self.shapes, self.dtypes, strict=True)
        return tuple(join_rows(x, shape).to(dtype) for x, shape, dtype in triples)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ulysses: Ulysses, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ulysses = ulysses
        ctx.heads = tuple(x.shape[1] for x in tensors)
        return ulysses.start_to_heads(*tensors).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.ulysses.gather_heads(gradients, ctx.heads)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ulysses: Ulysses, o: Tensor) -> Tensor:
        ctx.ulysses = ulysses
        return ulysses.gather_heads((o,), (o.shape[1] * ulysses.size,))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[None, Tensor]:
        return None, ctx.ulysses.start_to_heads(do).wait()[0]
