"""What the tiers held and the lanes moved, between one look and the next."""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.offload.lanes.base import LANES, Lanes, LaneTraffic
from trunkline.units import TierName


class TierBudget:
    """The bytes that the engine holds in one tier.

    Args:
        name: of the tier.
        budget: most bytes it may hold; None is no limit.
    """

    def __init__(self, name: TierName, budget: int | None = None) -> None:
        self.name = name
        self.budget = budget
        self.held = 0
        self.peak = 0

    def acquire(self, nbytes: int) -> None:
        """Count bytes in. The placement has seen to it that they fit: past the budget is a defect of ours."""
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        assert self.budget is None or self.held <= self.budget, (
            f"{self.name}: {self.held} bytes held, {self.budget} budgeted"
        )

    def release(self, nbytes: int) -> None:
        """Count bytes out."""
        self.held -= nbytes
        assert self.held >= 0, f"{self.name}: more bytes released than held"


@dataclass(frozen=True, slots=True)
class Stats:
    """Readings since they were last taken.

    Attributes:
        peaks: most bytes that the engine held in each tier; on the device with what was on its way. Parameters,
            gradients, and what a chunk's own computation takes are not among them.
        lanes: what went over each lane: `fetch`, `stash`, and between ranks `comm`.
    """

    peaks: dict[TierName, int]
    lanes: dict[str, LaneTraffic]

    def with_lane(self, name: str, counted: LaneTraffic) -> Stats:
        """These readings, and those of a lane that is metered elsewhere, which is set back."""
        traffic = LaneTraffic(counted.moved, counted.busy, counted.exposed)
        counted.moved, counted.busy, counted.exposed = 0, 0.0, 0.0
        return Stats(self.peaks, {**self.lanes, name: traffic})

    @property
    def moved(self) -> int:
        """Bytes over all lanes."""
        return sum(traffic.moved for traffic in self.lanes.values())


def take(accounts: dict[TierName, TierBudget], lanes: Lanes | None) -> Stats:
    """Read all meters, and set them back: peaks to what is held now, traffic to nothing."""
    peaks = {tier: account.peak for tier, account in accounts.items()}
    for account in accounts.values():
        account.peak = account.held
    traffic: dict[str, LaneTraffic] = {lane: LaneTraffic() for lane in LANES}
    if lanes is not None:
        for lane, counted in lanes.traffic.items():
            traffic[lane] = LaneTraffic(counted.moved, counted.busy, counted.exposed)
            counted.moved, counted.busy, counted.exposed = 0, 0.0, 0.0
    return Stats(peaks, traffic)
