"""Filling a number of tokens exactly: whole sentences, the first of which loses what is too much."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from trunkline.evaluate.tasks.pieces import Pieces

_FIRST, _MOST = 64, 8192
# Blank pieces may have no tokens; a haystack where so many in a row have none has none at all.
_MOST_EMPTY = 10_000


def fill_with(pieces: Pieces, sentences: Iterator[str], num_tokens: int) -> list[list[int]]:
    """Take sentences until they make up a number of tokens exactly.

    Args:
        pieces: the tokenizer.
        sentences: without end.
        num_tokens: tokens to fill.

    Returns:
        The ids of each sentence, the first perhaps without its beginning.

    Raises:
        ValueError: the tokenizer gives no tokens for what is in the haystack.
    """
    filled: list[list[int]] = []
    total = num_seen = 0
    while total < num_tokens:
        # As many as will do, by what those before took. How many are tokenised at once changes nothing but time.
        count = min(_MOST, 1 + (num_tokens - total) * num_seen // total) if total else _FIRST
        num_seen += count
        for ids in pieces.encode_many(list(islice(sentences, count)), lines=True):
            if ids and total < num_tokens:
                filled.append(ids)
                total += len(ids)
        if not total and num_seen > _MOST_EMPTY:
            raise ValueError("haystack: its text has no tokens with this tokenizer. Give files with other text.")
    return cut_front(filled, total - num_tokens)


def cut_front(sentences: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Take tokens away at the beginning.

    Args:
        sentences: ids of sentences, in order.
        num_tokens: how many to take away; not more than there are.

    Returns:
        The sentences that are left, the first of them perhaps without its beginning.
    """
    first = 0
    while num_tokens and num_tokens >= len(sentences[first]):
        num_tokens -= len(sentences[first])
        first += 1
    kept = sentences[first:]
    if num_tokens:
        kept[0] = kept[0][num_tokens:]
    return kept
