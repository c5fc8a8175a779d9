"""Bytes of a tier: what is held, the most that ever was, and the budget that it may not pass."""

from __future__ import annotations

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

    def hold(self, nbytes: int) -> None:
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
