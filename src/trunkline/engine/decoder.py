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
        """Parameters of each layer, as the model stands now; shards of them, where it is sharded."""
        ...

    @property
    def other_parameters(self) -> list[Parameter]:
        """Parameters outside the layers: embedding, final norm, unembedding."""
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
            following: layer whose parameters are needed next: they may be gathered meanwhile.
            again: whether the layer's parameters are needed again, in backward.
        """
        ...

    def graph_params(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        """Return the tensors that stand for parameters in the autograd graph while they are unsharded."""
        ...

    def reduce_grads(self, parameters: Sequence[Parameter], totals: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Reduce gradients over ranks, and cast them to the parameters' dtype.

        Args:
            parameters: parameters of the model.
            totals: their gradients summed over what this rank has computed, fp32 or wider; None where it has none.

        Returns:
            Gradients to add to `.grad`; None where there is none, or not yet (`no_sync`).
        """
        ...


class ParameterStore(ParameterAccess, Protocol):
    """Sharding of a model's parameters over ranks."""

    device: torch.device

    @property
    def has_pending_grads(self) -> bool:
        """Whether gradients of earlier backwards wait to be reduced with later ones."""
        ...

    def suspend_hooks(self) -> None:
        """Disable the sharding's own hooks, so that sweeps decide when parameters are gathered."""
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
        """Whether parameters are sharded over ranks."""
        ...

    def streamed_attention(self) -> AbstractContextManager[None]:
        """Route the attention calls of the layers to the engine for the duration of a `with`."""
        ...

    def embed(self, batch: Batch, chunk: Chunk) -> Tensor:
        """Return the input of layer 0, (B, C, E)."""
        ...

    def layer(self, index: int, x_BCE: Tensor, batch: Batch, chunk: Chunk, attend: Attend) -> Tensor:
        """Run a decoder layer on one chunk, with its attention call handed to `attend`; return its output (B, C, E)."""
        ...

    def recorded_layers(self, batch: Batch, chunk: Chunk) -> AbstractContextManager[Tensor]:
        """Record the arguments of all layers for one chunk that then goes through all of them.

        Returns:
            Context manager; it yields the input of layer 0, (B, C, E).
        """
        ...

    def project_qkv(
        self, index: int, x_BCE: Tensor, batch: Batch, chunk: Chunk
    ) -> tuple[Tensor, Tensor, Tensor, Scoring]:
        """Run a layer on one chunk up to its attention call, and nothing that follows.

        Returns:
            Queries (B, H, C, D), keys and values (B, K, C, D), and how scores become weights.
        """
        ...

    def head(self, x_BTE: Tensor) -> Tensor:
        """Return the logits (B, T, V) of final hidden states."""
        ...
