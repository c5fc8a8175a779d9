"""Counters of this rank: bytes held in each tier, and traffic of each lane."""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.offload.lanes.base import LANES, Lanes, LaneTraffic
from trunkline.units import TierName


class TierBudget:
    """Bytes that the engine holds in one tier, their peak, and their limit.

    Args:
        name: the tier.
        budget: most bytes that may be held; None is no limit.
    """

    def __init__(self, name: TierName, budget: int | None = None) -> None:
        self.name = name
        self.budget = budget
        self.held = 0
        self.peak = 0

    def acquire(self, nbytes: int) -> None:
        """Add bytes. The placement has reserved room for them, so that passing the budget is a bug of ours."""
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        assert self.budget is None or self.held <= self.budget, (
            f"{self.name}: {self.held} bytes held, {self.budget} budgeted"
        )

    def release(self, nbytes: int) -> None:
        """Subtract bytes."""
        self.held -= nbytes
        assert self.held >= 0, f"{self.name}: more bytes released than held"


@dataclass(frozen=True, slots=True)
class Stats:
    """Memory and traffic of this rank since the last reading.

    Attributes:
        peaks: most bytes that the engine held in each tier; on the device, tensors in flight are included. Parameters,
            their gradients, and the activations of a chunk that is being computed are not.
        lanes: traffic of each lane: `fetch`, `stash`, and with several ranks `comm`.
    """

    peaks: dict[TierName, int]
    lanes: dict[str, LaneTraffic]

    def with_lane(self, name: str, traffic: LaneTraffic) -> Stats:
        """Return a copy with one more lane, and set the counters of `traffic` to zero."""
        return Stats(self.peaks, {**self.lanes, name: traffic.take()})

    @property
    def moved(self) -> int:
        """Bytes moved over all lanes."""
        return sum(traffic.moved for traffic in self.lanes.values())


def take_stats(budgets: dict[TierName, TierBudget], lanes: Lanes | None) -> Stats:
    """Read all counters and reset them: peaks to the bytes held now, traffic to zero."""
    peaks = {tier: budget.peak for tier, budget in budgets.items()}
    for budget in budgets.values():
        budget.peak = budget.held
    traffic: dict[str, LaneTraffic] = {lane: LaneTraffic() for lane in LANES}
    if lanes is not None:
        traffic |= {lane: counted.take() for lane, counted in lanes.traffic.items()}
    return Stats(peaks, traffic)
