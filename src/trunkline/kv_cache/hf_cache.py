"""What transformers asks of a cache, as far as the answer is the same whatever a streamed cache holds."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class HFCacheInterface(Cache, abc.ABC):  # type: ignore[misc]
    """A cache without tensors of its own.

    Args:
        num_layers: decoder layers.

    Attributes:
        length: tokens of a row, padding included.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[])
        self.length = 0
        self._batch = 0
        self._num_layers = num_layers

    @abc.abstractmethod
    def rearranged(self, rows: Sequence[int]) -> None:
        """Have rows that are copies of these rows of before."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of a row, padding included."""
        return self.length

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Keys that new tokens meet, and the place of the first."""
        return self.length + int(query_length), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """No limit."""
        return -1

    def __len__(self) -> int:
        return self._num_layers

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first forward."""
        return self._batch or -1

    @property
    def max_batch_size(self) -> int:
        """Rows."""
        return self._batch

    @property
    def is_compileable(self) -> bool:
        """Never: it is not made of tensors of one shape."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether it holds anything."""
        return self.length > 0

    @property
    def is_croppable(self) -> bool:
        """As long as no window has let go of what would be wanted again; `crop` says so."""
        return True

    @property
    def is_sliding(self) -> list[bool]:
        """Masks are none of transformers' business here."""
        return [False] * self._num_layers

    @property
    def is_linear(self) -> list[bool]:
        """No layer has linear attention."""
        return [False] * self._num_layers

    @property
    def is_dummy(self) -> list[bool]:
        """No layer goes without keys and values."""
        return [False] * self._num_layers

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: layers of a streamed model do not call it, and those of another must not.

        Raises:
            ValueError: always.
        """
        raise ValueError("this cache belongs to a streamed model: give it to that model, after trunkline.stream().")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Have each row go on from another, as beams do."""
        self.rearranged(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have each row so many times."""
        self.rearranged([row for row in range(self._batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Have some of the rows."""
        self.rearranged(torch.arange(self._batch)[indices.cpu()].tolist())
