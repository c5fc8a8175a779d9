"""Attention of new tokens over what a cache holds and over themselves: what prefill and decoding run on.

The new tokens come chunk by chunk, each through all layers or through one, and in which order is known: so keys and
values that rest beyond the device are on their way, across layers, before they are asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trunkline.attention import block_call
from trunkline.attention.kernels import MAX_ELEMENTS, Kernel, resolve
from trunkline.attention.kv_spans import GatheredSpans, KVSpan
from trunkline.attention.kv_store import KVPair
from trunkline.attention.mask import MaskBlock, Range, RowMask
from trunkline.attention.online_softmax import OnlineSoftmax, joined_rows
from trunkline.attention.scoring import Scoring, with_sinks
from trunkline.chunking import Chunk, zigzag
from trunkline.engine.ranks import Ranks
from trunkline.kv_cache.segment import KVSegment
from trunkline.offload.chunked_sequence import ChunkedSequence, Reader, prefetch_more, read_next

_FEW = 64  # query rows up to which a kernel call is about reading keys: heads that share them go in it together

Later = tuple[int, tuple[ChunkedSequence, ...]]


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A stretch as one cache reads it.

    Attributes:
        stretch: keys and values.
        stop: place up to which they count.
        rows: of the stretch, which each row of the cache reads; None where they are the same.
    """

    stretch: KVSegment
    stop: int
    rows: tuple[int, ...] | None = None


class KVWriter(Protocol):
    """Where keys and values of the new tokens go."""

    def put(self, layer: int, chunk: Chunk, pair: KVPair) -> None:
        """Take those of a chunk."""
        ...

    def later(self, layer: int, first_key: int, chunk: Chunk) -> Iterator[Later]:
        """Chunks before one that `pieces` and `parts` take from a feed, in their order."""
        ...

    def pieces(
        self,
        layer: int,
        first_key: int,
        chunk: Chunk,
        pair: KVPair,
        feed: Iterator[KVPair],
        longest: int,
        *,
        joined: bool,
    ) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Those up to a chunk's own, with the place of the first; see `KVSegment.pieces`.

        Args:
            layer: whose.
            first_key: from which place on they are wanted.
            chunk: which.
            pair: its own.
            feed: gives those that are in no buffer.
            longest: most tokens in a piece.
            joined: a chunk's own may come with those before them.
        """
        ...

    def parts(
        self, layer: int, first_key: int, chunk: Chunk, feed: Iterator[KVPair]
    ) -> Iterator[tuple[Tensor, Tensor, Range]]:
        """Those before a chunk, chunk by chunk as this rank has them; see `KVSegment.parts`."""
        ...

    def let_go(self, layer: int, first_key: int) -> None:
        """Hold no longer what no key from a place on is in."""
        ...


class KVFeed:
    """Keys and values that rest beyond buffers, in an order given beforehand, the next on their way.

    Args:
        order: which chunk, and the sequences of keys and of values that it is in.
        prefetch: see `Reader`.
    """

    def __init__(self, order: Iterator[Later], prefetch: int | None = None) -> None:
        keys, values = itertools.tee(order)
        self._readers = (
            Reader(((sequences[0], index) for index, sequences in keys), prefetch=prefetch),
            Reader(((sequences[1], index) for index, sequences in values), prefetch=prefetch),
        )

    def __iter__(self) -> KVFeed:
        return self

    def __next__(self) -> KVPair:
        k, v = read_next(self._readers)
        return k, v

    def __enter__(self) -> KVFeed:
        """The first are sent for: what is on the device is met before them."""
        try:
            prefetch_more(self._readers)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing that was given is in use any longer, and nothing more is wanted."""
        for reader in self._readers:
            reader.cancel()


