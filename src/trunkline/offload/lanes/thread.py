"""Lanes as threads: one worker each. Reading and writing files, and copying memory, let go of the interpreter."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from trunkline.offload.lanes.base import LANES, LaneName, LaneTraffic, Move, TransferLog, flat_bytes, succeed
from trunkline.offload.storage import StorageBlock


class ThreadLanes:
    """Lanes for tensors in host memory. Futures are the events: a fetch waits for its stash in its own thread."""

    def __init__(self) -> None:
        self.traffic: dict[LaneName, LaneTraffic] = {lane: LaneTraffic() for lane in LANES}
        self.log: TransferLog | None = None
        self._workers = {lane: ThreadPoolExecutor(1, thread_name_prefix=f"trunkline-{lane}") for lane in LANES}

    def prepare(self, nbytes: int) -> None:
        """See `Lanes.prepare`: there is nothing to get ready."""

    def stash(self, x: Tensor, block: StorageBlock) -> Move:
        """See `Lanes.stash`."""
        return Move("stash", x, block, x.nbytes, self._workers["stash"].submit(self._carry, "stash", x, block, None))

    def fetch(self, block: StorageBlock, into: Tensor, after: Move) -> Move:
        """See `Lanes.fetch`."""
        work = self._workers["fetch"].submit(self._carry, "fetch", into, block, after.handle)
        return Move("fetch", into, block, into.nbytes, work)

    def _carry(self, lane: LaneName, x: Tensor, block: StorageBlock, after: Future[None] | None) -> None:
        if after is not None:
            after.result()
        start = time.perf_counter()
        (block.storage.write if lane == "stash" else block.storage.read)(block, flat_bytes(x))
        traffic = self.traffic[lane]
        traffic.moved += x.nbytes
        end = time.perf_counter()
        traffic.busy += end - start
        if self.log is not None:
            self.log.move(lane, start, end, block.tier)

    def finish(self, move: Move) -> None:
        """See `Lanes.finish`."""
        start = time.perf_counter()
        succeed(move.handle)
        end = time.perf_counter()
        self.traffic[move.lane].exposed += end - start
        if self.log is not None:
            self.log.wait(move.lane, start, end)
        move.tensor = move.handle = None  # a sequence keeps the move of every chunk

    def drain(self) -> None:
        """See `Lanes.drain`: nothing to do, since a lane is a queue, and tensors under way are held by their moves."""
