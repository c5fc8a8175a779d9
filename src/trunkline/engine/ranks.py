"""What the engine knows of the ranks that share a sequence: which tokens are its own, and three exchanges.

The tokens of a chunk are cut evenly over the ranks of a group. Attention is cut otherwise: by heads over some ranks,
and by query rows over others (`trunkline.distributed`; the paper's section 3.2 and DeepSpeed Ulysses the first).
`SingleRank` is the group of one, where nothing is cut and nothing exchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor, nn

from trunkline.attention.kv_gather import KeyValueGather
from trunkline.chunking import Chunk
from trunkline.engine.batch import Batch
from trunkline.offload.lanes.base import LaneTraffic

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the ranks of a job agreed upon before a forward.

    Attributes:
        seed: of the random states of the group's forward.
        num_targets: target tokens of all replicas, 0-dim, at least 1; None where there is one replica.
    """

    seed: int
    num_targets: Tensor | None = None


class PendingTensors(Protocol):
    """Tensors on their way."""

    def wait(self) -> tuple[Tensor, ...]:
        """Them, once compute may use them."""
        ...


class Ranks(Protocol):
    """The ranks that share a sequence, seen from one of them."""

    @property
    def size(self) -> int:
        """Ranks that the tokens of a chunk are cut over."""
        ...

    @property
    def granule(self) -> int:
        """Tokens that divide a chunk which can be cut evenly."""
        ...

    @property
    def salt(self) -> int:
        """A number that ranks with other tokens do not have, and ranks with the same tokens do."""
        ...

    @property
    def name(self) -> str:
        """Of this rank in its mesh, the same for none in another; empty for one alone."""
        ...

    @property
    def gather(self) -> KeyValueGather | None:
        """Of keys and values whose query rows are cut over ranks; None where they are not."""
        ...

    @property
    def traffic(self) -> LaneTraffic | None:
        """What was exchanged; None where there is nobody to exchange with."""
        ...

    @property
    def together(self) -> Ranks:
        """The same ranks where they read a few tokens, each all of them."""
        ...

    def own(self, chunk: Chunk) -> Chunk:
        """The tokens of a chunk that this rank computes."""
        ...

    def rows(self, chunk: Chunk) -> Chunk:
        """The rows that attention of a chunk has on this rank, in their own numbering."""
        ...

    def begin(self, read: Callable[[], tuple[Batch, str]], seed: int) -> tuple[Batch, Agreement]:
        """Make sure that all ranks were given the same, before the first sweep.

        Args:
            read: checks what this rank was given, or raises a ValueError; gives it, and a text of how the model is
                called, which must be the same on all ranks of the job.
            seed: drawn by this rank.

        Returns:
            What was given, and what all agreed upon.

        Raises:
            ValueError: what was given is refused, on this rank or another, or differs; on all ranks.
        """
        ...

    def require_same(self, what: object, name: str) -> None:
        """Make sure that all ranks of the group decided alike.

        Raises:
            ValueError: they did not; on all ranks.
        """
        ...

    def require_same_weights(self, model: nn.Module) -> None:
        """Make sure that all ranks hold the same weights, where each holds all of them.

        Raises:
            ValueError: they do not; on all ranks.
        """
        ...

    def guarded(self) -> contextlib.AbstractContextManager[None]:
        """Run a sweep: an error of this rank reaches the others, and theirs this one."""
        ...

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys or values (B, heads, own tokens, D) to (B, own heads, rows, D); differentiable."""
        ...

    def start_to_tokens(self, o: Tensor) -> PendingTensors | None:
        """`to_tokens` of an output that is known before its node is there: under way, for `to_tokens` to take."""
        ...

    def to_tokens(self, o: Tensor, coming: PendingTensors | None = None) -> Tensor:
        """Outputs (B, own heads, rows, D) to (B, heads, own tokens, D); differentiable."""
        ...

    def side_by_side(self, calls: Iterable[Callable[[], None]]) -> None:
        """Make calls, one after another; while one waits in an exchange above, the next goes on."""
        ...

    def ahead(self, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
        """What calls return, in their order; while that is differentiated, its exchanges let the next call go on."""
        ...

    def own_heads(self, x: Tensor) -> Tensor:
        """As many heads of (B, heads, C, D) as this rank has in attention."""
        ...

    def head_range(self, num_heads: int) -> slice:
        """Which of so many query heads this rank has in attention."""
        ...

    def whole(self, x_BCE: Tensor) -> Tensor:
        """All tokens of a chunk, from every rank's own."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks."""
        ...

    def merged(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Attention over the keys of all ranks, from an output and log-sum-exp over each rank's own."""
        ...


class SingleRank:
    """A rank with a sequence of its own."""

    size = granule = 1
    salt = 0
    name = ""
    gather = None
    traffic: LaneTraffic | None = None

    @property
    def together(self) -> Ranks:
        """See `Ranks.together`."""
        return self

    def own(self, chunk: Chunk) -> Chunk:
        """See `Ranks.own`."""
        return chunk

    def rows(self, chunk: Chunk) -> Chunk:
        """See `Ranks.rows`."""
        return chunk

    def begin(self, read: Callable[[], tuple[Batch, str]], seed: int) -> tuple[Batch, Agreement]:
        """See `Ranks.begin`."""
        return read()[0], Agreement(seed)

    def require_same(self, what: object, name: str) -> None:
        """See `Ranks.require_same`."""

    def require_same_weights(self, model: nn.Module) -> None:
        """See `Ranks.require_same_weights`."""

    def guarded(self) -> contextlib.AbstractContextManager[None]:
        """See `Ranks.guarded`."""
        return contextlib.nullcontext()

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """See `Ranks.to_heads`."""
        return tensors

    def start_to_tokens(self, o: Tensor) -> None:
        """See `Ranks.start_to_tokens`."""

    def to_tokens(self, o: Tensor, coming: PendingTensors | None = None) -> Tensor:
        """See `Ranks.to_tokens`."""
        return o

    def side_by_side(self, calls: Iterable[Callable[[], None]]) -> None:
        """See `Ranks.side_by_side`."""
        for call in calls:
            call()

    def ahead(self, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
        """See `Ranks.ahead`."""
        return (call() for call in calls)

    def own_heads(self, x: Tensor) -> Tensor:
        """See `Ranks.own_heads`."""
        return x

    def head_range(self, num_heads: int) -> slice:
        """See `Ranks.head_range`."""
        return slice(0, num_heads)

    def whole(self, x_BCE: Tensor) -> Tensor:
        """See `Ranks.whole`."""
        return x_BCE

    def total(self, x: Tensor) -> Tensor:
        """See `Ranks.total`."""
        return x

    def merged(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """See `Ranks.merged`."""
        return o, lse


def padded_length(seq_len: int, granule: int) -> int:
    """Tokens of a sequence with what it takes to cut it evenly: at the end, where nobody attends to it."""
    return -(-seq_len // granule) * granule
