"""Attention on the `meta` device: shapes and dtypes only, reported call by call to a watcher."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from trunkline.attention.kernel_base import Kernel


@dataclass(frozen=True, slots=True)
class KernelCall:
    """Call of an attention kernel.

    Attributes:
        direction: forward or backward.
        kernel: name of the imitated kernel.
        dtype: dtype of q, k and v in the call.
        batch: rows of the batch; where a block is cut into tiles, rows times tiles.
        heads: query heads.
        kv_heads: key/value heads.
        queries: query rows of each head.
        keys: keys of each head.
        head_dim: of queries and keys.
        value_dim: of values.
        causal: each query sees the keys up to its own position only, the last query all keys.
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
        """Query/key pairs that see each other, of all batch rows and query heads."""
        seen = self.queries * self.keys - (self.queries * (self.queries - 1) // 2 if self.causal else 0)
        return self.batch * self.heads * seen


watcher: ContextVar[Callable[[KernelCall], None] | None] = ContextVar("trunkline_attention_watcher", default=None)


class MetaKernel(Kernel):
    """Imitation of another kernel's shapes and dtypes; computes nothing, and reports each call to `watcher`.

    Args:
        like: the imitated kernel; None for CUDA's flash attention, which computes in the dtype that it is given.
    """

    name = "meta"

    def __init__(self, like: Kernel | None = None) -> None:
        self._like = like
        self.bottom_right = like is None or like.bottom_right

    @override
    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self._like is None else self._like.compute_dtype(dtype)

    @override
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        self._report("forward", q, k, v, causal=causal)
        lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        return q.new_empty(*q.shape[:3], v.shape[3]), lse

    @override
    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._report("backward", q, k, v, causal=causal)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def _report(
        self, direction: Literal["forward", "backward"], q: Tensor, k: Tensor, v: Tensor, *, causal: bool
    ) -> None:
        report = watcher.get()
        if report is None:
            return
        kernel = "flash" if self._like is None else self._like.name
        batch, heads, queries, dim = q.shape
        shape = batch, heads, k.shape[1], queries, k.shape[2], dim, v.shape[3]
        report(KernelCall(direction, kernel, q.dtype, *shape, causal))
