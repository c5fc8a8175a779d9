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

from trunkline.attention.kv_gather import Pending
from trunkline.distributed.comm import Collectives, join_rows, split_rows
from trunkline.distributed.interleave import Interleaver


class Ulysses:
    """The exchanges of one group of ranks. While one is under way, another call goes on, if there is one.

    Args:
        comm: of the ranks, in the order of their tokens.
        turns: who goes on.
    """

    def __init__(self, comm: Collectives, turns: Interleaver) -> None:
        self.comm = comm
        self.turns = turns
        self.size = comm.size

    def num_heads(self, heads: int) -> int:
        """Heads that each rank has in attention, of so many; some of them copies, where that takes it."""
        return math.lcm(heads, self.size) // self.size

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors (B, heads, T, D) of this rank's tokens to (B, own heads, size * T, D)."""
        coming = self.start_to_heads(*(x.detach() for x in tensors))
        self.turns.pause()
        given: tuple[Tensor, ...] = _ToHeads.apply(self, coming, *tensors)  # type: ignore[no-untyped-call]
        return given

    def to_tokens(self, o: Tensor, coming: Pending[tuple[Tensor, ...]] | None = None) -> Tensor:
        """An output (B, own heads, size * T, D) to (B, heads, T, D) of this rank's tokens; it may be under way."""
        if coming is None:
            coming = self.start_output(o.detach())
            self.turns.pause()
        given: Tensor = _ToTokens.apply(self, coming, o)  # type: ignore[no-untyped-call]
        return given

    def start_output(self, o: Tensor) -> Tokens:
        """`to_tokens` of what is no node yet."""
        return self.start_to_tokens((o,), (o.shape[1] * self.size,))

    def start_to_heads(self, *tensors: Tensor) -> Heads:
        """`to_heads`, under way: what is computed before `wait` does not wait for it. Not differentiable."""
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

    def start_to_tokens(self, tensors: tuple[Tensor, ...], heads: tuple[int, ...]) -> Tokens:
        """The other way, under way; where heads are copies, sums over these in fp32 or wider. Not differentiable.

        Args:
            tensors: (B, own heads, size * T, D).
            heads: how many there are of each without copies.
        """
        size, parts, shapes = self.size, [], []
        dtype = tensors[0].dtype
        for x in tensors:
            dtype = torch.promote_types(dtype, x.dtype)
            batch, own, length, dim = x.shape
            parts.append(split_rows(x, size))
            shapes.append((size, batch, own, length // size, dim))
        return Tokens(self._exchange(parts, dtype), shapes, heads, [x.dtype for x in tensors])

    def _exchange(self, parts: list[Tensor], dtype: torch.dtype) -> Pending[Tensor]:
        """One all-to-all for all of them, each (size, n), side by side."""
        packed = torch.cat([x.to(dtype) for x in parts], 1) if len(parts) > 1 else parts[0].to(dtype).contiguous()
        return self.comm.all_to_all(packed)


@dataclass(frozen=True, slots=True)
class Heads:
    """Tensors of a rank's heads on their way."""

    pending: Pending[Tensor]
    shapes: Sequence[tuple[int, ...]]  # of a rank's part
    dtypes: list[torch.dtype]

    def wait(self) -> tuple[Tensor, ...]:
        """Them, (B, own heads, size * T, D) each."""
        columns = torch.split(self.pending.wait(), [math.prod(shape) for shape in self.shapes], 1)
        triples = zip(columns, self.shapes, self.dtypes, strict=True)
        return tuple(join_rows(x, shape).to(dtype) for x, shape, dtype in triples)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tensors of a rank's tokens on their way."""

    pending: Pending[Tensor]
    shapes: Sequence[tuple[int, ...]]  # (size, B, own heads, T, D)
    heads: tuple[int, ...]  # without copies
    dtypes: list[torch.dtype]

    def wait(self) -> tuple[Tensor, ...]:
        """Them, (B, heads, T, D) each."""
        columns = torch.split(self.pending.wait(), [math.prod(shape[1:]) for shape in self.shapes], 1)
        given = []
        for x, shape, count, dtype in zip(columns, self.shapes, self.heads, self.dtypes, strict=True):
            size, batch, own, length, dim = shape
            x = x.reshape(shape).transpose(0, 1).reshape(batch, size * own, length, dim)
            copies = size * own // count
            if copies > 1:
                x = x.reshape(batch, count, copies, length, dim).sum(2, dtype=torch.promote_types(dtype, torch.float32))
            given.append(x.to(dtype))
        return tuple(given)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ulysses: Ulysses, coming: Heads, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ulysses = ulysses
        ctx.heads = tuple(x.shape[1] for x in tensors)
        ctx.set_materialize_grads(False)
        return coming.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        present = tuple(x for x in gradients if x is not None)
        if not present:  # they come another way
            return None, None, *gradients
        assert len(present) == len(gradients)
        coming = ctx.ulysses.start_to_tokens(present, ctx.heads)
        ctx.ulysses.turns.meanwhile()
        return None, None, *coming.wait()


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ulysses: Ulysses, coming: Pending[tuple[Tensor, ...]], o: Tensor) -> Tensor:
        ctx.ulysses = ulysses
        return coming.wait()[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[None, None, Tensor]:
        coming = ctx.ulysses.start_to_heads(do)
        ctx.ulysses.turns.meanwhile()
        return None, None, coming.wait()[0]
