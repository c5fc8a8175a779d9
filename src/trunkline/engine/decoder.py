"""A decoder-only model in the pieces that a sweep needs, and what a forward is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from trunkline.attention.scoring import Scoring
from trunkline.chunking import Chunk
from trunkline.engine.batch import Batch

Attend = Callable[[Tensor, Tensor, Tensor, Scoring], Tensor]  # q, k, v, scoring -> output, all (B, heads, C, D)


class Decoder(Protocol):
    """A decoder-only model in the pieces that a sweep needs."""

    num_layers: int
    vocab_size: int

    @property
    def is_sharded(self) -> bool:
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

    def streamed_attention(self) -> AbstractContextManager[None]:
        """What must be in place while sweeps run."""
        ...

    def begin(self) -> None:
        """Before a forward: parameters are what the optimizer left."""
        ...

    def unsharded(
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

    def graph_params(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        """What stands for parameters in the graph while they are whole."""
        ...

    def reduce_grads(self, parameters: Sequence[Parameter], totals: Sequence[Tensor | None]) -> list[Tensor | None]:
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

    def recorded_layers(self, batch: Batch, chunk: Chunk) -> AbstractContextManager[Tensor]:
        """The input of layer 0 of a chunk, (B, C, E), which then goes through all layers."""
        ...

    def project_qkv(
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


class ParameterStore(Protocol):
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
    def has_pending_grads(self) -> bool:
        """Whether gradients wait to be reduced with later ones."""
        ...

    def suspend_hooks(self) -> None:
        """When parameters are gathered is up to sweeps from now on."""
        ...

    def resume_hooks(self) -> None:
        """It is up to the model's own calls again."""
        ...

    def hooks_resumed(self) -> AbstractContextManager[None]:
        """The same for as long as this lasts."""
        ...

    def begin(self) -> None:
        """See `Decoder.begin`."""
        ...

    def unsharded(
        self, layer: int | None, *, following: int | None = None, again: bool = False
    ) -> AbstractContextManager[None]:
        """See `Decoder.present`."""
        ...

    def graph_params(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        """See `Decoder.live`."""
        ...

    def reduce_grads(self, parameters: Sequence[Parameter], totals: Sequence[Tensor | None]) -> list[Tensor | None]:
        """See `Decoder.reduce_grads`."""
        ...
