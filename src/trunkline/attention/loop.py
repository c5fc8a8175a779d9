"""The attention loop: queries of one chunk over spans of keys and values, forward and backward.

Training (`trunkline.attention.core`) and caches (`trunkline.kv_cache.cached_attention`) both run this loop. It takes
spans as they come from their source, cuts each into blocks by the row masks, makes one kernel call a block and merges
the outputs by online softmax. Sources decide the order of spans; the loop never reorders them, so that results are the
same bits whatever tier the keys come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from trunkline.attention.kernel_base import Kernel
from trunkline.attention.kv_spans import KVSpan
from trunkline.attention.kv_store import KVPair
from trunkline.attention.mask import MaskBlock, Range, RowMask
from trunkline.attention.online_softmax import OnlineSoftmax, cat_rows
from trunkline.attention.scoring import Scoring, with_sinks

MergeRanks = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_FEW = 64  # query rows up to which a kernel call is bound by reading keys: heads that share keys go in it together


class GradSum:
    """Sum of the parts of a gradient (B, heads, T, D), each of some batch rows and tokens.

    Args:
        like: a tensor of the gradient's shape and device.
        dtype: of the sum; fp32 or wider, since bf16 sums lose precision with every part.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like = like
        self._dtype = dtype
        self._x: Tensor | None = None

    def add(self, part: Tensor, row: int | None, start: int, stop: int) -> None:
        """Add a part.

        Args:
            part: (B, heads, stop - start, D), or (1, …) of one row of the batch. If it is the first part and covers
                all, it becomes the sum itself: the caller must not use it afterwards.
            row: the row of the batch; None for all.
            start: first token.
            stop: token after the last.
        """
        covers_all = row is None and (start, stop) == (0, self._like.shape[2])
        if self._x is None:
            if covers_all:
                self._x = part.to(self._dtype)
                return
            self._x = torch.zeros_like(self._like, dtype=self._dtype, memory_format=torch.contiguous_format)
        x = self._x if row is None else self._x[row : row + 1]
        (x if covers_all else x[:, :, start:stop]).add_(part)

    @property
    def value(self) -> Tensor:
        """The sum; zeros if nothing was added."""
        if self._x is None:
            self._x = torch.zeros_like(self._like, dtype=self._dtype, memory_format=torch.contiguous_format)
        return self._x


