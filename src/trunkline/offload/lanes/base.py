"""Lanes: ordered queues of work beside compute, and what a backend of them has to do.

The engine says what must follow what, and nothing else:

- a stash reads its tensor after everything that compute has been given so far;
- a fetch reads its block after the move named as `after`, and writes its tensor after all that compute has been given;
- what compute is given after `finish(move)` follows the move. Only then may a stashed tensor be let go, a fetched one
  be read, and a block be written again.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from trunkline.offload.storage import StorageBlock, TierError

LaneName = Literal["fetch", "stash"]
LANES: tuple[LaneName, ...] = ("fetch", "stash")


@dataclass(slots=True)
class LaneTraffic:
    """What went over one lane.

    Attributes:
        moved: bytes.
        busy: seconds that the lane worked.
        exposed: seconds that compute waited for it.
    """

    moved: int = 0
    busy: float = 0.0
    exposed: float = 0.0

    @property
    def gigabytes_per_second(self) -> float:
        """10^9 bytes a second while it worked; 0 where it did not."""
        return self.moved / self.busy / 1e9 if self.busy else 0.0


@dataclass(slots=True)
class TransferLog:
    """When lanes moved what, and when compute waited for them; kept by lanes that are asked to.

    Attributes:
        begin: second of `time.perf_counter` from which all is counted.
        event: recorded on the device at the same moment, where lanes measure by events; None elsewhere.
        moves: of each lane, (begin, end, tier).
        waits: of compute, (begin, end, lane).
    """

    begin: float
    event: Any = None
    moves: dict[LaneName, list[tuple[float, float, str]]] = field(default_factory=lambda: {name: [] for name in LANES})
    waits: list[tuple[float, float, str]] = field(default_factory=list)

    def move(self, lane: LaneName, begin: float, end: float, tier: str) -> None:
        """Add a move, in seconds of `time.perf_counter`."""
        self.moves[lane].append((begin - self.begin, end - self.begin, tier))

    def wait(self, lane: LaneName, begin: float, end: float) -> None:
        """Add a wait, in seconds of `time.perf_counter`."""
        self.waits.append((begin - self.begin, end - self.begin, lane))


@dataclass(slots=True)
class Move:
    """A tensor on its way.

    Attributes:
        lane: over which it goes.
        tensor: that is stashed or filled; None once the move is finished.
        block: its place beyond the device.
        nbytes: of the tensor.
        handle: the backend's own.
    """

    lane: LaneName
    tensor: Tensor | None
    block: StorageBlock
    nbytes: int
    handle: Any = field(default=None, repr=False)


class Lanes(Protocol):
    """A backend.

    Attributes:
        log: what each lane does when is written there; None for nowhere.
    """

    log: TransferLog | None

    @property
    def traffic(self) -> dict[LaneName, LaneTraffic]:
        """What went over each lane since it was last set to zero."""
        ...

    def prepare(self, nbytes: int) -> None:
        """Get ready, before a sweep, for blocks of so many bytes in a file."""
        ...

    def stash(self, x: Tensor, block: StorageBlock) -> Move:
        """Copy `x`, dense, into `block`."""
        ...

    def fetch(self, block: StorageBlock, into: Tensor, after: Move) -> Move:
        """Copy `block` into `into`, dense, after the move that filled the block."""
        ...

    def finish(self, move: Move) -> None:
        """Have compute go on only after `move`.

        Raises:
            TierError: the move failed.
        """
        ...

    def drain(self) -> None:
        """Have compute go on only after all that is under way, come what may of it."""
        ...


def succeed(work: Future[None]) -> None:
    """Wait for a thread's part of a move.

    Raises:
        TierError: it failed. A new error, since the thread's own would keep the whole failed step alive in a cycle.
    """
    error = work.exception()
    if error is not None:
        raise TierError(str(error)) from error


def flat_bytes(x: Tensor) -> Tensor:
    """The bytes of a dense tensor in the order in which they lie in memory, uint8 (nbytes,)."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
