"""Lanes as threads, for tensors in host memory.

Each lane is one worker thread. File I/O and memory copies release the GIL, so that compute runs meanwhile.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor
from typing_extensions import override

from trunkline.offload.lanes.base import LANES, LaneName, Lanes, LaneTraffic, Move, TransferLog, flat_bytes, wait_for
from trunkline.offload.storage import StorageBlock


class ThreadLanes(Lanes):
    """Lanes whose events are futures: a fetch waits for its stash in the fetch thread, not in compute's."""

    def __init__(self) -> None:
        self.log: TransferLog | None = None
        self._traffic: dict[LaneName, LaneTraffic] = {lane: LaneTraffic() for lane in LANES}
        self._workers = {lane: ThreadPoolExecutor(1, thread_name_prefix=f"trunkline-{lane}") for lane in LANES}

    @property
    @override
    def traffic(self) -> dict[LaneName, LaneTraffic]:
        return self._traffic

    @override
    def prepare(self, nbytes: int) -> None:
        pass

    @override
    def stash(self, x: Tensor, block: StorageBlock) -> Move:
        work = self._workers["stash"].submit(self._transfer, "stash", x, block, None)
        return Move("stash", x, block, x.nbytes, work)

    @override
    def fetch(self, block: StorageBlock, into: Tensor, after: Move) -> Move:
        work = self._workers["fetch"].submit(self._transfer, "fetch", into, block, after.handle)
        return Move("fetch", into, block, into.nbytes, work)

    def _transfer(self, lane: LaneName, x: Tensor, block: StorageBlock, after: Future[None] | None) -> None:
        if after is not None:
            after.result()
        start = time.perf_counter()
        (block.storage.write if lane == "stash" else block.storage.read)(block, flat_bytes(x))
        end = time.perf_counter()
        traffic = self._traffic[lane]
        traffic.moved += x.nbytes
        traffic.busy += end - start
        if self.log is not None:
            self.log.move(lane, start, end, block.tier)

    @override
    def finish(self, move: Move) -> None:
        start = time.perf_counter()
        wait_for(move.handle)
        end = time.perf_counter()
        self._traffic[move.lane].exposed += end - start
        if self.log is not None:
            self.log.wait(move.lane, start, end)
        # A sequence keeps the stash move of every chunk, for the fetch that comes after it: drop what it refers to.
        move.tensor = move.handle = None

    @override
    def drain(self) -> None:
        # Nothing to wait for: another step's stash runs after all pending stashes, its fetch after all pending fetches.
        # A pending fetch may read the other step's data, but nobody uses its result. Moves keep their tensors alive.
        pass
