"""Signature of all attention kernels.

Shapes: q (B, H, C, D), k and v (B, K, T, D) with H a multiple of K; key/value heads are never repeated in memory. The
head dim of values, and so of outputs, may differ from that of queries and keys.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

MAX_ELEMENTS = 2**31 - 1  # kernels index with 32 bits (flash-attention#767)


class Kernel(Protocol):
    """Attention of query rows over a rectangle of keys, and its gradient.

    Attributes:
        name: in `resolve` and `StreamConfig.attn_kernel`.
        bottom_right: `causal` is aligned to the bottom right: the last query sees all keys, whatever the lengths.
            False: `causal` is allowed for equal lengths only.
    """

    name: str
    bottom_right: bool

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype to which q, k, v of `dtype` must be cast before they are given to this kernel."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Attend to keys.

        Args:
            q: queries (B, H, C, D).
            k: keys (B, K, T, D).
            v: values (B, K, T, D).
            causal: each query sees the keys up to its own position only; see `bottom_right` for where positions begin.
            scale: factor of the scores.

        Returns:
            The output (B, H, C, D) in the dtype of `q`, and its log-sum-exp (B, H, C), natural logarithm, fp32 (fp64
            for fp64).
        """
        ...

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of q, k, v, in their dtype.

        `o` and `lse` are over *all* keys of each query, also those of other calls, and include its sink: the gradients
        of calls over disjoint keys then add up (FlashAttention-2, arXiv 2307.08691, section 3.1.2).
        """
        ...
