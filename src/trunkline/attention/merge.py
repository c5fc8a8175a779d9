"""Merging partial attentions over disjoint sets of keys (online softmax; Milakov and Gimelshein, arXiv 1805.02867)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def merge_(o_BHCD: Tensor, lse_BHC: Tensor, other_BHCD: Tensor, other_lse_BHC: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention of the same queries over two disjoint sets of keys, into the first.

    With w = sigmoid(other_lse - lse) the merged output is o + w (other - o), and the merged log-sum-exp is
    lse - logsigmoid(lse - other_lse). Neither overflows at any gap, unlike log(1 + exp(gap)).

    Args:
        o_BHCD: output over the first set, fp32 or fp64; overwritten with the merged output.
        lse_BHC: its log-sum-exp of the scaled scores, natural logarithm, same dtype.
        other_BHCD: output over the second set; any floating dtype.
        other_lse_BHC: its log-sum-exp.

    Returns:
        The merged output (`o_BHCD` itself) and the merged log-sum-exp. Every query must have a key in each set.
    """
    assert o_BHCD.dtype in (torch.float32, torch.float64), "partial attentions are merged in fp32 or wider"
    gap_BHC = other_lse_BHC - lse_BHC
    o_BHCD.lerp_(other_BHCD.to(o_BHCD.dtype), torch.sigmoid(gap_BHC)[..., None])
    return o_BHCD, lse_BHC - F.logsigmoid(-gap_BHC)
