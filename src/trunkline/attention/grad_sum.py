"""Gradients that come in parts: of some rows, or of some keys."""

from __future__ import annotations

import torch
from torch import Tensor


class GradSum:
    """A gradient (B, heads, T, D) summed from its parts.

    Args:
        like: a tensor of its shape and device.
        dtype: its own.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like = like
        self._dtype = dtype
        self._x: Tensor | None = None

    def add(self, part: Tensor, row: int | None, start: int, stop: int) -> None:
        """Add a part.

        Args:
            part: (B, heads, stop - start, D), or (1, …) of one row of the batch; overwritten if it is the first and
                the whole.
            row: that row; None for all.
            start: where it begins among the T.
            stop: where it ends.
        """
        whole = row is None and (start, stop) == (0, self._like.shape[2])
        if self._x is None:
            if whole:
                self._x = part.to(self._dtype)
                return
            self._x = torch.zeros_like(self._like, dtype=self._dtype, memory_format=torch.contiguous_format)
        x = self._x if row is None else self._x[row : row + 1]
        (x if whole else x[:, :, start:stop]).add_(part)

    @property
    def value(self) -> Tensor:
        """The sum; zeros if nothing was added."""
        if self._x is None:
            self._x = torch.zeros_like(self._like, dtype=self._dtype, memory_format=torch.contiguous_format)
        return self._x
