"""Perplexity by position and by document: what more context is worth to the model on ordinary text.

A token's position is how many tokens of its document are before it. The first token of a document has nothing before
it, so nobody predicts it, and it counts nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trunkline.data.sources import Document
from trunkline.data.tokenizers import Encoder
from trunkline.evaluate.models import TokenScores


@dataclass(frozen=True)
class TokenDocument:
    """A text as tokens.

    Attributes:
        name: what tables call it.
        ids: (S,) int64.
    """

    name: str
    ids: Tensor


@dataclass(frozen=True)
class MeanLoss:
    """Mean of the losses of some tokens.

    Attributes:
        num_tokens: how many were predicted.
        loss: mean negative log likelihood, in nats a token; NaN of no tokens.
    """

    num_tokens: int
    loss: float

    @property
    def perplexity(self) -> float:
        """Exponential of the loss; infinity where that is beyond all numbers."""
        return math.exp(self.loss) if not self.loss > 700 else math.inf


@dataclass(frozen=True)
class PositionLoss(MeanLoss):
    """Of the tokens at positions within a bin.

    Attributes:
        first: the bin's first position.
        last: its last one.
    """

    first: int
    last: int


@dataclass(frozen=True)
class DocumentLoss(MeanLoss):
    """Of the tokens of a document.

    Attributes:
        name: of the document.
    """

    name: str


def token_documents(
    documents: Iterable[Document], encoder: Encoder, *, most_tokens: int | None = None
) -> list[TokenDocument]:
    """Tokenise documents as for training: with the tokens that begin and end a text.

    Args:
        documents: texts.
        encoder: the tokenizer.
        most_tokens: longer documents are cut into pieces of so many tokens, the last with what is left, and the first
            token of each is predicted by nothing, as in training; None leaves them whole.

    Returns:
        The documents, or their pieces, in order; those of a single token are left out, since nothing predicts it.
    """
    found = []
    for document in documents:
        ids = torch.from_numpy(encoder.encode(document.text).astype(np.int64))
        size = most_tokens or len(ids) or 1
        pieces = [ids[i : i + size] for i in range(0, len(ids), size)]
        for number, piece in enumerate(pieces, start=1):
            name = document.name if len(pieces) == 1 else f"{document.name} ({number} of {len(pieces)})"
            if len(piece) > 1:
                found.append(TokenDocument(name, piece))
    return found


class PerplexityMeter:
    """Adds up losses by position and by document.

    Args:
        bin_width: positions of a bin; None for bins that double: 1, 2-3, 4-7, …
    """

    def __init__(self, bin_width: int | None = None) -> None:
        self._bin_width = bin_width
        self._bins: dict[int, tuple[int, float]] = {}
        self._documents: list[DocumentLoss] = []

    def add(self, scores: TokenScores, names: Sequence[Sequence[str]], document_ids: Tensor | None = None) -> None:
        """Add what a forward gave.

        Args:
            scores: of (B, S) tokens.
            names: for each row, of the documents in it in order.
            document_ids: (B, S), another number where another document begins; None where each row is one.

        Raises:
            ValueError: a row holds more or fewer documents than names.
        """
        losses = -scores.log_probs.double().cpu()
        if document_ids is None:
            document_ids = torch.zeros(losses.shape, dtype=torch.int64)
        for row, row_names, numbers in zip(losses, names, document_ids.cpu(), strict=True):
            self._add_row(row, row_names, numbers)

    def _add_row(self, losses: Tensor, names: Sequence[str], numbers: Tensor) -> None:
        places = torch.arange(len(losses))
        begins = torch.ones(len(losses), dtype=torch.bool)
        begins[1:] = numbers[1:] != numbers[:-1]
        which = begins.cumsum(0) - 1
        positions = places - places[begins][which]
        if int(begins.sum()) != len(names):
            raise ValueError(
                f"names: {len(names)} for a row that document_ids cut into {int(begins.sum())} documents. Give one "
                "name each, in order."
            )
        predicted = ~begins
        losses, positions, which = losses[predicted], positions[predicted], which[predicted]
        bins = self._bin_of(positions)
        counts, totals = torch.bincount(bins).tolist(), torch.bincount(bins, weights=losses).tolist()
        for number, (count, total) in enumerate(zip(counts, totals, strict=True)):
            if count:
                before, so_far = self._bins.get(number, (0, 0.0))
                self._bins[number] = (before + count, so_far + total)
        counts = torch.bincount(which, minlength=len(names)).tolist()
        totals = torch.bincount(which, weights=losses, minlength=len(names)).tolist()
        for name, count, total in zip(names, counts, totals, strict=True):
            self._documents.append(DocumentLoss(count, total / count if count else math.nan, name))

    def _bin_of(self, positions: Tensor) -> Tensor:
        if self._bin_width is not None:
            return positions // self._bin_width
        # Exact, where a logarithm is not: the exponent of the number's binary form.
        return torch.frexp(positions.double()).exponent.long() - 1

    def by_position(self) -> list[PositionLoss]:
        """Return the mean loss of each bin that holds a token, in order of positions."""
        found = []
        for number, (count, total) in sorted(self._bins.items()):
            width = self._bin_width
            first, stop = (2**number, 2 ** (number + 1)) if width is None else (number * width, (number + 1) * width)
            found.append(PositionLoss(count, total / count, max(1, first), stop - 1))
        return found

    def by_document(self) -> list[DocumentLoss]:
        """Return the mean loss of each document, in the order in which they came."""
        return list(self._documents)
