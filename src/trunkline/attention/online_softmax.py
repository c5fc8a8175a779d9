"""Merging partial attentions over disjoint sets of keys (online softmax; Milakov and Gimelshein, arXiv 1805.02867)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def merge_(o_BHCD: Tensor, lse_BHC: Tensor, other_BHCD: Tensor, other_lse_BHC: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention of the same queries over two disjoint sets of keys, into the first.

    With w = sigmoid(other_lse - lse) the merged output is o + w (other - o), and the merged log-sum-exp is
    lse - logsigmoid(lse - other_lse). Neither overflows at any gap, unlike log(1 + exp(gap)).

    Args:
        o_BHCD: output over the first set, fp32 or fp64; overwritten with the merged output.
        lse_BHC: its log-sum-exp of the scaled scores, natural logarithm, same dtype.
        other_BHCD: output over the second set; any floating dtype.
        other_lse_BHC: its log-sum-exp.

    Returns:
        The merged output (`o_BHCD` itself) and the merged log-sum-exp. Every query must have a key in each set.
    """
    assert o_BHCD.dtype in (torch.float32, torch.float64), "partial attentions are merged in fp32 or wider"
    gap_BHC = other_lse_BHC - lse_BHC
    o_BHCD.lerp_(other_BHCD.to(o_BHCD.dtype), torch.sigmoid(gap_BHC)[..., None])
    return o_BHCD, lse_BHC - F.logsigmoid(-gap_BHC)


class OnlineSoftmax:
    """Attention of query rows, from kernel calls over disjoint keys, each of which may be of some of the rows.

    Args:
        rows: how many there are; each must come up at least once.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._o: Tensor | None = None
        self._lse: Tensor | None = None
        self._met: list[tuple[int, int]] = []  # rows that have come up, in order

    def add(self, rows: tuple[int, int], o: Tensor, lse: Tensor) -> None:
        """Merge a call.

        Args:
            rows: (start, stop) of those that it is of.
            o: output (B, H, rows, D); overwritten where it is the first of all.
            lse: log-sum-exp (B, H, rows), fp32 or wider.
        """
        whole = [(0, self._rows)]
        if self._o is None or self._lse is None:
            if [rows] == whole:
                self._o, self._lse, self._met = o, lse, whole
                return
            self._o = o.new_empty(*o.shape[:2], self._rows, o.shape[3], dtype=lse.dtype)
            self._lse = lse.new_empty(*lse.shape[:2], self._rows)
        self._o = self._o.to(self._lse.dtype)
        if [rows] == whole == self._met:
            self._o, self._lse = merge_(self._o, self._lse, o, lse)
            return
        first = rows[0]
        for start, end, known in list(self._cut(*rows)):
            at, within = slice(start, end), slice(start - first, end - first)
            if known:
                _, self._lse[:, :, at] = merge_(
                    self._o[:, :, at], self._lse[:, :, at], o[:, :, within], lse[:, :, within]
                )
            else:
                self._o[:, :, at] = o[:, :, within]
                self._lse[:, :, at] = lse[:, :, within]
                self._met = _united([*self._met, (start, end)])

    @property
    def is_empty(self) -> bool:
        """Whether no row has come up."""
        return not self._met

    def result(self, *, some: bool = False) -> tuple[Tensor, Tensor]:
        """Output (B, H, rows, D), and log-sum-exp (B, H, rows).

        Args:
            some: rows may have met no keys, which others hold: their output is 0, and their log-sum-exp -inf.
        """
        assert self._o is not None
        assert self._lse is not None
        met = [(0, 0), *self._met, (self._rows, self._rows)]
        for (_, start), (stop, _) in pairwise(met):
            if start < stop:
                assert some, "a row has met no keys"
                self._o[:, :, start:stop] = 0
                self._lse[:, :, start:stop] = -torch.inf
        return self._o, self._lse

    def _cut(self, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        """Rows in pieces (start, stop, whether they have come up before)."""
        for first, end in self._met:
            if first >= stop:
                break
            if end > start:
                if first > start:
                    yield start, first, False
                yield max(start, first), min(end, stop), True
                start = min(end, stop)
        if start < stop:
            yield start, stop, False


def joined_rows(results: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of each row of a batch as those of the batch."""
    if len(results) == 1:
        return results[0]
    return torch.cat([o for o, _ in results]), torch.cat([lse for _, lse in results])


def _united(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint ranges in order, neighbours made one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found
