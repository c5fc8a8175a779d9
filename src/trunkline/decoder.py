"""A decoder-only model in the pieces that a sweep needs, and what a forward is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from trunkline.attention.scoring import Scoring
from trunkline.chunking import Chunk

Attend = Callable[[Tensor, Tensor, Tensor, Scoring], Tensor]  # q, k, v, scoring -> output, all (B, heads, C, D)


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


class Decoder(Protocol):
    """A decoder-only model in the pieces that a sweep needs."""

    num_layers: int
    vocab_size: int

    @property
    def shares_parameters(self) -> bool:
        """Whether parameters are spread over ranks, or gathered from elsewhere."""
        ...

    @property
    def layer_parameters(self) -> list[list[Parameter]]:
        """Parameters of each layer, as the model stands now; in parts, if it is sharded."""
        ...

    @property
    def other_parameters(self) -> list[Parameter]:
        """All other parameters."""
        ...

    def engaged(self) -> AbstractContextManager[None]:
        """What must be in place while sweeps run."""
        ...

    def begin(self) -> None:
        """Before a forward: parameters are what the optimizer left."""
        ...

    def present(
        self, layer: int | None, *, following: int | None = None, again: bool = False
    ) -> AbstractContextManager[None]:
        """Have the parameters of a layer whole, or, for None, all that are in no layer.

        A sharded model gathers them for this long.

        Args:
            layer: which.
            following: the layer whose parameters will be wanted next: they may be on their way already.
            again: whether they will be wanted again, in backward.
        """
        ...

    def live(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        """What stands for parameters in the graph while they are whole."""
        ...

    def reduced(self, parameters: Sequence[Parameter], totals: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What is added to the `.grad` of parameters, in their dtype.

        Args:
            parameters: some of this model.
            totals: their gradients summed over what this rank has computed, fp32 or wider; None where it has none.

        Returns:
            Their gradients; None for none, or for not yet.
        """
        ...

    def embed(self, batch: Batch, chunk: Chunk) -> Tensor:
        """The input of layer 0, (B, C, E)."""
        ...

    def layer(self, index: int, x_BCE: Tensor, batch: Batch, chunk: Chunk, attend: Attend) -> Tensor:
        """A decoder layer on one chunk, its attention call handed to `attend`."""
        ...

    def recorded(self, batch: Batch, chunk: Chunk) -> AbstractContextManager[Tensor]:
        """The input of layer 0 of a chunk, (B, C, E), which then goes through all layers."""
        ...

    def projections(
        self, index: int, x_BCE: Tensor, batch: Batch, chunk: Chunk
    ) -> tuple[Tensor, Tensor, Tensor, Scoring]:
        """What a layer calls its attention with for one chunk, and nothing that follows.

        Returns:
            Queries (B, H, C, D), keys and values (B, K, C, D), and how scores become weights.
        """
        ...

    def head(self, x_BTE: Tensor) -> Tensor:
        """Final hidden states to logits (B, T, V)."""
        ...


class Parameters(Protocol):
    """Where a model's parameters are: the part of a `Decoder` that is about them."""

    device: torch.device

    @property
    def layer_parameters(self) -> list[list[Parameter]]:
        """See `Decoder.layer_parameters`."""
        ...

    @property
    def other_parameters(self) -> list[Parameter]:
        """See `Decoder.other_parameters`."""
        ...

    @property
    def is_waiting(self) -> bool:
        """Whether gradients wait to be reduced with later ones."""
        ...

    def take_over(self) -> None:
        """When parameters are gathered is up to sweeps from now on."""
        ...

    def hand_back(self) -> None:
        """It is up to the model's own calls again."""
        ...

    def handed_back(self) -> AbstractContextManager[None]:
        """The same for as long as this lasts."""
        ...

    def begin(self) -> None:
        """See `Decoder.begin`."""
        ...

    def present(
        self, layer: int | None, *, following: int | None = None, again: bool = False
    ) -> AbstractContextManager[None]:
        """See `Decoder.present`."""
        ...

    def live(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        """See `Decoder.live`."""
        ...

    def reduced(self, parameters: Sequence[Parameter], totals: Sequence[Tensor | None]) -> list[Tensor | None]:
        """See `Decoder.reduced`."""
        ...
