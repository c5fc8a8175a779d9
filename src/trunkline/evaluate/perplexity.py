"""Perplexity by position and by document: the worth of more context on ordinary text.

The position of a token is the number of tokens before it in its document. The first token of a document is not
predicted, and does not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trunkline.data.sources import Document
from trunkline.data.tokenizers import Encoder


@dataclass(frozen=True)
class TokenDocument:
    """Document as token ids, (S,) int64, with its name in tables."""

    name: str
    ids: Tensor


@dataclass(frozen=True)
class MeanLoss:
    """Mean loss of some tokens.

    Attributes:
        num_tokens: predicted tokens.
        loss: mean negative log likelihood, in nats a token; NaN where there are no tokens.
    """

    num_tokens: int
    loss: float

    @property
    def perplexity(self) -> float:
        """Exponential of the loss; infinity where it overflows."""
        return math.exp(self.loss) if not self.loss > 700 else math.inf


@dataclass(frozen=True)
class PositionLoss(MeanLoss):
    """Mean loss of the tokens in a bin of positions, from `first` to `last`, both included."""

    first: int
    last: int


@dataclass(frozen=True)
class DocumentLoss(MeanLoss):
    """Mean loss of the tokens of a document, and its name in tables."""

    name: str


def token_documents(
    documents: Iterable[Document], encoder: Encoder, *, most_tokens: int | None = None
) -> list[TokenDocument]:
    """Tokenize documents as for training, with the tokens that begin and end a text.

    Args:
        documents: texts.
        encoder: the tokenizer.
        most_tokens: cut longer documents into pieces of this many tokens, the last with the rest. The first token of a
            piece is not predicted, as in training. None leaves documents whole.

    Returns:
        Documents or their pieces, in order; those of fewer than two tokens are dropped.
    """
    found = []
    for document in documents:
        ids = torch.from_numpy(encoder.encode(document.text).astype(np.int64))
        size = most_tokens or max(1, len(ids))
        pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
        for number, piece in enumerate(pieces, start=1):
            name = document.name if len(pieces) == 1 else f"{document.name} ({number} of {len(pieces)})"
            if len(piece) > 1:
                found.append(TokenDocument(name, piece))
    return found


class PerplexityMeter:
    """Meter of losses by position and by document.

    Args:
        bin_width: positions of a bin; None for bins that double: 1, 2-3, 4-7, …
    """

    def __init__(self, bin_width: int | None = None) -> None:
        self._bin_width = bin_width
        self._bins: dict[int, tuple[int, float]] = {}
        self._documents: list[DocumentLoss] = []

    def add(self, name: str, log_probs_S: Tensor) -> None:
        """Add one document; give each document of a packed row on its own.

        Args:
            name: name of the document.
            log_probs_S: log probability of each token (S,); the first is ignored.
        """
        losses = -log_probs_S[1:].double().cpu()
        positions = torch.arange(1, len(losses) + 1)
        if self._bin_width is not None:
            bins = positions // self._bin_width
        else:  # exact, unlike a logarithm: the exponent of the number's binary form
            bins = torch.frexp(positions.double()).exponent.long() - 1
        counts, totals = torch.bincount(bins).tolist(), torch.bincount(bins, weights=losses).tolist()
        for number, (count, total) in enumerate(zip(counts, totals, strict=True)):
            if count:
                count_before, total_before = self._bins.get(number, (0, 0.0))
                self._bins[number] = (count_before + count, total_before + total)
        mean = math.fsum(losses.tolist()) / len(losses) if len(losses) else math.nan
        self._documents.append(DocumentLoss(len(losses), mean, name))

    def by_position(self) -> list[PositionLoss]:
        """Return the mean loss of each bin that holds a token, in order of positions."""
        found, width = [], self._bin_width
        for number, (count, total) in sorted(self._bins.items()):
            first, stop = (2**number, 2 ** (number + 1)) if width is None else (number * width, (number + 1) * width)
            found.append(PositionLoss(count, total / count, max(1, first), stop - 1))
        return found

    def by_document(self) -> list[DocumentLoss]:
        """Return the mean loss of each document, in the order of `add`."""
        return list(self._documents)
