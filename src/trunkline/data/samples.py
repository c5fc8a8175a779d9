"""Documents to samples: pieces of exactly `context` tokens, each from one document, in a seeded order.

No sample holds tokens of two documents. What is left at the end of a document, and documents shorter than the context,
are dropped, and the report says how much that was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from trunkline.data.sources import Document
from trunkline.data.tokenizers import Encoder, Tokens


@dataclass(frozen=True)
class CutReport:
    """What cutting used and dropped.

    Attributes:
        context: Tokens of a sample.
        num_documents: Documents read.
        num_short_documents: Documents shorter than the context, dropped whole.
        num_tokens: Tokens of all documents.
        num_samples: Samples made.
        longest_document: Tokens of the longest document.
        longest_name: Its name.
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
        """Tokens that are in some sample."""
        return self.num_samples * self.context

    @property
    def num_dropped_tokens(self) -> int:
        """Tokens that are in none."""
        return self.num_tokens - self.num_used_tokens

    def __str__(self) -> str:
        long = self.num_documents - self.num_short_documents
        return (
            f"{self.num_samples:,} samples of {self.context:,} tokens from {long:,} of {self.num_documents:,} "
            "documents: "
            f"{self.num_used_tokens:,} of {self.num_tokens:,} tokens used "
            f"({self.num_used_tokens / self.num_tokens:.1%}). "
            f"Dropped {self.num_dropped_tokens:,} tokens ({self.num_dropped_tokens / self.num_tokens:.1%}): "
            f"{self.num_short_documents:,} documents shorter than the context, and the ends of longer ones."
        )


@dataclass(frozen=True)
class Samples:
    """Samples of exactly `report.context` tokens.

    Attributes:
        pieces: One array of ids a sample, views into their documents.
        report: What was used and dropped.
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
    on_document: Callable[[int, int], None] | None = None,
) -> Samples:
    """Tokenise documents and cut each into samples.

    Args:
        documents: Documents, in order.
        encoder: The tokenizer.
        context: Tokens of a sample (global length).
        on_document: Told the number of documents and tokens so far, after each document.

    Returns:
        The samples, in document order.

    Raises:
        ValueError: There are no documents, or none is as long as the context.
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
            # Copied, so that the remainder of a long document does not stay in memory with its samples.
            kept = ids[: count * context].copy()
            pieces.extend(kept[i * context : (i + 1) * context] for i in range(count))
        if on_document is not None:
            on_document(num_documents, num_tokens)
    report = CutReport(context, num_documents, num_short, num_tokens, len(pieces), longest, longest_name)
    if num_documents == 0:
        raise ValueError("data.files: the corpus is empty: no file holds any text. Name files with text in data.files.")
    if not pieces:
        raise ValueError(
            f"context: {context:,} tokens is longer than every document of data.files ({num_documents:,} documents; "
            f"the longest, '{longest_name}', has {longest:,} tokens), and documents are never joined. Set context to "
            f"{longest} or less, or add longer documents."
        )
    return Samples(pieces, report)


@dataclass(frozen=True)
class SampleOrder:
    """Which sample comes at which place: a seeded shuffle, another one in each epoch.

    The order is a function of seed, number of samples and place alone, so batch size, accumulation and restarts do not
    change it.

    Attributes:
        num_samples: Samples in one epoch.
        seed: The recipe's seed.
    """

    num_samples: int
    seed: int

    def epoch(self, epoch: int) -> list[int]:
        """Return the order of one epoch (counted from 0): a permutation of all samples."""
        return [int(i) for i in np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)]

    def take(self, start: int, count: int) -> list[int]:
        """Return the samples at places `start` … `start + count - 1`, over as many epochs as that takes."""
        chosen: list[int] = []
        while len(chosen) < count:
            epoch, place = divmod(start + len(chosen), self.num_samples)
            chosen.extend(self.epoch(epoch)[place : place + count - len(chosen)])
        return chosen