class CacheForward:
    """One forward of new tokens over a cache.

    Args:
        links: what the cache holds.
        writer: takes the new.
        offset: place of the first new token.
        chunks: this rank's rows of the new tokens' chunks, in their own numbering.
        sights: what tokens see, of each layer: for each row of the batch, or once for all.
        batch: rows.
        kernel: a kernel's name, or `auto`.
        ranks: that share the sequence.
        part: (rank, size) of those that hold parts of what was read before, where each has all of the new tokens: this
            one attends to its own part, and outputs are merged. Else these are gathered.
        by_chunk: a chunk goes through all layers before the next begins; else a layer has all chunks.
        prefetch: of keys and of values, on the device at a time; None for as many as of any store.
    """

    def __init__(
        self,
        links: Sequence[SegmentView],
        writer: KVWriter,
        *,
        offset: int,
        chunks: list[Chunk],
        sights: Sequence[Sequence[RowMask]],
        batch: int,
        kernel: str,
        ranks: Ranks,
        part: tuple[int, int],
        by_chunk: bool,
        prefetch: int | None,
    ) -> None:
        self.links, self.writer, self.offset, self.chunks, self.row_masks = links, writer, offset, chunks, sights
        self.batch, self.kernel, self.ranks, self.part = batch, kernel, ranks, part
        gather = ranks.kv_gather
        self.size, self.rank = (1, 0) if gather is None else (gather.size, gather.rank)
        layers = range(len(sights))
        order = [(i, chunk) for chunk in chunks for i in layers] if by_chunk else itertools.product(layers, chunks)
        self.feed = KVFeed((each for layer, chunk in order for each in self._later(layer, chunk)), prefetch)

    def core(self, layer: int) -> CachedCore:
        """The attention of a layer."""
        return CachedCore(self, layer)

    def first_key(self, layer: int, chunk: Chunk) -> int:
        """Place of the first key that any row of a chunk sees."""
        return min(each.first_key(self.start(chunk)) for each in self.row_masks[layer])

    def start(self, chunk: Chunk) -> int:
        """Place of the first token of a chunk, on whichever rank."""
        return self.offset + chunk.start * self.size

    def tokens(self, chunk: Chunk) -> Sequence[Range]:
        """Places of the rows that this rank has of a chunk."""
        start = self.start(chunk)
        return zigzag(Chunk(0, start, start + len(chunk) * self.size), self.rank, self.size).ranges

    def _later(self, layer: int, chunk: Chunk) -> Iterator[Later]:
        first = self.first_key(layer, chunk)
        for link in self.links:
            yield from link.stretch.later(layer, first, link.stop)
        yield from self.writer.later(layer, first, chunk)


