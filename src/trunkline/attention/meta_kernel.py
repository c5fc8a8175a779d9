"""Attention on tensors without contents, and who is told of it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Attended:
    """A call of an attention kernel.

    Attributes:
        direction: of the call.
        kernel: name of the kernel that it stands for.
        dtype: in which it computes.
        batch: rows of the batch.
        heads: query heads.
        kv_heads: key/value heads.
        queries: rows of each head.
        keys: of each head.
        head_dim: of queries and keys.
        value_dim: of values.
        causal: whether each query sees the keys up to its own place only, the last one all.
    """

    direction: Literal["forward", "backward"]
    kernel: str
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    causal: bool

    @property
    def pairs(self) -> int:
        """Queries and keys that see each other, of all rows and heads."""
        seen = self.queries * self.keys - (self.queries * (self.queries - 1) // 2 if self.causal else 0)
        return self.batch * self.heads * seen


watcher: ContextVar[Callable[[Attended], None] | None] = ContextVar("trunkline_attention_watcher", default=None)


class _Like(Protocol):
    name: str
    bottom_right: bool

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype: ...


class MetaKernel:
    """Another kernel's shapes and dtypes, for tensors on the `meta` device: it computes nothing, and says what for.

    Args:
        like: the kernel whose place it takes; None is one that computes in the dtype it is given.
    """

    name = "virtual"

    def __init__(self, like: _Like | None = None) -> None:
        self._like = like
        self.bottom_right = like is None or like.bottom_right

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """That of the other kernel."""
        return dtype if self._like is None else self._like.compute_dtype(dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        self._announce("forward", q, k, v, causal=causal)
        lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        return q.new_empty(*q.shape[:3], v.shape[3]), lse

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        self._announce("backward", q, k, v, causal=causal)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def _announce(
        self, direction: Literal["forward", "backward"], q: Tensor, k: Tensor, v: Tensor, *, causal: bool
    ) -> None:
        told = watcher.get()
        if told is None:
            return
        kernel = "flash" if self._like is None else self._like.name
        batch, heads, queries, dim = q.shape
        shape = batch, heads, k.shape[1], queries, k.shape[2], dim, v.shape[3]
        told(Attended(direction, kernel, q.dtype, *shape, causal))
