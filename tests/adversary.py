"""Adversarial lanes: they run every move as late, and in as strange an order, as the stated order allows.

A move waits in its lane until compute finishes it, or until chance runs it; lanes overtake each other wherever no
dependency forbids it. Memory that is not written yet is full of NaN, and so is a stashed tensor that was freed too
early.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from trunkline.offload.allocator import RangeAllocator
from trunkline.offload.lanes.base import LANES, LaneName, Lanes, LaneTraffic, Move, flat_bytes
from trunkline.offload.storage import HostSlab, Storage, StorageBlock
from trunkline.units import TierName

POISON = 0xFF  # every floating dtype made of such bytes is NaN


@dataclass(eq=False)
class PendingMove:
    tensor: weakref.ref[Tensor]
    block: StorageBlock
    nbytes: int
    after: PendingMove | None
    done: bool = False


class AdversaryLanes:
    def __init__(self, seed: int) -> None:
        self.traffic: dict[LaneName, LaneTraffic] = {lane: LaneTraffic() for lane in LANES}
        self._random = random.Random(seed)
        self._eager = 0.95 * self._random.random()  # how much is done before it must be
        self._queues: dict[LaneName, deque[PendingMove]] = {lane: deque() for lane in LANES}
        self.out_of_order = 0

    def prepare(self, nbytes: int) -> None:
        pass

    def stash(self, x: Tensor, block: StorageBlock) -> Move:
        return self._submit("stash", x, block, None)

    def fetch(self, block: StorageBlock, into: Tensor, after: Move) -> Move:
        flat_bytes(into).fill_(POISON)
        return self._submit("fetch", into, block, after.handle)

    def _submit(self, lane: LaneName, x: Tensor, block: StorageBlock, after: PendingMove | None) -> Move:
        waiting = PendingMove(weakref.ref(x), block, x.nbytes, after)
        self._queues[lane].append(waiting)
        self.traffic[lane].moved += x.nbytes
        self._chance()
        return Move(lane, x, block, x.nbytes, waiting)

    def finish(self, move: Move) -> None:
        self._chance()
        while not move.handle.done:
            self._advance(move.lane)
        move.tensor = None

    def drain(self) -> None:
        for lane in LANES:
            while self._queues[lane]:
                self._advance(lane)

    def _chance(self) -> None:
        while self._random.random() < self._eager:
            lane = self._random.choice(LANES)
            queue = self._queues[lane]
            if queue and (queue[0].after is None or queue[0].after.done):
                self._advance(lane)

    def _advance(self, lane: LaneName) -> None:
        """Run the first move of a lane, and before it the move that it depends on."""
        waiting = self._queues[lane][0]
        while waiting.after is not None and not waiting.after.done:
            self._advance("stash")
        other = self._queues["stash" if lane == "fetch" else "fetch"]
        self.out_of_order += bool(other)
        self._queues[lane].popleft()
        waiting.done = True
        x = waiting.tensor()
        if lane == "fetch":
            if x is not None:
                waiting.block.storage.read(waiting.block, flat_bytes(x))
        elif x is not None:
            waiting.block.storage.write(waiting.block, flat_bytes(x))
        else:
            gone = torch.full((waiting.nbytes,), POISON, dtype=torch.uint8)
            waiting.block.storage.write(waiting.block, gone)


class AdversaryBackend:
    """Backend whose host and disk are slabs of memory, full of NaN until they are written."""

    def __init__(self, seed: int) -> None:
        self.made = AdversaryLanes(seed)

    def lanes(self) -> Lanes:
        return self.made

    def storage(self, tier: TierName, nbytes: int) -> Storage:
        slab = HostSlab(nbytes)
        slab.memory.fill_(POISON)
        slab.ranges = PoisonedRanges(slab)
        return slab


class PoisonedRanges(RangeAllocator):
    """Allocator that fills freed ranges with NaN."""

    def __init__(self, slab: HostSlab) -> None:
        super().__init__(slab.memory.numel())
        self._memory = slab.memory

    def free(self, start: int) -> None:
        self._memory[start : start + self._lengths[start]].fill_(POISON)
        super().free(start)
