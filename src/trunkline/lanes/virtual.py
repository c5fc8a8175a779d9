"""Lanes that move nothing: for tensors on the `meta` device, which have shapes and bytes but no contents.

They run the same engine, so that what it would hold in every tier and send over every lane is known beforehand.
"""

from __future__ import annotations

from torch import Tensor

from trunkline.lanes import LANES, LaneName, Move, Traffic
from trunkline.tiers.storage import Block


class VirtualLanes:
    """Lanes that count. A move is over as soon as it is asked for: there is no clock yet."""

    def __init__(self) -> None:
        self.traffic: dict[LaneName, Traffic] = {lane: Traffic() for lane in LANES}

    def prepare(self, nbytes: int) -> None:
        """See `Lanes.prepare`: there is nothing to get ready."""

    def stash(self, x: Tensor, block: Block) -> Move:
        """See `Lanes.stash`."""
        self.traffic["stash"].moved += x.nbytes
        return Move("stash", x, block, x.nbytes)

    def fetch(self, block: Block, into: Tensor, after: Move) -> Move:
        """See `Lanes.fetch`."""
        self.traffic["fetch"].moved += into.nbytes
        return Move("fetch", into, block, into.nbytes)

    def finish(self, move: Move) -> None:
        """See `Lanes.finish`."""
        move.tensor = None

    def drain(self) -> None:
        """See `Lanes.drain`."""
