"""Simulated lanes, for tensors on the `meta` device: they count bytes and time, and move nothing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from trunkline.offload.lanes.base import LANES, LaneName, Lanes, LaneTraffic, Move, TransferLog
from trunkline.offload.lanes.sim_clock import QueuedWork, SimClock
from trunkline.offload.storage import StorageBlock

# Queues of the clock: two directions of the link between device and host, and two of the disk.
LINK = {"fetch": "link in", "stash": "link out"}
DISK = {"fetch": "disk in", "stash": "disk out"}


@dataclass(slots=True)
class _Transfers:
    """Queued transfers of a move: over the link, and from or to the file; None where it has no such part."""

    link: QueuedWork | None = None
    file: QueuedWork | None = None


class SimulatedLanes(Lanes):
    """Lanes that count bytes, and seconds of a simulated clock.

    Args:
        clock: clock of the device; None for moves that take no time.
        linked: host memory is behind a link; False where it is the device itself.
    """

    def __init__(self, clock: SimClock | None = None, *, linked: bool = True) -> None:
        self._traffic: dict[LaneName, LaneTraffic] = {lane: LaneTraffic() for lane in LANES}
        self.log: TransferLog | None = None  # never written: the clock records
        self._clock = clock
        self._linked = linked

    @property
    @override
    def traffic(self) -> dict[LaneName, LaneTraffic]:
        if self._clock is not None:
            # Seconds since the clock began: a reader's reset does not change the clock.
            for lane, traffic in self._traffic.items():
                traffic.busy, traffic.exposed = (
                    seconds.get(lane, 0.0) for seconds in (self._clock.busy, self._clock.exposed)
                )
        return self._traffic

    @override
    def prepare(self, nbytes: int) -> None: ...

    @override
    def stash(self, x: Tensor, block: StorageBlock) -> Move:
        self._traffic["stash"].moved += x.nbytes
        transfers = _Transfers()
        if self._clock is not None and self._linked:
            transfers.link = self._clock.submit(LINK["stash"], x.nbytes, lane="stash", label=block.tier)
        if self._clock is not None and block.tier == "disk":
            transfers.file = self._clock.submit(
                DISK["stash"], x.nbytes, after=transfers.link, lane="stash", label="disk"
            )
        return Move("stash", x, block, x.nbytes, transfers)

    @override
    def fetch(self, block: StorageBlock, into: Tensor, after: Move) -> Move:
        self._traffic["fetch"].moved += into.nbytes
        stashed: _Transfers = after.handle
        transfers = _Transfers()
        before = stashed.file or stashed.link
        if self._clock is not None and block.tier == "disk":
            transfers.file = before = self._clock.submit(
                DISK["fetch"], into.nbytes, after=before, lane="fetch", label="disk"
            )
        if self._clock is not None and self._linked:
            transfers.link = self._clock.submit(
                LINK["fetch"], into.nbytes, after=before, lane="fetch", label=block.tier
            )
        return Move("fetch", into, block, into.nbytes, transfers)

    @override
    def finish(self, move: Move) -> None:
        # Device memory is free once its bytes have left over the link: the write to the file goes on without it.
        transfer = move.handle.link or move.handle.file
        if self._clock is not None and transfer is not None:
            self._clock.wait(transfer)
        move.tensor = None

    @override
    def drain(self) -> None: ...
