"""A batch: the token ids, positions, targets and documents of one forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trunkline.chunking import Chunk


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
        documents: the first token of each document of a row, for each row, or one for all rows; documents never attend
            to each other.
        divisor: what its gradients are divided by, 0-dim, where that counts the tokens of other batches, too; None for
            `num_targets`.

    Chunks may reach past the last token; what is there is padding, which nobody attends to and nothing is predicted at.
    """

    input_ids_BS: Tensor
    position_ids: Tensor | None = None
    targets: Tensor | None = None
    num_targets: Tensor | None = None
    divisor: Tensor | None = None
    documents: tuple[tuple[int, ...], ...] = ((0,),)

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        return self.input_ids_BS.shape[1]

    @property
    def first_row(self) -> Batch:
        """The first row of the batch, for its shapes."""
        positions = None if self.position_ids is None else self.position_ids[:1]
        return Batch(self.input_ids_BS[:1], positions)

    def ids(self, chunk: Chunk) -> Tensor:
        """Token ids of a chunk, (B, C)."""
        ids_BC = _of(self.input_ids_BS, chunk)
        missing = len(chunk) - ids_BC.shape[1]
        return F.pad(ids_BC, (0, missing)) if missing else ids_BC

    def positions(self, chunk: Chunk) -> Tensor:
        """Position ids of a chunk, (1, C) or (B, C); padding has the last token's."""
        if self.position_ids is not None and chunk.stop <= self.seq_len:
            return _of(self.position_ids, chunk)
        at = _joined([torch.arange(start, stop, device=self.input_ids_BS.device) for start, stop in chunk.ranges], 0)
        if chunk.stop > self.seq_len:
            at = at.clamp_max(self.seq_len - 1)
        return at[None] if self.position_ids is None else self.position_ids[:, at]

    def targets_of(self, chunk: Chunk) -> Tensor:
        """Targets of a chunk, (B, C); -100 where there is none."""
        assert self.targets is not None
        targets_BC = _of(self.targets, chunk)
        missing = len(chunk) - targets_BC.shape[1]
        return F.pad(targets_BC, (0, missing), value=-100) if missing else targets_BC

    @property
    def last_position(self) -> int:
        """The highest position id."""
        return self.seq_len - 1 if self.position_ids is None else int(self.position_ids.max())


def _of(x_BS: Tensor, chunk: Chunk) -> Tensor:
    """What a chunk has of the tokens that are there; a view where these are consecutive."""
    return _joined([x_BS[:, start:stop] for start, stop in chunk.ranges], 1)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
