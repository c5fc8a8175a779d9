"""Methods of transformers' `Cache` whose answers do not depend on the tokens that a streamed cache holds."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class HFCacheInterface(Cache, abc.ABC):  # type: ignore[misc]
    """A transformers cache without layers of its own.

    Args:
        num_layers: decoder layers.

    Attributes:
        length: tokens of a row, padding included.
    """

    # Never compiled: keys and values are not tensors of one shape.
    is_compileable = False
    # `crop` refuses the case in which it cannot: a window has dropped keys that would be needed again.
    is_croppable = True

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[])
        self.length = 0
        self._batch = 0
        self._num_layers = num_layers

    @abc.abstractmethod
    def select_rows(self, rows: Sequence[int]) -> None:
        """Replace the batch by copies of the rows with these numbers; a row may occur several times.

        Raises:
            ValueError: the device has no room for so many rows. Nothing has changed then.
        """

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens of a row, padding included."""
        return self.length

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys that new tokens attend to, and the position of the first."""
        return self.length + int(query_length), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier transformers

    def __len__(self) -> int:
        return self._num_layers

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first forward."""
        return self._batch or -1

    @property
    def max_batch_size(self) -> int:
        """Rows; 0 before the first forward."""
        return self._batch

    @property
    def is_initialized(self) -> bool:
        """True if it holds tokens."""
        return self.length > 0

    # transformers must make no window masks, since Trunkline makes its own; every layer has keys and values.
    is_sliding = is_linear = is_dummy = property(lambda self: [False] * self._num_layers)

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse: layers of a streamed model do not call it, and layers of another model must not.

        Raises:
            ValueError: always.
        """
        raise ValueError("this cache belongs to a streamed model: give it to that model, after trunkline.stream().")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row i by a copy of row `beam_idx[i]`, for beam search."""
        self.select_rows(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; copies of a row stand side by side."""
        self.select_rows([row for row in range(self._batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows that `indices` selects: row numbers, or a mask of all rows."""
        self.select_rows(torch.arange(self._batch)[indices.cpu()].tolist())
