"""What the tiers held and the lanes moved, between one look and the next."""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.lanes import LANES, Lanes, Traffic
from trunkline.tiers.account import Account, TierName


@dataclass(frozen=True, slots=True)
class Meters:
    """Readings since they were last taken.

    Attributes:
        peaks: most bytes that the engine held in each tier; on the device with what was on its way. Parameters,
            gradients, and what a chunk's own computation takes are not among them.
        lanes: what went over each lane: `fetch`, `stash`, and between ranks `comm`.
    """

    peaks: dict[TierName, int]
    lanes: dict[str, Traffic]

    def with_lane(self, name: str, counted: Traffic) -> Meters:
        """These readings, and those of a lane that is metered elsewhere, which is set back."""
        traffic = Traffic(counted.moved, counted.busy, counted.exposed)
        counted.moved, counted.busy, counted.exposed = 0, 0.0, 0.0
        return Meters(self.peaks, {**self.lanes, name: traffic})

    @property
    def moved(self) -> int:
        """Bytes over all lanes."""
        return sum(traffic.moved for traffic in self.lanes.values())


def take(accounts: dict[TierName, Account], lanes: Lanes | None) -> Meters:
    """Read all meters, and set them back: peaks to what is held now, traffic to nothing."""
    peaks = {tier: account.peak for tier, account in accounts.items()}
    for account in accounts.values():
        account.peak = account.held
    traffic: dict[str, Traffic] = {lane: Traffic() for lane in LANES}
    if lanes is not None:
        for lane, counted in lanes.traffic.items():
            traffic[lane] = Traffic(counted.moved, counted.busy, counted.exposed)
            counted.moved, counted.busy, counted.exposed = 0, 0.0, 0.0
    return Meters(peaks, traffic)
