"""Interface between the engine and the ranks that share a sequence.

The tokens of a chunk are divided evenly over the ranks of a group. Attention is divided in two other ways: by heads
over the `sp` axis (DeepSpeed Ulysses), by query rows over the `cp` axis. `trunkline.distributed` implements both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from trunkline.attention.kv_gather import KeyValueGather, Pending
from trunkline.chunking import Chunk
from trunkline.engine.batch import Batch
from trunkline.offload.lanes.base import LaneTraffic

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Agreement:
    """Values that all ranks of a replica use in one forward.

    Attributes:
        seed: base seed of the random states, the same on all ranks that share a sequence.
        num_targets: number of target tokens in the batches of all replicas, 0-dim, at least 1; None with one replica.
    """

    seed: int
    num_targets: Tensor | None = None


class Ranks:
    """Ranks that share a sequence, seen from one of them.

    This class is a single rank, which holds the whole sequence: nothing is divided, nothing exchanged. Its subclasses
    in `trunkline.distributed` divide tokens and exchange.

    Attributes:
        size: number of ranks that the tokens of a chunk are divided over: `cp` times `sp`, or 1 in decoding.
        chunk_multiple: number of tokens of which the length of every chunk, on all ranks together, is a multiple.
        seed_offset: number that differs between ranks with different tokens, and is equal on ranks with the same (tp).
        name: mesh coordinate, such as `sp1of4`; empty without a mesh.
        kv_gather: gather of keys and values over `cp`; None if query rows are not divided.
        traffic: counters of the `comm` lane; None on a single rank.
    """

    size = 1
    chunk_multiple = 1
    seed_offset = 0
    name = ""
    kv_gather: KeyValueGather | None = None
    traffic: LaneTraffic | None = None

    @property
    def replicated(self) -> Ranks:
        """The same ranks for a few tokens (decoding): every rank computes all tokens, attention alone is divided."""
        return self

    def local_tokens(self, chunk: Chunk) -> Chunk:
        """Return the tokens of a chunk of the whole sequence that this rank computes outside attention."""
        return chunk

    def query_rows(self, chunk: Chunk) -> Chunk:
        """Return the query rows of a chunk that this rank computes in attention.

        They are numbered through all chunks, from 0, without the rows of other ranks.
        """
        return chunk

    def agree(self, read: Callable[[], tuple[Batch, str]], seed: int) -> tuple[Batch, Agreement]:
        """Compare the inputs of all ranks before the first sweep, so that no rank hangs in a collective later.

        Args:
            read: checks this rank's inputs and returns the batch and a description of the call (labels, gradients,
                settings); the description must be equal on all ranks of the job. It raises ValueError to refuse.
            seed: a seed drawn by this rank; the first rank's is used.

        Returns:
            The batch of `read`, and the values that all ranks share.

        Raises:
            ValueError: a rank refused its inputs, or the inputs differ. All ranks raise.
        """
        return read()[0], Agreement(seed)

    def require_same(self, value: object, name: str) -> None:
        """Check that a decision (compared by its repr) is equal on all ranks that share a sequence.

        Raises:
            ValueError: it differs. All ranks raise.
        """

    def require_same_weights(self, model: nn.Module) -> None:
        """Check that all ranks hold the same weights. Sharded models are not checked again.

        Raises:
            ValueError: they differ. All ranks raise.
        """

    def guard(self) -> contextlib.AbstractContextManager[None]:
        """Run a sweep in this context: an error on one rank stops all others, with its reason."""
        return contextlib.nullcontext()

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Exchange q, k or v (B, heads, this rank's tokens, D) for (B, this rank's heads, query rows, D).

        Differentiable. Heads fewer than ranks are repeated.
        """
        return tensors

    def start_to_tokens(self, o: Tensor) -> Pending[tuple[Tensor, ...]] | None:
        """Start `to_tokens` early, for an output that is known before the graph reaches it; None if nothing moves."""
        return None

    def to_tokens(self, o: Tensor, pending: Pending[tuple[Tensor, ...]] | None = None) -> Tensor:
        """Exchange an output (B, this rank's heads, query rows, D) for (B, heads, this rank's tokens, D).

        Differentiable.

        Args:
            o: the output; its values are not read if `pending` is given.
            pending: result of `start_to_tokens`.
        """
        return o

    def interleave(self, calls: Iterable[Callable[[], None]]) -> None:
        """Run calls in order. Over ranks, while one waits for an exchange, the next one runs."""
        for call in calls:
            call()

    def pipeline(self, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
        """Yield the results of calls in order. Over ranks, exchanges in one result's backward let the next call run."""
        return (call() for call in calls)

    def local_heads(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape (B, this rank's heads, T, D), given (B, heads, T, D).

        Only its shape and dtype mean anything: it need not hold this rank's heads.
        """
        return x

    def head_range(self, num_heads: int) -> slice:
        """Return the slice of the query heads that this rank has in attention, out of `num_heads`."""
        return slice(0, num_heads)

    def gather_tokens(self, x_BCE: Tensor) -> Tensor:
        """Return all tokens of a chunk (B, size * C, E), in order, from every rank's tokens (B, C, E)."""
        return x_BCE

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks that share the sequence; `x` is unchanged."""
        return x

    def merge_attention(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Merge attention over the keys of each rank into attention over all keys, in decoding.

        In training nothing is merged: keys are gathered.

        Args:
            o: output over this rank's keys, (B, H, T, D).
            lse: its log-sum-exp (B, H, T); -inf on a rank without keys.

        Returns:
            Output and log-sum-exp over the keys of all ranks.
        """
        return o, lse


def padded_length(seq_len: int, multiple: int) -> int:
    """Round a number of tokens up to a multiple. Padding goes to the end, where causal attention never sees it."""
    return -(-seq_len // multiple) * multiple
