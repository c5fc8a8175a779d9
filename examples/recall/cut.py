"""Attention chunk by chunk in plain PyTorch, without gradients between chunks: the comparison for full gradients.

Queries see keys and values of earlier chunks as constants, as in training that keeps a cache of the past and
backpropagates through the present only. Without the cut it is ordinary causal attention; a test checks that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface


def register(chunk_size: int, *, cut: bool = True) -> str:
    """Register the attention with transformers.

    Args:
        chunk_size: tokens of a chunk.
        cut: detach keys and values of earlier chunks.

    Returns:
        Name of the attention, for `model.set_attn_implementation`.
    """

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        o_BHSD = in_chunks(query, key, value, chunk_size, cut=cut, window=sliding_window, scale=scaling)
        return o_BHSD.transpose(1, 2), None

    name = f"recall_{'cut' if cut else 'whole'}_{chunk_size}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, _no_mask)
    return name


def in_chunks(
    q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, chunk_size: int, *, cut: bool, window: int | None = None,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Compute causal attention, one chunk of queries at a time.

    Args:
        q_BHSD: queries (B, H, S, D); keys and values have as many heads.
        k_BHSD: keys.
        v_BHSD: values.
        chunk_size: queries at a time.
        cut: detach keys and values of earlier chunks from the queries of a chunk.
        window: tokens visible to a query, including its own; None for all before it.
        scale: factor of the scores; None for D ** -0.5.

    Returns:
        (B, H, S, D).
    """
    seq_len = q_BHSD.shape[2]
    outputs = []
    for start in range(0, seq_len, chunk_size):
        stop = min(start + chunk_size, seq_len)
        first = 0 if window is None else max(0, start - window + 1)
        places_Q, places_K = torch.arange(start, stop)[:, None], torch.arange(first, stop)
        visible_QK = places_K <= places_Q
        if window is not None:
            visible_QK &= places_K > places_Q - window
        k, v = (_with_past(x, first, start, stop, cut) for x in (k_BHSD, v_BHSD))
        q = q_BHSD[:, :, start:stop]
        outputs.append(F.scaled_dot_product_attention(q, k, v, visible_QK.to(q.device), scale=scale))
    return torch.cat(outputs, 2)


def _with_past(x_BHSD: Tensor, first: int, start: int, stop: int, cut: bool) -> Tensor:
    if not cut:
        return x_BHSD[:, :, first:stop]
    return torch.cat([x_BHSD[:, :, first:start].detach(), x_BHSD[:, :, start:stop]], 2)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Build no mask: the attention handles causality and windows itself."""
