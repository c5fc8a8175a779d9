"""Prefix sharing: a cache for each of many texts, whose common prefixes are read and held once.

Texts in lexicographic order are a walk through the tree of their prefixes. Where texts diverge, a cache stays until the
walk has left that branch, and others fork from it. So no cache is ever cropped, which layers with sliding windows
could not always do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from trunkline.data.tokenizers import Tokens
from trunkline.generation.prefill import prefill
from trunkline.kv_cache.cache import StreamedCache

MIN_SHARED = 256  # tokens: reading a shorter prefix again costs less than another call


class Prefixes:
    """Texts in lexicographic order.

    Attributes:
        order: indices of the texts, in that order.
        shared: length of the prefix that each text in this order shares with the next; one entry fewer than texts.
    """

    def __init__(self, texts: Sequence[Tokens]) -> None:
        """Sort texts.

        Args:
            texts: each (n,), n >= 1, no two alike.
        """
        self._texts = texts
        key = functools.cmp_to_key(_compare)
        self.order = sorted(range(len(texts)), key=lambda index: key(texts[index]))
        pairs = zip(self.order, self.order[1:], strict=False)
        self.shared = [common_length(texts[a], texts[b]) for a, b in pairs]

    def sharing(self, least: int = MIN_SHARED) -> set[int]:
        """Return the indices of texts that share a prefix of at least `least` tokens with another."""
        indices: set[int] = set()
        for place, count in enumerate(self.shared):
            if count >= least:
                indices |= {self.order[place], self.order[place + 1]}
        return indices

    def read(self, model: nn.Module, least: int = MIN_SHARED) -> Iterator[tuple[int, StreamedCache]]:
        """Read all texts, in lexicographic order.

        Args:
            model: streamed, in evaluation mode.
            least: shorter common prefixes, in tokens, are read again.

        Yields:
            Index of a text, and its cache, whose `logits` are of its last token. Later texts may continue the cache:
            fork it to continue it with something else.

        Raises:
            ValueError: keys and values do not fit in the budgets.
        """
        held: list[StreamedCache] = []  # of prefixes, each a prefix of the next
        for place, index in enumerate(self.order):
            text = self._texts[index]
            while held and held[-1].length > (self.shared[place - 1] if place else 0):
                held.pop()
            for stop in self._branch_points(place, held[-1].length if held else 0, least):
                held.append(_continue(model, held, text[:stop]))
            yield index, held[-1] if held and held[-1].length == len(text) else _continue(model, held, text)

    def _branch_points(self, place: int, begin: int, least: int) -> list[int]:
        """Return the lengths at which later texts leave this one, ascending, at least `least` tokens apart."""
        lengths, shared = [], len(self._texts[self.order[place]])
        for count in self.shared[place:]:
            shared = min(shared, count)
            if shared < begin + least:
                break
            lengths.append(shared)
        kept: list[int] = []
        for stop in sorted(set(lengths)):
            if stop >= (kept[-1] if kept else begin) + least:
                kept.append(stop)
        return kept


def common_length(a: Tokens, b: Tokens) -> int:
    """Return the length of the common prefix of two texts."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    first = int(differs.argmax()) if count else 0
    return first if count and differs[first] else count


def _compare(a: Tokens, b: Tokens) -> int:
    """Return a negative number, 0 or a positive number, as the first text comes before, with or after the second."""
    at = common_length(a, b)
    if at == min(len(a), len(b)):
        return len(a) - len(b)
    return int(a[at]) - int(b[at])


def _continue(model: nn.Module, held: list[StreamedCache], text: Tokens) -> StreamedCache:
    """Return the cache of a text, continued from the longest held prefix."""
    cache = held[-1].fork() if held else None
    new = text[cache.length if cache is not None else 0 :].astype(np.int64)
    device = next(model.parameters()).device
    return prefill(model, torch.from_numpy(new)[None].to(device), cache=cache)
