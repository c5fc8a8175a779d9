"""What a rehearsal gives."""

from __future__ import annotations

from dataclasses import dataclass, field

from trunkline.units import TierName, in_units


@dataclass(frozen=True, slots=True)
class Step:
    """When everything would happen.

    Attributes:
        seconds: of the step, its optimizer included where there is one.
        phases: (name, begin, end) in seconds: embed, forward, head, backward, optimizer.
        busy: seconds that each lane (fetch, stash, comm) works.
        exposed: seconds that compute waits for each lane.
        tokens: of the step, all replicas together.
        devices: that share the work.
        model_flops: FLOPs that the mathematics needs (`trunkline.hf.flops`); None where they cannot be counted.
        hardware_flops: those that all devices do, what is computed again included; a kernel's own recomputation is not.
        operators: that the host of a device issues.
        peak_flops: FLOP/s of a device.
        memory: (second, bytes) of each tier, where it was asked for.
        lanes: (begin, end, label) of each lane, where it was asked for.
    """

    seconds: float
    phases: list[tuple[str, float, float]]
    busy: dict[str, float]
    exposed: dict[str, float]
    tokens: int
    devices: int
    model_flops: int | None
    hardware_flops: int
    operators: int
    peak_flops: float
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict, repr=False)
    lanes: dict[str, list[tuple[float, float, str]]] = field(default_factory=dict, repr=False)

    @property
    def tokens_per_second(self) -> float:
        """Of a device."""
        return self.tokens / self.seconds / self.devices

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: causal attention exact, recomputation not counted."""
        if self.model_flops is None:
            return None
        return self.model_flops / (self.seconds * self.devices * self.peak_flops)

    @property
    def hardware_utilisation(self) -> float:
        """FLOPs that were done, recomputed ones included, of those that could have been."""
        return self.hardware_flops / (self.seconds * self.devices * self.peak_flops)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a step would do, seen from one rank.

    Attributes:
        peaks: most bytes that the engine's stores hold in each tier.
        moved: bytes that go over each lane.
        memory: all bytes of each tier at its peak, by what they are: parameters, gradients, optimizer, what is kept,
            and what a chunk's own computation takes. A library's own buffers are not among them.
        step: when; None without a hardware profile.
        beyond_stores: most bytes that the device holds beside the engine's stores.
        reserved: bytes that the stores need in each tier beyond the device: the least budget there.
    """

    peaks: dict[TierName, int]
    moved: dict[str, int]
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    step: Step | None = None
    beyond_stores: int = 0
    reserved: dict[TierName, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """In units for people."""
        held = ", ".join(f"{tier} {in_units(nbytes)}" for tier, nbytes in self.peaks.items() if nbytes)
        moved = ", ".join(f"{lane} {in_units(nbytes)}" for lane, nbytes in self.moved.items() if nbytes)
        text = f"holds {held}; moves {moved or 'nothing'}"
        if self.step is None:
            return text
        waits = ", ".join(f"{lane} {seconds:.3g} s" for lane, seconds in self.step.exposed.items() if seconds > 0)
        speed = f"{self.step.seconds:.4g} s, {self.step.tokens_per_second:,.0f} tokens/s a device"
        return f"{text}; takes {speed}; waits for {waits or 'nothing'}"
