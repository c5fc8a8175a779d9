"""A batch: the token ids, positions, targets and documents of one forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trunkline.chunking import Chunk

IGNORE = -100  # transformers' label of a token without a target


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of one forward: the whole sequence, the same on all ranks that share it.

    Chunks may extend past the last token, with padding: no token attends to it, and it has no target.

    Attributes:
        input_ids_BS: token ids.
        position_ids: (1, S) or (B, S); None for 0 … S-1, which are then made chunk by chunk, so that only what the user
            gave is as long as the sequence.
        targets: token that each position is to predict, or -100: (B, S), or (B, S-1) where the last predicts nothing;
            None for logits only.
        num_targets: divisor of the sum of token losses, 0-dim: the number of targets in this batch, or
            `num_items_in_batch`. None without targets.
        divisor: divisor of the gradients, 0-dim, where it also counts the targets of other replicas' batches; None for
            `num_targets`.
        documents: first token of each document of a row, for each row, or once for all rows. Documents never attend to
            each other.
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
        """First row of the batch, without targets and documents."""
        positions = None if self.position_ids is None else self.position_ids[:1]
        return Batch(self.input_ids_BS[:1], positions)

    def ids(self, chunk: Chunk) -> Tensor:
        """Return the token ids of this rank's tokens of a chunk, (B, C); padding is 0."""
        ids_BC = _of_chunk(self.input_ids_BS, chunk)
        missing = len(chunk) - ids_BC.shape[1]
        return F.pad(ids_BC, (0, missing)) if missing else ids_BC

    def positions(self, chunk: Chunk) -> Tensor:
        """Return the position ids of a chunk, (1, C) or (B, C); padding has the last token's."""
        if self.position_ids is not None and chunk.stop <= self.seq_len:
            return _of_chunk(self.position_ids, chunk)
        device = self.input_ids_BS.device
        at = _concatenate([torch.arange(start, stop, device=device) for start, stop in chunk.ranges], 0)
        if chunk.stop > self.seq_len:
            at = at.clamp_max(self.seq_len - 1)
        return at[None] if self.position_ids is None else self.position_ids[:, at]

    def targets_of(self, chunk: Chunk) -> Tensor:
        """Return the targets of a chunk, (B, C); -100 where there is none."""
        assert self.targets is not None
        targets_BC = _of_chunk(self.targets, chunk)
        missing = len(chunk) - targets_BC.shape[1]
        return F.pad(targets_BC, (0, missing), value=IGNORE) if missing else targets_BC

    @property
    def last_position(self) -> int:
        """Highest position id in the batch, read from the device if the user gave position ids."""
        return self.seq_len - 1 if self.position_ids is None else int(self.position_ids.max())


def _of_chunk(x_BS: Tensor, chunk: Chunk) -> Tensor:
    """Return the tokens of a chunk that are not padding; a view where they are consecutive."""
    return _concatenate([x_BS[:, start:stop] for start, stop in chunk.ranges], 1)


def _concatenate(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
