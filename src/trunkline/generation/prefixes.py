"""Many texts that begin alike, each read once: a cache for every text, and their common beginnings held once.

Texts in lexicographic order are a walk through the tree of their beginnings. Where texts part, a cache stays until the
walk has left that branch, and others fork from it; so a cache never has to forget anything, which layers with windows
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

LEAST_SHARED = 256  # tokens: below, going through them again costs less than another call


class Prefixes:
    """Texts in the order in which their common beginnings need to be read once only.

    Attributes:
        order: indices of the texts, in that order.
        shared: tokens that each text in this order has in common with the next; one fewer than there are texts.
    """

    def __init__(self, texts: Sequence[Tokens]) -> None:
        """Sort texts.

        Args:
            texts: each (n,), n >= 1, no two alike.
        """
        self._texts = texts
        compared = functools.cmp_to_key(_compared)
        self.order = sorted(range(len(texts)), key=lambda index: compared(texts[index]))
        pairs = zip(self.order, self.order[1:], strict=False)
        self.shared = [common_length(texts[a], texts[b]) for a, b in pairs]

    def sharing(self, least: int = LEAST_SHARED) -> set[int]:
        """Indices of texts that have so many tokens in common with another."""
        found: set[int] = set()
        for place, count in enumerate(self.shared):
            if count >= least:
                found |= {self.order[place], self.order[place + 1]}
        return found

    def read(self, model: nn.Module, least: int = LEAST_SHARED) -> Iterator[tuple[int, StreamedCache]]:
        """Read all texts.

        Args:
            model: streamed, in evaluation mode.
            least: tokens; shorter common beginnings are read again.

        Yields:
            Index of a text, and its cache, whose `logits` are those behind the text. Others may go on from it: to go on
            with something else, fork it.

        Raises:
            ValueError: keys and values do not fit in the budgets.
        """
        held: list[StreamedCache] = []  # of beginnings, each a beginning of the next
        for place, index in enumerate(self.order):
            text = self._texts[index]
            while held and held[-1].length > (self.shared[place - 1] if place else 0):
                held.pop()
            for stop in self._partings(place, held[-1].length if held else 0, least):
                held.append(_gone_on(model, held, text[:stop]))
            yield index, held[-1] if held and held[-1].length == len(text) else _gone_on(model, held, text)

    def _partings(self, place: int, begin: int, least: int) -> list[int]:
        """Where later texts leave this one, from front to back, each so many tokens behind the last."""
        found, reach = [], len(self._texts[self.order[place]])
        for count in self.shared[place:]:
            reach = min(reach, count)
            if reach < begin + least:
                break
            found.append(reach)
        kept: list[int] = []
        for stop in sorted(set(found)):
            if stop >= (kept[-1] if kept else begin) + least:
                kept.append(stop)
        return kept


def common_length(a: Tokens, b: Tokens) -> int:
    """Tokens that two texts have in common from their beginning."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    first = int(differs.argmax()) if count else 0
    return first if count and differs[first] else count


def _compared(a: Tokens, b: Tokens) -> int:
    at = common_length(a, b)
    if at == min(len(a), len(b)):
        return len(a) - len(b)
    return int(a[at]) - int(b[at])


def _gone_on(model: nn.Module, held: list[StreamedCache], text: Tokens) -> StreamedCache:
    """The cache of a text, from that of a beginning of it."""
    cache = held[-1].fork() if held else None
    new = text[cache.length if cache is not None else 0 :].astype(np.int64)
    device = next(model.parameters()).device
    return prefill(model, torch.from_numpy(new)[None].to(device), cache=cache)
