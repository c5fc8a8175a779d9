"""A decoder-only model in the pieces that a sweep needs, and what a forward is about."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from trunkline.chunking import Chunk

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # q, k, v, scale -> output, all (B, heads, C, D)


@dataclass(frozen=True, slots=True)
class Batch:
    """What a forward is about.

    Attributes:
        input_ids_BS: token ids.
        position_ids: (1, S) or (B, S); None for 0 … S-1, which are then made for each chunk: nothing here is as long as
            the sequence but what the user gave.
        targets: the token that each position is to predict, or -100: (B, S), or (B, S-1) where the last predicts
            nothing; None for logits only.
        num_targets: what the sum of token losses is divided by, 0-dim.
    """

    input_ids_BS: Tensor
    position_ids: Tensor | None = None
    targets: Tensor | None = None
    num_targets: Tensor | None = None

    def positions(self, chunk: Chunk) -> Tensor:
        """Position ids of a chunk, (1, C) or (B, C)."""
        if self.position_ids is not None:
            return self.position_ids[:, chunk.start : chunk.stop]
        return torch.arange(chunk.start, chunk.stop, device=self.input_ids_BS.device)[None]

    @property
    def last_position(self) -> int:
        """The highest position id."""
        return self.input_ids_BS.shape[1] - 1 if self.position_ids is None else int(self.position_ids.max())


class Decoder(Protocol):
    """A decoder-only model in the pieces that a sweep needs."""

    num_layers: int
    vocab_size: int

    @property
    def layer_parameters(self) -> list[list[Parameter]]:
        """Parameters of each layer, as the model stands now."""
        ...

    @property
    def other_parameters(self) -> list[Parameter]:
        """All other parameters."""
        ...

    def engaged(self) -> AbstractContextManager[None]:
        """What must be in place while sweeps run."""
        ...

    def embed(self, batch: Batch, chunk: Chunk) -> Tensor:
        """The input of layer 0, (B, C, E)."""
        ...

    def layer(self, index: int, x_BCE: Tensor, batch: Batch, chunk: Chunk, attend: Attend) -> Tensor:
        """A decoder layer on one chunk, its attention call handed to `attend`."""
        ...

    def projections(
        self, index: int, x_BCE: Tensor, batch: Batch, chunk: Chunk
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """What a layer calls its attention with for one chunk, and nothing that follows.

        Returns:
            Queries (B, H, C, D), keys and values (B, K, C, D), and the factor of the scores.
        """
        ...

    def head(self, x_BTE: Tensor) -> Tensor:
        """Final hidden states to logits (B, T, V)."""
        ...
