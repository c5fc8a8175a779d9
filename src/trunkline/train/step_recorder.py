"""Records one step of a run as a timeline: memory, lanes, parts.

It looks where the engine reports a chunk, waits for nothing on the device, and touches no random state, so that a
recorded step computes what any other does.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from trunkline.api import tiers_of
from trunkline.distributed.grad_norm import local
from trunkline.engine.memory_layout import STORE_LABELS
from trunkline.offload.lanes.base import TransferLog
from trunkline.plan.device_memory import MemoryTally
from trunkline.report.timeline import (
    PHASES,
    Phase,
    PhaseName,
    Segment,
    StepFunction,
    Timeline,
    clipped,
    thinned,
    within,
)
from trunkline.train.estimate import SweepPosition
from trunkline.train.memory_sampler import memory_sampler_for, total_bytes
from trunkline.train.optimizer import Optimizer
from trunkline.train.part_timer import Mark, PartTimer
from trunkline.train.step_metrics import StepMetrics
from trunkline.units import OFFLOAD_TIERS, TIERS, TierName

MOST_POINTS = 20_000  # of one tier's memory
_LEAST_WAIT = 1e-5  # seconds: less is what waiting for something that is over takes


class StepRecorder:
    """Records one step.

    Args:
        model: streamed by the time the step begins.
        device: where it is.
        clock: of the run's steps.
        step: which step is recorded, counted from 0.
        title: of the timeline.
        devices: that take part.

    Attributes:
        step: which step is recorded, counted from 0.
        is_active: whether it is under way.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, clock: PartTimer, *, step: int, title: str, devices: int
    ) -> None:
        self.step, self.is_active = step, False
        self._model, self._device, self._clock = model, device, clock
        self._title, self._devices = title, devices
        self._gauge = memory_sampler_for(device, clock)
        self._tallies = {tier: MemoryTally() for tier in TIERS}
        self._beyond: dict[TierName, list[tuple[Mark, int]]] = {tier: [] for tier in OFFLOAD_TIERS}
        self._labels: list[tuple[Mark, str]] = []
        self._states: dict[TierName, Counter[str]] = {tier: Counter() for tier in TIERS}
        self._holders: dict[TierName, Counter[str]] = {tier: Counter() for tier in TIERS}
        self._peaks: dict[TierName, int] = dict.fromkeys(TIERS, 0)
        self._optimizer: Optimizer | None = None
        self._record: TransferLog | None = None

    @property
    def device_peak(self) -> int:
        """Most bytes that the device held in the step."""
        return self._peaks["device"]

    @contextlib.contextmanager
    def watching(self, optimizer: Optimizer) -> Iterator[None]:
        """For as long as the step goes on, its meters read; the clock is in its first part.

        Args:
            optimizer: of the run.
        """
        self._optimizer = optimizer
        tiers, begin = tiers_of(self._model), self._clock.begin
        self._record = _record_from(begin)
        self._count_states()
        tiers.observer = self._note
        if tiers.limited:
            tiers.lanes.log = self._record
        self._gauge.start()
        self._look(begin)
        self.is_active = True
        try:
            yield
        finally:
            self.is_active = False
            self._gauge.stop()
            tiers.observer = None
            if tiers.limited:
                tiers.lanes.log = None

    def progress(self, position: SweepPosition) -> None:
        """A chunk's work begins."""
        if not self.is_active:
            return
        label = position.part if position.layer < 0 else f"{position.part} {position.layer}"
        mark = self._clock.now()
        if not self._labels or self._labels[-1][1] != label:
            self._labels.append((mark, label))
            if position.part == "backward":
                self._count_gradients()
        self._look(mark)

    def stop(self) -> None:
        """The work of the step has been given to the device; the clock still runs."""
        if not self.is_active:
            return
        self._count_states()
        self._look(self._clock.now())
        self._gauge.stop()

    def timeline(self, metrics: StepMetrics) -> Timeline:
        """Return the step, once it is over and the clock has stopped.

        Args:
            metrics: of this step.
        """
        assert self._record is not None
        seconds = metrics.total_seconds
        spans = self._clock.spans()
        moves = {str(lane): segments for lane, segments in self._record.moves.items() if segments}
        points: dict[TierName, list[tuple[Mark, int]]] = {"device": self._gauge.points}
        points |= {tier: found for tier, found in self._beyond.items() if self._peaks[tier]}
        memory = {tier: self._over_time(found, seconds) for tier, found in points.items()}
        return Timeline(
            title=self._title,
            source="measured",
            seconds=seconds,
            phases=[Phase(cast(PhaseName, name), begin, end) for name, begin, end in spans if name in PHASES],
            memory={str(tier): steps for tier, steps in memory.items()},
            capacity=self._capacity(),
            holders={tier: self._held_at_peak(tier, memory[tier]) for tier in TIERS if tier in memory},
            lanes=clipped({"compute": self._compute(spans, seconds), **moves}, seconds),
            exposed={lane: figures["exposed_seconds"] for lane, figures in metrics.lanes.items()},
            moved={lane: int(figures["bytes"]) for lane, figures in metrics.lanes.items()},
            model_flops=metrics.model_flops,
            hardware_flops=None,
            peak_flops=None,
            tokens=metrics.tokens,
            devices=self._devices,
        )

    # -- while the step goes on ----------------------------------------------------------------------------------------

    def _note(self, tier: TierName, kind: str, nbytes: int) -> None:
        self._tallies[tier].add(STORE_LABELS.get(kind, kind), nbytes)

    def _look(self, mark: Mark) -> None:
        _, most = self._gauge.look()
        self._remember("device", most)
        for tier, points in self._beyond.items():
            tally = self._tallies[tier]
            away = self._states[tier].total()
            if points:
                points.append((points[-1][0], tally.peak + away))
            points.append((mark, tally.held + away))
            self._remember(tier, tally.peak + away)
        for tally in self._tallies.values():
            tally.reset_peak()

    def _remember(self, tier: TierName, peak: int) -> None:
        """Keep what is held where this is the most so far."""
        if peak > self._peaks[tier]:
            self._peaks[tier] = peak
            self._holders[tier] = self._tallies[tier].parts_at_peak + self._states[tier]

    def _count_states(self) -> None:
        """See what parameters and optimizer take in each tier."""
        assert self._optimizer is not None
        masters = self._optimizer.optimised if self._optimizer.has_masters else []
        states = self._optimizer.adamw.state.values()
        moments = [x for state in states for x in state.values() if isinstance(x, Tensor)]
        self._count("parameters", [*self._model.parameters(), *self._model.buffers()])
        self._count("optimizer", [*masters, *moments])
        self._count_gradients()

    def _count_gradients(self) -> None:
        assert self._optimizer is not None
        both = (*self._optimizer.parameters, *self._optimizer.optimised)
        self._count("gradients", [x.grad for x in both if x.grad is not None])

    def _count(self, name: str, tensors: Sequence[Tensor]) -> None:
        for states in self._states.values():
            states[name] = 0
        for x in tensors:
            self._states["device" if x.device.type == self._device.type else "host"][name] += local(x).nbytes

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _over_time(self, points: list[tuple[Mark, int]], seconds: float) -> StepFunction:
        steps = [(self._clock.since_begin(mark), nbytes) for mark, nbytes in points]
        return thinned(within(steps, seconds), seconds, MOST_POINTS)

    def _compute(self, spans: list[tuple[str, float, float]], seconds: float) -> list[Segment]:
        """What compute did: layer by layer, and what lies between, without its waits."""
        assert self._record is not None
        begins = [(self._clock.since_begin(mark), label) for mark, label in self._labels]
        begins += [(begin, part) for part, begin, _ in spans if part in ("data", "optimizer")]
        begins = [*sorted(begins), (seconds, "")]
        waits = sorted(wait for wait in self._record.waits if wait[1] - wait[0] > _LEAST_WAIT)
        return _without([(a, b, label) for (a, label), (b, _) in pairwise(begins)], waits)

    def _held_at_peak(self, tier: TierName, memory: StepFunction) -> dict[str, int]:
        held = {name: nbytes for name, nbytes in self._holders[tier].items() if nbytes > 0}
        rest = max(nbytes for _, nbytes in memory) - sum(held.values())
        if rest > 0:
            name = (
                "activations of a chunk" if self._device.type == "cuda" else "activations of a chunk, Python, PyTorch"
            )
            held[name] = rest
        return held

    def _capacity(self) -> dict[str, int | None]:
        accounts = tiers_of(self._model).budgets
        beyond = {str(tier): accounts[tier].budget for tier in OFFLOAD_TIERS}
        return {"device": total_bytes(self._device), **beyond}


def _record_from(begin: Mark) -> TransferLog:
    """A record of lanes that counts from the beginning of a step."""
    if isinstance(begin, float):
        return TransferLog(begin)
    # The device rests between two steps, so that its moment is now.
    return TransferLog(time.perf_counter(), begin)


def _without(segments: list[Segment], waits: list[Segment]) -> list[Segment]:
    """What is left of segments, in order and side by side, outside of waits."""
    found: list[Segment] = []
    index = 0
    for begin, end, label in segments:
        while index < len(waits) and waits[index][0] < end:
            if waits[index][0] > begin:
                found.append((begin, waits[index][0], label))
            begin = max(begin, min(end, waits[index][1]))
            if waits[index][1] > end:
                break
            index += 1
        if end > begin:
            found.append((begin, end, label))
    return found