def attend_spans(
    q: Tensor,
    spans: Iterable[KVSpan],
    kernel: Kernel,
    queries: Sequence[Range],
    row_masks: Sequence[RowMask],
    *,
    scoring: Scoring,
    by_row: bool = False,
    pack_queries: bool = False,
    merge_ranks: MergeRanks | None = None,
    value_dim: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attend to spans of keys and values.

    Args:
        q: queries (B, H, C, D) of one chunk, in the kernel's dtype.
        spans: keys and values, of disjoint tokens.
        kernel: computes each block.
        queries: position ranges of the C query rows.
        row_masks: mask of each row of the batch, or one for all rows.
        scoring: scale of the scores, and sinks; the soft cap is the kernel's own.
        by_row: merge each row of the batch by itself; needed where spans have `rows`.
        pack_queries: let query heads (or rows) that share keys become rows of one kernel call, as decoding wants it.
        merge_ranks: merges output and log-sum-exp with those of other ranks, which hold other keys; rows may then see
            no key here.
        value_dim: head dim of values; needed with `merge_ranks`.

    Returns:
        Output (B, H, C, D), fp32 or wider unless one call computed it all, and log-sum-exp (B, H, C), fp32 or wider.
        Both include the sinks.
    """
    batch, _, count, _ = q.shape
    by_row = by_row or len(row_masks) > 1
    merged = [OnlineSoftmax(count) for _ in range(batch if by_row else 1)]
    bottom_right = kernel.bottom_right or (pack_queries and count == 1)  # one row has no triangle to align
    for span in spans:
        for rows, source, block in _calls(span, queries, row_masks, batch, bottom_right=bottom_right):
            given = _take(q, rows), _take(span.k, source), _take(span.v, source)
            if pack_queries:
                o, lse = _packed_block(kernel, block, *given, first=span.first or 0, scale=scoring.scale)
            else:
                # Not bound to a name: copies of a block are freed before the next block's are made.
                o, lse = kernel.forward(
                    *_operands(block, *given, first=span.first or 0), causal=block.shape != "full", scale=scoring.scale
                )
                o, lse = _untile(o, block), _untile(lse, block)
            if not by_row:
                merged[0].add(block.rows, o, lse)
                continue
            for i, row in enumerate(range(batch) if rows is None else rows):
                merged[row].add(block.rows, o[i : i + 1], lse[i : i + 1])
    if merge_ranks is not None:
        for x in merged:
            if x.is_empty:  # no span on this rank has a key of these rows: they still take part in the merge
                x.add((0, 0), *_no_rows(batch // len(merged), q, value_dim))
    o, lse = cat_rows([x.result(allow_unseen=merge_ranks is not None) for x in merged])
    if merge_ranks is not None:
        o, lse = merge_ranks(o, lse)
    return (o, lse) if scoring.sinks is None else with_sinks(o, lse, scoring.sinks)


def differentiate_spans(
    do: Tensor,
    q: Tensor,
    o: Tensor,
    lse: Tensor,
    spans: Iterable[KVSpan],
    kernel: Kernel,
    *,
    queries: Sequence[Range],
    row_masks: Sequence[RowMask],
    scale: float,
    dq: GradSum,
) -> Iterator[tuple[KVSpan, KVPair]]:
    """Yield each span with the gradients of its keys and values, fp32 or wider; add those of the queries to `dq`.

    They are the shares of these queries only. Each span is computed when it is asked for.

    Args:
        do: gradient of the output (B, H, C, D), in the kernel's dtype.
        q: queries.
        o: output over all spans, in the kernel's dtype.
        lse: its log-sum-exp (B, H, C), fp32 or wider, sinks included.
        spans: as for `attend_spans`, without `rows`.
        kernel: differentiates each block.
        queries: position ranges of the C query rows.
        row_masks: mask of each row of the batch, or one for all rows.
        scale: factor of the scores.
        dq: sum of the gradients of `q`; complete once all spans have been yielded.
    """
    for span in spans:
        # In fp32 whatever the kernel's dtype: a span may be in several blocks, whose gradients add up.
        dk, dv = GradSum(span.k, lse.dtype), GradSum(span.v, lse.dtype)
        first = span.first or 0
        for rows, _, block in _calls(span, queries, row_masks, len(q), bottom_right=kernel.bottom_right):
            given = [_take(x, rows) for x in (do, q, span.k, span.v, o, lse)]
            parts = backward_block(kernel, block, *given, first=first, scale=scale)
            keys = block.keys[0] - first, block.keys[1] - first
            for total, part, at in zip((dq, dk, dv), parts, (block.rows, keys, keys), strict=True):
                total.add(part, None if rows is None else rows[0], *at)
        yield span, (dk.value, dv.value)


def _calls(
    span: KVSpan, queries: Sequence[Range], row_masks: Sequence[RowMask], batch: int, *, bottom_right: bool
) -> Iterator[tuple[list[int] | None, list[int] | None, MaskBlock]]:
    """Yield the kernel calls of a span: rows of the queries, the row of the keys that they read, and the block.

    Rows are None where one call takes the whole batch. Otherwise one call takes the rows that read the same keys.
    """
    if span.first is None:  # every row sees every key
        yield None, None, MaskBlock((0, sum(stop - start for start, stop in queries)), (0, span.k.shape[2]))
        return
    keys = span.first, span.first + span.k.shape[2]
    for number, mask in enumerate(row_masks):
        readers: dict[int, list[int]] = {}
        if len(row_masks) > 1 or span.rows is not None:
            for row in range(batch) if len(row_masks) == 1 else [number]:
                readers.setdefault(row if span.rows is None else span.rows[row], []).append(row)
        for block in mask.blocks(queries, keys, bottom_right=bottom_right):
            if not readers:
                yield None, None, block
            for source, rows in readers.items():
                yield rows, [source], block


def _take(x: Tensor, rows: list[int] | None) -> Tensor:
    """Return rows of a batch: a view of one row, a copy of several; None for all."""
    if rows is None:
        return x
    return x[rows[0] : rows[0] + 1] if len(rows) == 1 else x[rows]


def _no_rows(batch: int, q: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of no query rows, which give a merge its shapes and dtype."""
    wide = torch.promote_types(q.dtype, torch.float32)
    shape = batch, q.shape[1], 0
    return q.new_empty(*shape, value_dim, dtype=wide), q.new_empty(shape, dtype=wide)


# -- one kernel call ---------------------------------------------------------------------------------------------------


def _operands(block: MaskBlock, q: Tensor, k: Tensor, v: Tensor, *, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut queries, keys and values to a block, as a kernel takes them.

    Args:
        block: rows and keys.
        q: queries (B, H, C, D), of all rows of the chunk.
        k: keys (B, K, T, D) of a span, among them the block's.
        v: values of the span.
        first: position of the span's first key.
    """
    return _rows(q, block), _keys(k, block, first), _keys(v, block, first)


def backward_block(
    kernel: Kernel, block: MaskBlock, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *,
    first: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of a block's queries, keys and values; `o` and `lse` are over all keys of the rows."""
    dq, dk, dv = kernel.backward(
        _rows(do, block), _rows(q, block), _keys(k, block, first), _keys(v, block, first), _rows(o, block),
        _rows(lse, block), causal=block.shape != "full", scale=scale,
    )  # fmt: skip
    return _untile(dq, block), _untile(dk, block), _untile(dv, block)


def _packed_block(
    kernel: Kernel, block: MaskBlock, q: Tensor, k: Tensor, v: Tensor, *, first: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to the keys of a block; queries (R, H, rows, D) may share keys of fewer rows, or of one row.

    Few queries that share keys, of several heads or of several rows, become rows of one head: the keys are read once
    for all of them.
    """
    num_rows, heads, _, dim = q.shape
    batch, num_kv_heads, count = len(k), k.shape[1], block.rows[1] - block.rows[0]
    if count == 1:  # the last row of any shape sees all its keys
        block = block._replace(shape="full", tile=0)
    shared = num_rows // batch
    if block.shape != "full" or (shared == 1 and (heads == num_kv_heads or count * heads > _FEW * num_kv_heads)):
        operands = [_operands(block, x, k, v, first=first) for x in torch.split(q, batch)]
        parts = [kernel.forward(*each, causal=block.shape != "full", scale=scale) for each in operands]
        return cat_rows([(_untile(o, block), _untile(lse, block)) for o, lse in parts])
    few = q[:, :, block.rows[0] : block.rows[1]].reshape(batch, shared, num_kv_heads, -1, dim)
    few = few.transpose(1, 2).reshape(batch, num_kv_heads, -1, dim)
    at = slice(block.keys[0] - first, block.keys[1] - first)
    o, lse = kernel.forward(few, k[:, :, at], v[:, :, at], causal=False, scale=scale)
    apart = batch, num_kv_heads, shared, heads // num_kv_heads * count
    o = o.reshape(*apart, o.shape[-1]).transpose(1, 2).reshape(num_rows, heads, count, -1)
    return o, lse.reshape(apart).transpose(1, 2).reshape(num_rows, heads, count)


def _rows(x: Tensor, block: MaskBlock) -> Tensor:
    return _tile(x, block, block.rows)


def _keys(x: Tensor, block: MaskBlock, first: int) -> Tensor:
    return _tile(x, block, (block.keys[0] - first, block.keys[1] - first))


def _tile(x: Tensor, block: MaskBlock, at: Range) -> Tensor:
    """Cut (B, heads, T, …) to a range and fold its tiles into the batch: (B * tiles, heads, tile, …).

    No kernel has an `upper` triangle. Attention does not depend on the order of keys, so that an upper triangle is a
    causal one with both rows and keys reversed.
    """
    start, stop = at
    x = x if (start, stop) == (0, x.shape[2]) else x[:, :, start:stop]
    if block.tile:
        batch, heads, length, *rest = x.shape
        x = x.reshape(batch, heads, length // block.tile, block.tile, *rest).transpose(1, 2)
        x = x.reshape(-1, heads, block.tile, *rest)
    return x.flip(2) if block.shape == "upper" else x


def _untile(x: Tensor, block: MaskBlock) -> Tensor:
    """Undo `_tile` on what a kernel returns: (B * tiles, heads, tile, …) to (B, heads, rows, …)."""
    x = x.flip(2) if block.shape == "upper" else x
    if not block.tile:
        return x
    _, heads, tile, *rest = x.shape
    count = (block.rows[1] - block.rows[0]) // tile
    return x.reshape(-1, count, heads, tile, *rest).transpose(1, 2).reshape(-1, heads, count * tile, *rest)
