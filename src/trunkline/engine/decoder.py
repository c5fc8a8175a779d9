"""Interface of a model to the engine: a decoder-only model in the pieces that sweeps run."""

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


class ParameterAccess(Protocol):
    """Access to parameters that may be sharded over ranks."""

    @property
    def layer_parameters(self) -> list[list[Parameter]]:
        """Parameters of each layer, trained or not, as the model stands now; this rank's shards, if it is sharded."""
        ...

    @property
    def other_parameters(self) -> list[Parameter]:
        """Parameters outside the layers, trained or not: embedding, final norm, unembedding; shards likewise."""
        ...

    def begin(self) -> None:
        """Prepare for a forward: the optimizer may have changed the parameters."""
        ...

    def unsharded(
        self, layer: int | None, *, following: int | None = None, again: bool = False
    ) -> AbstractContextManager[None]:
        """Unshard a layer's parameters for the duration of a `with`; `None` means everything outside the layers.

        Args:
            layer: index of the layer.
            following: layer whose parameters are needed next, or None: they may be gathered meanwhile.
            again: whether the layer's parameters are needed again, in backward: they may stay unsharded until then.
        """
        ...

    def graph_params(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        """Return the leaves that stand for parameters in the autograd graph while they are unsharded, in their order.

        They are the parameters themselves, unless these are sharded.
        """
        ...

    def reduce_grads(self, parameters: Sequence[Parameter], totals: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Reduce gradients over ranks, and cast them to the parameters' dtype.

        Args:
            parameters: parameters of the model.
            totals: gradients of the unsharded parameters, summed over what this rank has computed, fp32 or wider; None
                where it has none.

        Returns:
            Gradients to add to `.grad`, sharded as the parameters are; None where there is none, or not yet
            (`no_sync`).
        """
        ...


class ParameterStore(ParameterAccess, Protocol):
    """Sharding of a model's parameters over ranks."""

    device: torch.device

    @property
    def has_pending_grads(self) -> bool:
        """True if gradients of earlier backwards wait to be reduced with later ones."""
        ...

    def suspend_hooks(self) -> None:
        """Disable the sharding's own hooks: sweeps decide when parameters are gathered and gradients reduced."""
        ...

    def resume_hooks(self) -> None:
        """Enable the sharding's own hooks again."""
        ...

    def hooks_resumed(self) -> AbstractContextManager[None]:
        """Enable the sharding's own hooks for the duration of a `with`."""
        ...


class Decoder(ParameterAccess, Protocol):
    """A decoder-only model in the pieces that sweeps run."""

    num_layers: int
    vocab_size: int

    @property
    def is_sharded(self) -> bool:
        """True if parameters are sharded over ranks."""
        ...

    def streamed_attention(self) -> AbstractContextManager[None]:
        """Route the attention calls of the layers to the engine for the duration of a `with`."""
        ...

    def embed(self, batch: Batch, chunk: Chunk) -> Tensor:
        """Return the input of layer 0 for a chunk, (B, C, E)."""
        ...

    def layer(self, index: int, x_BCE: Tensor, batch: Batch, chunk: Chunk, attend: Attend) -> Tensor:
        """Run a decoder layer on one chunk, with its attention call handed to `attend`; return its output (B, C, E).

        Args:
            index: index of the layer.
            x_BCE: input of the layer.
            batch: whole batch; the chunk's positions are taken from it.
            chunk: this rank's tokens.
            attend: function that computes attention of all heads of these tokens. The layer calls it once.

        Raises:
            ValueError: the layer does not call it once, or with arguments that cannot be streamed.
        """
        ...

    def recorded_layers(self, batch: Batch, chunk: Chunk) -> AbstractContextManager[Tensor]:
        """Record the arguments of all layers for one chunk, so that `layer` need not record them for each.

        Returns:
            Context manager; it yields the input of layer 0, (B, C, E). Within it, run `layer` on this chunk only.
        """
        ...

    def project_qkv(
        self, index: int, x_BCE: Tensor, batch: Batch, chunk: Chunk
    ) -> tuple[Tensor, Tensor, Tensor, Scoring]:
        """Run a layer on one chunk up to its attention call, and nothing that follows.

        Returns:
            Queries (B, H, C, D), keys and values (B, K, C, D) of all heads, and the scoring.
        """
        ...

    def head(self, x_BTE: Tensor) -> Tensor:
        """Return the logits (B, T, V) of final hidden states, from before the final norm."""
        ...