class CachedCore:
    """Attention of one layer in one forward; chunks come in rising order.

    Args:
        extension: the forward.
        layer: which.
    """

    def __init__(self, extension: CacheForward, layer: int) -> None:
        self._extension, self._layer = extension, layer
        self._sight = extension.row_masks[layer]
        self._kernel: Kernel | None = None
        gather = extension.ranks.kv_gather
        self._gathered = None if gather is None else GatheredSpans(gather)
        # Of gathered pieces, by the place of their first token: where their tokens end, and whose rows they are.
        self._ends: dict[int, tuple[int, tuple[int, ...] | None]] = {}

    def forward(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Attention of one chunk, whose keys and values are kept.

        Args:
            chunk: which.
            q: its queries (B, H, C, D).
            k: its keys (B, K, C, D).
            v: its values.
            scoring: how scores become weights.

        Returns:
            The output (B, H, C, D) in the dtype of `q`.
        """
        extension, layer = self._extension, self._layer
        if self._kernel is None:
            self._kernel = resolve(
                k.device, k.dtype, k.shape[-1], v.shape[-1], extension.kernel, softcap=scoring.softcap
            )
        dtype = self._kernel.compute_dtype(k.dtype)
        own = k.to(dtype).contiguous(), v.to(dtype).contiguous()  # head by head: decoding reads them faster by half
        extension.writer.put(layer, chunk, own)
        # Each row of the batch by itself where rows see other keys, or read other rows of a shared stretch.
        whole = len(self._sight) == 1 and all(link.rows is None for link in extension.links)
        merged = [OnlineSoftmax(q.shape[2]) for _ in range(1 if whole else extension.batch)]
        for rows, keys, values, first in self._pieces(chunk, q, own):
            self._add(merged, rows, chunk, q.to(dtype), keys, values, first, scoring.scale, whole=whole)
        some = extension.part[1] > 1  # keys are other ranks', too
        for each in merged if some else ():
            if each.is_empty:
                each.add((0, 0), *_nothing(len(q) // len(merged), q, v, dtype))
        o, lse = extension.ranks.merge_attention(*joined_rows([each.result(some=some) for each in merged]))
        if scoring.sinks is not None:
            o, _ = with_sinks(o, lse, scoring.sinks)
        if chunk.index + 1 < len(extension.chunks):
            extension.writer.let_go(layer, extension.first_key(layer, extension.chunks[chunk.index + 1]))
        return o.to(q.dtype)

    # -- what queries meet ---------------------------------------------------------------------------------------------

    def _pieces(
        self, chunk: Chunk, q: Tensor, own: KVPair
    ) -> Iterator[tuple[tuple[int, ...] | None, Tensor, Tensor, int]]:
        """Rows of the batch that each row reads (None for the same), keys, values, and the place of the first key."""
        assert self._kernel is not None
        extension, layer = self._extension, self._layer
        if self._gathered is not None:
            yield from self._gathered_pieces(chunk, own)
            return
        first_key, longest = extension.first_key(layer, chunk), self._longest(q, len(chunk))
        for link in extension.links if extension.part[1] > 1 else ():
            for keys, values, place in link.stretch.parts(layer, first_key, link.stop, extension.feed):
                for at, first, last in _runs(place, keys.shape[2], *extension.part):
                    yield link.rows, keys[:, :, at : at + last - first], values[:, :, at : at + last - first], first
        if extension.part[0]:
            return  # the new tokens count once
        for link in extension.links if extension.part[1] == 1 else ():
            for keys, values, first in link.stretch.pieces(layer, first_key, link.stop, extension.feed, longest):
                yield link.rows, keys, values, first
        joined = self._kernel.bottom_right or len(chunk) == 1
        feed, writer = extension.feed, extension.writer
        for keys, values, first in writer.pieces(layer, first_key, chunk, own, feed, longest, joined=joined):
            yield None, keys, values, first

    def _gathered_pieces(
        self, chunk: Chunk, own: KVPair
    ) -> Iterator[tuple[tuple[int, ...] | None, Tensor, Tensor, int]]:
        """The same where ranks hold parts of keys and values: those of all ranks, chunk by chunk."""
        assert self._gathered is not None
        extension, layer = self._extension, self._layer
        ends = self._ends  # behind them is padding

        def earlier(chunk: Chunk) -> Iterator[KVSpan]:
            first_key = extension.first_key(layer, chunk)
            for link in extension.links:
                for keys, values, (first, stop) in link.stretch.parts(layer, first_key, link.stop, extension.feed):
                    ends[first] = stop, link.rows
                    yield KVSpan(keys, values, first)
            for keys, values, (first, stop) in extension.writer.parts(layer, first_key, chunk, extension.feed):
                ends[first] = stop, None
                yield KVSpan(keys, values, first)

        first = extension.start(chunk)
        ends[first] = first + len(chunk) * extension.size, None  # rows of padding see that of their own chunk
        following = extension.chunks[chunk.index + 1] if chunk.index + 1 < len(extension.chunks) else None
        for piece in self._gathered.of_chunk(chunk, KVSpan(*own, first), earlier, following):
            assert piece.first is not None
            stop, rows = ends[piece.first]
            count = stop - piece.first
            yield rows, piece.k[:, :, :count], piece.v[:, :, :count], piece.first

    def _longest(self, q: Tensor, count: int) -> int:
        """Most keys in a call."""
        limit = MAX_ELEMENTS // (q.shape[0] * q.shape[1] * (-(-q.shape[3] // 8) * 8)) - count
        if limit <= 0:
            raise ValueError(
                f"one chunk of {count:,} tokens has too many elements for a kernel (2^31): use a smaller chunk_size or "
                "a smaller batch."
            )
        return limit

    # -- kernel calls --------------------------------------------------------------------------------------------------

    def _add(
        self, merged: list[OnlineSoftmax], rows: tuple[int, ...] | None, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor,
        first: int, scale: float, *, whole: bool,
    ) -> None:  # fmt: skip
        """Attention over one piece.

        Args:
            merged: takes it, for each row of the batch, or for all at once.
            rows: see `_pieces`.
            chunk: whose queries they are.
            q: its queries.
            k: keys of the piece.
            v: its values.
            first: place of its first key.
            scale: of scores.
            whole: all rows see the same, of every piece.
        """
        assert self._kernel is not None
        tokens = self._extension.tokens(chunk)
        joined = self._kernel.bottom_right or len(chunk) == 1
        for number, sight in enumerate(self._sight):
            blocks = sight.blocks(tokens, (first, first + k.shape[2]), joined=joined)
            for block in blocks:
                if whole:
                    merged[0].add(block.rows, *self._call(block, q, k, v, first, scale))
                    continue
                if rows is None and len(self._sight) == 1:
                    o, lse = self._call(block, q, k, v, first, scale)
                    for row, each in enumerate(merged):
                        each.add(block.rows, o[row : row + 1], lse[row : row + 1])
                    continue
                for source, members in self._readers(number, rows, block).items():
                    given = q[members], k[source : source + 1], v[source : source + 1]
                    o, lse = self._call(block, *given, first, scale)
                    for at, row in enumerate(members):
                        merged[row].add(block.rows, o[at : at + 1], lse[at : at + 1])

    def _readers(self, number: int, rows: tuple[int, ...] | None, block: MaskBlock) -> dict[int, list[int]]:
        """Rows of the batch that one call is of, by the row that they read.

        Args:
            number: of the sight: theirs.
            rows: that each row of the batch reads; None for the same.
            block: of the call.
        """
        own = range(self._extension.batch) if len(self._sight) == 1 else [number]
        found: dict[int, list[int]] = {}
        for row in own:
            found.setdefault(row if rows is None else rows[row], []).append(row)
        return found

    def _call(
        self, block: MaskBlock, q: Tensor, k: Tensor, v: Tensor, first: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Queries (R, H, rows, D) over keys of as many rows, or of one row that all of them read."""
        kernel = self._kernel
        assert kernel is not None
        members, heads, _, dim = q.shape
        batch, num_kv_heads, count = len(k), k.shape[1], block.rows[1] - block.rows[0]
        if count == 1:  # the last row of any shape sees all keys of it
            block = block._replace(shape="full", fold=0)
        shared = members // batch
        if block.shape != "full" or (shared == 1 and (heads == num_kv_heads or count * heads > _FEW * num_kv_heads)):
            parts = [
                block_call.forward(kernel, block, x, k, v, first=first, scale=scale) for x in torch.split(q, batch)
            ]
            return joined_rows(parts)
        # Queries that share keys, of heads or of rows, are rows of one head: the keys are read once for all of them.
        few = q[:, :, block.rows[0] : block.rows[1]].reshape(batch, shared, num_kv_heads, -1, dim)
        few = few.transpose(1, 2).reshape(batch, num_kv_heads, -1, dim)
        at = slice(block.keys[0] - first, block.keys[1] - first)
        o, lse = kernel.forward(few, k[:, :, at], v[:, :, at], causal=False, scale=scale)
        apart = batch, num_kv_heads, shared, heads // num_kv_heads * count
        o = o.reshape(*apart, o.shape[-1]).transpose(1, 2).reshape(members, heads, count, -1)
        return o, lse.reshape(apart).transpose(1, 2).reshape(members, heads, count)


def _nothing(rows: int, q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of no queries, in the shapes of those that there are."""
    wide = torch.promote_types(dtype, torch.float32)
    heads = q.shape[1]
    return q.new_empty(rows, heads, 0, v.shape[-1], dtype=wide), q.new_empty(rows, heads, 0, dtype=wide)


def _runs(place: Range, count: int, rank: int, size: int) -> Iterator[tuple[int, int, int]]:
    """A rank's tokens of a chunk as runs: where among the rank's own, and (start, stop) in the sequence.

    Args:
        place: of the chunk's tokens in the sequence.
        count: tokens that the rank has of it, padding included.
        rank: which.
        size: of how many.
    """
    start, stop = place
    at = 0
    for first, last in zigzag(Chunk(0, start, start + count * size), rank, size).ranges:
        if first < stop:
            yield at, first, min(last, stop)
        at += last - first
