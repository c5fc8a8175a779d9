"""Lanes: ordered queues of moves that run beside compute, and the interface that each backend implements.

The engine states order, and nothing else:

- a stash (device to storage) reads its tensor after all work that compute was given before it;
- a fetch (storage to device) reads its block after the move named `after`, and writes its tensor after all work that
  compute was given before it;
- compute that is given after `finish(move)` runs after the move. Only then may the engine free a stashed tensor, read a
  fetched one, or write the block again.
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
    """Traffic of one of this rank's lanes.

    Attributes:
        moved: bytes.
        busy: seconds that the lane worked.
        exposed: seconds that compute waited for the lane.
    """

    moved: int = 0
    busy: float = 0.0
    exposed: float = 0.0

    def take(self) -> LaneTraffic:
        """Return a copy and set these counters to zero."""
        taken = LaneTraffic(self.moved, self.busy, self.exposed)
        self.moved, self.busy, self.exposed = 0, 0.0, 0.0
        return taken

    @property
    def gigabytes_per_second(self) -> float:
        """10^9 bytes a second while the lane worked; 0 if it never did."""
        return self.moved / self.busy / 1e9 if self.busy else 0.0


@dataclass(slots=True)
class TransferLog:
    """Times of moves and of waits for them.

    Attributes:
        begin: second of `time.perf_counter` that is time 0 of the log.
        event: CUDA event recorded at the same moment; None where lanes measure with the host's clock.
        moves: of each lane, (begin, end, tier), in seconds.
        waits: of compute, (begin, end, lane), in seconds.
    """

    begin: float
    event: Any = None
    moves: dict[LaneName, list[tuple[float, float, str]]] = field(default_factory=lambda: {name: [] for name in LANES})
    waits: list[tuple[float, float, str]] = field(default_factory=list)

    def move(self, lane: LaneName, begin: float, end: float, tier: str) -> None:
        """Add a move; `begin` and `end` are seconds of `time.perf_counter`."""
        self.moves[lane].append((begin - self.begin, end - self.begin, tier))

    def wait(self, lane: LaneName, begin: float, end: float) -> None:
        """Add a wait; `begin` and `end` are seconds of `time.perf_counter`."""
        self.waits.append((begin - self.begin, end - self.begin, lane))


@dataclass(slots=True)
class Move:
    """Copy of a tensor that was given to a lane.

    Attributes:
        lane: the lane.
        tensor: tensor on the device, read by a stash and written by a fetch; None once the move is finished. Until then
            this reference keeps its memory alive.
        block: block in the storage.
        nbytes: bytes of the tensor.
        handle: the backend's own state.
    """

    lane: LaneName
    tensor: Tensor | None
    block: StorageBlock
    nbytes: int
    handle: Any = field(default=None, repr=False)


class Lanes(Protocol):
    """Lanes of one kind of machine.

    Attributes:
        log: lanes add their moves and waits to it; None for no log.
    """

    log: TransferLog | None

    @property
    def traffic(self) -> dict[LaneName, LaneTraffic]:
        """Traffic of each lane; its reader sets the counters to zero. CUDA lanes wait for the device first."""
        ...

    def prepare(self, nbytes: int) -> None:
        """Allocate the buffers for moves of up to `nbytes` to and from a file. Called before each step that has any.

        Lanes without such buffers do nothing.

        Raises:
            TierError: the buffers cannot be pinned.
        """
        ...

    def stash(self, x: Tensor, block: StorageBlock) -> Move:
        """Start to copy a dense tensor into `block`; `x` must not change until `finish`."""
        ...

    def fetch(self, block: StorageBlock, into: Tensor, after: Move) -> Move:
        """Start to copy `block` into a dense tensor, after the move that filled the block."""
        ...

    def finish(self, move: Move) -> None:
        """Make compute wait until a stash no longer reads its tensor, or a fetch has filled it.

        Raises:
            TierError: the move failed. A stash that fails later makes the fetch of its block fail.
        """
        ...

    def drain(self) -> None:
        """Make it safe to give the blocks of all pending moves, failed ones included, to another step.

        It raises nothing. Lanes that guarantee this by the order of their moves need not wait.
        """
        ...


def wait_for(work: Future[None]) -> None:
    """Wait for the part of a move that runs in a thread.

    Raises:
        TierError: it failed.
    """
    error = work.exception()
    if error is not None:
        # A new error: the thread's own has a traceback that keeps the tensors of the failed step alive in a cycle.
        raise TierError(str(error)) from error


def flat_bytes(x: Tensor) -> Tensor:
    """Return the bytes of a dense tensor in memory order, uint8 (nbytes,), as a view."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
