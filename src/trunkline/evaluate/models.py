"""What evaluation asks of a model: two protocols, so that tasks and scores know nothing of how a model runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class TokenScores:
    """How a model would have predicted each token of given sequences.

    Attributes:
        log_probs: (B, S) fp32, natural logarithm of the probability of each token given those before it; 0 where
            nothing predicts it: the first token of a row, or of a packed document.
        is_greedy: (B, S) bool, whether that token was the most likely; False where nothing predicts it.
    """

    log_probs: Tensor
    is_greedy: Tensor


class Scorer(Protocol):
    """A model that scores given sequences, one forward a call."""

    def __call__(self, input_ids: Tensor) -> TokenScores:
        """Score sequences.

        Args:
            input_ids: (B, S) int64, on the CPU; rows are of one length, nothing is padded.

        Returns:
            The scores of all tokens, on any device.
        """


class Continuer(Protocol):
    """A model that continues texts, many behind one prefix, which it goes through once."""

    def __call__(self, prefix_ids: Tensor, continuations: Sequence[Tensor], max_new_tokens: int) -> list[list[int]]:
        """Continue the prefix followed by each of the continuations, greedily.

        Args:
            prefix_ids: (1, S) int64, on the CPU.
            continuations: each (n,) int64 with n >= 1; they do not see each other.
            max_new_tokens: most tokens to generate for each.

        Returns:
            For each continuation the new tokens, fewer where the model ended its text or has no positions left.
        """
