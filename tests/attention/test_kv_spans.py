"""Gathered spans: keys and values that are sharded over ranks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from trunkline.attention.kv_spans import GatheredSpans, KVSpan
from trunkline.chunking import Chunk, split

PART = 4


class Gather:
    """Gather of two ranks, of which the other holds zeros; tracks which gathered tensors are alive."""

    size, rank = 2, 1

    def __init__(self) -> None:
        self.sent: list[weakref.ref[Tensor]] = []

    def gather(self, k: Tensor, v: Tensor) -> Pending:
        pair = torch.cat([torch.zeros_like(k), k], 2), torch.cat([torch.zeros_like(v), v], 2)
        self.sent.append(weakref.ref(pair[0]))
        return Pending(pair)

    def scatter(self, dk: Tensor, dv: Tensor) -> Pending:
        raise NotImplementedError

    @property
    def alive(self) -> int:
        gc.collect()
        return sum(each() is not None for each in self.sent)


class Pending:
    def __init__(self, pair: tuple[Tensor, Tensor]) -> None:
        self.pair = pair

    def wait(self) -> tuple[Tensor, Tensor]:
        return self.pair


def test_at_most_two_gathered_spans_are_alive() -> None:
    """Within a chunk and across chunks; and every key is in a span."""
    chunks, gather = split(4 * PART, PART), Gather()
    keys = torch.arange(4.0 * PART).reshape(1, 1, -1, 1)
    gathered = GatheredSpans(gather)

    def span(start: int, stop: int, first: int | None) -> KVSpan:
        k = keys[:, :, start:stop]
        return KVSpan(k, k, first, resident=(start, stop))

    def earlier(chunk: Chunk) -> Iterator[KVSpan]:
        return (span(start, start + PART, None) for start in range(0, chunk.start, PART))

    for chunk in chunks:
        seen: set[float] = set()
        most = 0
        own = span(chunk.start, chunk.stop, 2 * chunk.start)
        following = chunks[chunk.index + 1] if chunk.index < 3 else None
        for gathered_span in gathered.of_chunk(chunk, own, earlier, following):
            most = max(most, gather.alive)
            seen |= set(gathered_span.k.flatten().tolist())
            del gathered_span
        assert seen == set(range(chunk.stop))
        assert most <= 2
    assert len(gather.sent) == 1 + 2 + 3 + 4
    assert gather.alive == 0


def test_gathered_keys_of_a_chunk_are_in_the_order_of_the_sequence() -> None:
    """This rank has the second and third slice of the chunk, the other (all zeros) the first and the last."""
    k = torch.arange(1.0, 1 + PART).reshape(1, 1, -1, 1)
    own = KVSpan(k, k, 0, resident=(0, PART))
    (piece,) = GatheredSpans(Gather()).of_chunk(Chunk(0, 0, PART), own, lambda chunk: iter(()), None)
    assert piece.k.flatten().tolist() == [0, 0, 1, 2, 3, 4, 0, 0]
