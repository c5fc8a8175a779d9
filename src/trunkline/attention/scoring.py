"""Scoring: scale, soft cap and attention sinks of the scores."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scoring:
    """Arguments of an attention call besides queries, keys and values.

    Attributes:
        scale: factor of the scores.
        softcap: c of c · tanh(score / c), after the scale (Gemma 2); None for none.
        sinks: (H,), for each query head a score that takes part in the softmax and has no value (gpt-oss); None for
            none. They are trained: their gradient goes through autograd.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    def of_heads(self, heads: slice) -> Scoring:
        """Return the scoring of some query heads: their sinks, if there are any."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[heads])

    @property
    def detached(self) -> Scoring:
        """The same scoring, with its sinks outside the autograd graph."""
        return self if self.sinks is None else replace(self, sinks=self.sinks.detach())


def with_sinks(o_BHCD: Tensor, lse_BHC: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Merge an attention with its sinks: one more key, whose value is 0.

    Returns:
        The output o · sigmoid(lse - sink), in the dtype of `o_BHCD`, and the log-sum-exp with the sink.
    """
    sinks_HC = sinks_H.to(lse_BHC.dtype)[:, None]
    weight_BHC = torch.sigmoid(lse_BHC - sinks_HC)
    return (o_BHCD * weight_BHC[..., None]).to(o_BHCD.dtype), torch.logaddexp(lse_BHC, sinks_HC)


def sinks_gradient(do_BHCD: Tensor, o_BHCD: Tensor, lse_BHC: Tensor, sinks_H: Tensor) -> Tensor:
    """Compute the gradient of the sinks, (H,), summed over rows and queries; fp32 or wider.

    Args:
        do_BHCD: gradient of the output.
        o_BHCD: output of `with_sinks`.
        lse_BHC: log-sum-exp of `with_sinks`, which includes the sink.
        sinks_H: the sinks.
    """
    delta_BHC = (do_BHCD.to(lse_BHC.dtype) * o_BHCD).sum(-1)
    weight_BHC = torch.exp(sinks_H.to(lse_BHC.dtype)[:, None] - lse_BHC)
    return -(weight_BHC * delta_BHC).sum((0, 2))
