"""Lanes that move nothing: for tensors on the `meta` device, which have shapes and bytes but no contents.

They run the same engine, so that what it would hold in every tier and send over every lane is known beforehand; with a
clock, so is when.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trunkline.offload.lanes.base import LANES, LaneName, LaneTraffic, Move, TransferLog
from trunkline.offload.lanes.sim_clock import QueuedWork, SimClock
from trunkline.offload.storage import StorageBlock

# Queues of the clock: the link between device and host, and the disk, each in two directions.
LINK = {"fetch": "link in", "stash": "link out"}
DISK = {"fetch": "disk in", "stash": "disk out"}


@dataclass(slots=True)
class _Legs:
    """The jobs of a move: over the link, and to or from a file; None where it does not go there."""

    link: QueuedWork | None = None
    file: QueuedWork | None = None


class SimulatedLanes:
    """Lanes that count, and keep time.

    Args:
        clock: of the machine; None for one on which everything is over at once.
        linked: whether host memory lies behind a link, and is not the device itself.
    """

    def __init__(self, clock: SimClock | None = None, *, linked: bool = True) -> None:
        self._traffic: dict[LaneName, LaneTraffic] = {lane: LaneTraffic() for lane in LANES}
        self.log: TransferLog | None = None  # never written: the clock draws
        self._clock = clock
        self._linked = linked

    @property
    def traffic(self) -> dict[LaneName, LaneTraffic]:
        """See `Lanes.traffic`."""
        if self._clock is not None:
            for lane, counted in self._traffic.items():
                counted.busy, counted.exposed = (
                    times.get(lane, 0.0) for times in (self._clock.busy, self._clock.exposed)
                )
        return self._traffic

    def prepare(self, nbytes: int) -> None:
        """See `Lanes.prepare`: there is nothing to get ready."""

    def stash(self, x: Tensor, block: StorageBlock) -> Move:
        """See `Lanes.stash`."""
        self._traffic["stash"].moved += x.nbytes
        legs = _Legs()
        if self._clock is not None and self._linked:
            legs.link = self._clock.submit(LINK["stash"], x.nbytes, lane="stash", label=block.tier)
        if self._clock is not None and block.tier == "disk":
            legs.file = self._clock.submit(DISK["stash"], x.nbytes, after=legs.link, lane="stash", label="disk")
        return Move("stash", x, block, x.nbytes, legs)

    def fetch(self, block: StorageBlock, into: Tensor, after: Move) -> Move:
        """See `Lanes.fetch`."""
        self._traffic["fetch"].moved += into.nbytes
        stashed: _Legs = after.handle
        legs = _Legs()
        before = stashed.file or stashed.link
        if self._clock is not None and block.tier == "disk":
            legs.file = before = self._clock.submit(
                DISK["fetch"], into.nbytes, after=before, lane="fetch", label="disk"
            )
        if self._clock is not None and self._linked:
            legs.link = self._clock.submit(LINK["fetch"], into.nbytes, after=before, lane="fetch", label=block.tier)
        return Move("fetch", into, block, into.nbytes, legs)

    def finish(self, move: Move) -> None:
        """See `Lanes.finish`."""
        # What has left the device may be let go before it is in its file.
        job = move.handle.link or move.handle.file
        if self._clock is not None and job is not None:
            self._clock.wait(job)
        move.tensor = None

    def drain(self) -> None:
        """See `Lanes.drain`."""
