"""Samples: pieces of exactly `context` tokens, each from one document, in a seeded order.

No sample holds tokens of two documents. The rest at the end of a document, and documents shorter than the context, are
dropped; the report counts them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from trunkline.data.sources import Document
from trunkline.data.tokenizers import Encoder, Tokens


@dataclass(frozen=True)
class CutReport:
    """Counts of the documents and tokens that cutting used and dropped.

    Attributes:
        context: tokens of a sample.
        num_documents: documents read, used or not.
        num_short_documents: documents shorter than the context, dropped whole.
        num_tokens: tokens of all documents, with those that begin and end one.
        num_samples: samples cut.
        longest_document: tokens of the longest document.
        longest_name: name of the longest document.
    """

    context: int
    num_documents: int
    num_short_documents: int
    num_tokens: int
    num_samples: int
    longest_document: int
    longest_name: str

    @property
    def num_used_tokens(self) -> int:
        """Tokens in samples."""
        return self.num_samples * self.context

    @property
    def num_dropped_tokens(self) -> int:
        """Tokens in no sample."""
        return self.num_tokens - self.num_used_tokens

    def __str__(self) -> str:
        long = self.num_documents - self.num_short_documents
        return (
            f"{self.num_samples:,} samples of {self.context:,} tokens from {long:,} of {self.num_documents:,} "
            f"documents: {self.num_used_tokens:,} of {self.num_tokens:,} tokens used "
            f"({self.num_used_tokens / self.num_tokens:.1%}). "
            f"Dropped {self.num_dropped_tokens:,} tokens ({self.num_dropped_tokens / self.num_tokens:.1%}): "
            f"{self.num_short_documents:,} documents shorter than the context, and the ends of longer ones."
        )


@dataclass(frozen=True)
class Samples:
    """Samples of exactly `report.context` tokens.

    Attributes:
        pieces: one array (S,) of token ids for each sample, in document order.
        report: counts of used and dropped tokens.
    """

    pieces: list[Tokens]
    report: CutReport

    def __len__(self) -> int:
        return len(self.pieces)


def cut_documents(
    documents: Iterable[Document],
    encoder: Encoder,
    *,
    context: int,
) -> Samples:
    """Encode documents and cut each into samples of exactly `context` tokens.

    The rest of a document is dropped, and so is a document shorter than the context; `Samples.report` counts them.
    Documents are never joined.

    Args:
        documents: documents, in order.
        encoder: encoder of the tokenizer.
        context: tokens of a sample, over all ranks.

    Returns:
        The samples, in document order, and the report.

    Raises:
        ValueError: there are no documents, or all are shorter than the context.
    """
    pieces: list[Tokens] = []
    num_documents = num_short = num_tokens = longest = 0
    longest_name = ""
    for document in documents:
        ids = encoder.encode(document.text)
        num_documents += 1
        num_tokens += len(ids)
        if len(ids) > longest:
            longest, longest_name = len(ids), document.name
        count = len(ids) // context
        if count == 0:
            num_short += 1
        else:
            # Copied: a view would keep the rest of the document in memory.
            kept = ids[: count * context].copy()
            pieces.extend(kept[i * context : (i + 1) * context] for i in range(count))
    report = CutReport(context, num_documents, num_short, num_tokens, len(pieces), longest, longest_name)
    if num_documents == 0:
        raise ValueError("data.files: the corpus is empty: no file holds text. Name files with text in data.files.")
    if not pieces:
        raise ValueError(
            f"context: {context:,} tokens is longer than every document of data.files ({num_documents:,} documents; "
            f"the longest, '{longest_name}', has {longest:,} tokens), and documents are never joined. Set context to "
            f"{longest} or less, or add longer documents."
        )
    return Samples(pieces, report)


@dataclass(frozen=True)
class SampleOrder:
    """Seeded order of samples, shuffled anew in each epoch.

    The order depends on the seed and the number of samples alone: batch size, accumulation and restarts do not change
    it.

    Attributes:
        num_samples: samples in one epoch.
        seed: seed of the recipe.
    """

    num_samples: int
    seed: int

    def take(self, start: int, count: int) -> list[int]:
        """Return the indices of the samples at places `start` … `start + count - 1`, counted through all epochs."""
        chosen: list[int] = []
        while len(chosen) < count:
            epoch, place = divmod(start + len(chosen), self.num_samples)
            order = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
            chosen += order[place : place + count - len(chosen)].tolist()
        return chosen
