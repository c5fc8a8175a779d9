"""Online softmax: merges partial attentions over disjoint sets of keys (Milakov and Gimelshein, arXiv 1805.02867)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from trunkline.attention.mask import Range


def merge_(o_BHCD: Tensor, lse_BHC: Tensor, other_BHCD: Tensor, other_lse_BHC: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention of the same queries over two disjoint sets of keys, into the first.

    With w = sigmoid(other_lse - lse) the merged output is o + w (other - o), and the merged log-sum-exp is
    lse - logsigmoid(lse - other_lse). Neither overflows at any gap, unlike log(1 + exp(gap)).

    Args:
        o_BHCD: output over the first set, fp32 or fp64; overwritten with the merged output.
        lse_BHC: its log-sum-exp of the scaled scores, natural logarithm, same dtype. It is finite: every query has a
            key in the first set.
        other_BHCD: output over the second set; any floating dtype, finite.
        other_lse_BHC: its log-sum-exp; -inf for a query without a key in the second set.

    Returns:
        The merged output (`o_BHCD` itself), and the merged log-sum-exp as a new tensor.
    """
    assert o_BHCD.dtype in (torch.float32, torch.float64), "partial attentions are merged in fp32 or wider"
    gap_BHC = other_lse_BHC - lse_BHC
    o_BHCD.lerp_(other_BHCD.to(o_BHCD.dtype), torch.sigmoid(gap_BHC)[..., None])
    return o_BHCD, lse_BHC - F.logsigmoid(-gap_BHC)


class OnlineSoftmax:
    """Attention of query rows, merged from kernel calls over disjoint keys; a call may be of some of the rows.

    Parts are merged in the order in which they are added: floating-point merges in another order give other bits.

    Args:
        num_rows: number of query rows. Each must be in one call at least, unless `result` allows unseen rows.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._o: Tensor | None = None
        self._lse: Tensor | None = None
        self._seen: list[Range] = []  # rows that were in a call, in order

    def add(self, rows: Range, o: Tensor, lse: Tensor) -> None:
        """Merge the result of a kernel call.

        Args:
            rows: (start, stop) of the query rows of the call.
            o: output (B, H, rows, D). If it is the first part and of all rows, it is kept, and overwritten by merges.
            lse: log-sum-exp (B, H, rows), fp32 or wider; kept and overwritten likewise.
        """
        all_rows = [(0, self._num_rows)]
        if self._o is None or self._lse is None:
            if [rows] == all_rows:
                self._o, self._lse, self._seen = o, lse, all_rows
                return
            self._o = o.new_empty(*o.shape[:2], self._num_rows, o.shape[3], dtype=lse.dtype)
            self._lse = lse.new_empty(*lse.shape[:2], self._num_rows)
        # A single call stays in the kernel's dtype; the accumulator of a merge is fp32.
        self._o = self._o.to(self._lse.dtype)
        if [rows] == all_rows == self._seen:
            self._o, self._lse = merge_(self._o, self._lse, o, lse)
            return
        first = rows[0]
        for start, end, was_seen in list(self._cut(*rows)):
            at, within = slice(start, end), slice(start - first, end - first)
            if was_seen:
                _, self._lse[:, :, at] = merge_(
                    self._o[:, :, at], self._lse[:, :, at], o[:, :, within], lse[:, :, within]
                )
            else:
                self._o[:, :, at] = o[:, :, within]
                self._lse[:, :, at] = lse[:, :, within]
                self._seen = _union([*self._seen, (start, end)])

    @property
    def is_empty(self) -> bool:
        """True until a row has been in a call."""
        return not self._seen

    def result(self, *, allow_unseen: bool = False) -> tuple[Tensor, Tensor]:
        """Return the output (B, H, rows, D) and log-sum-exp (B, H, rows, fp32 or wider).

        The output of a single call is in the kernel's dtype, that of a merge in the dtype of the log-sum-exp.

        Args:
            allow_unseen: rows may have been in no call, because other ranks hold their keys: their output is 0, and
                their log-sum-exp -inf.
        """
        assert self._o is not None
        assert self._lse is not None
        bounds = [(0, 0), *self._seen, (self._num_rows, self._num_rows)]
        for (_, start), (stop, _) in pairwise(bounds):
            if start < stop:
                # Kernels disagree on a row without keys (lse 0, +inf or -inf): it must never reach one.
                assert allow_unseen, "a query row has no keys"
                self._o[:, :, start:stop] = 0
                self._lse[:, :, start:stop] = -torch.inf
        return self._o, self._lse

    def _cut(self, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        """Yield rows as ranges (start, stop, True if they were in a call before)."""
        for first, end in self._seen:
            if first >= stop:
                break
            if end > start:
                if first > start:
                    yield start, first, False
                yield max(start, first), min(end, stop), True
                start = min(end, stop)
        if start < stop:
            yield start, stop, False


def cat_rows(results: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate outputs and log-sum-exps along the batch; one result is returned as it is."""
    if len(results) == 1:
        return results[0]
    return torch.cat([o for o, _ in results]), torch.cat([lse for _, lse in results])


def _union(ranges: list[Range]) -> list[Range]:
    """Sort disjoint ranges and join neighbours."""
    joined: list[Range] = []
    for start, stop in sorted(ranges):
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined
