"""Recorder of one step as a timeline of memory, lanes and parts.

It samples at every chunk that the engine reports, never waits for the device, and never touches random state: a
recorded step computes bitwise the same as any other.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import cast

import psutil
import torch
from torch import Tensor, nn

from trunkline.api import tiers_of
from trunkline.config import Progress
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
from trunkline.train.memory_sampler import CudaMemorySampler, ProcessMemorySampler
from trunkline.train.optimizer import Optimizer
from trunkline.train.part_timer import Mark, PartTimer
from trunkline.train.step_metrics import StepMetrics
from trunkline.units import OFFLOAD_TIERS, TIERS, TierName

MOST_POINTS = 20_000  # samples of one tier's memory in the timeline
_MIN_WAIT = 1e-5  # seconds: a shorter wait was for a move that had already ended


class StepRecorder:
    """Recorder of one step on this rank.

    Args:
        model: the model, streamed before the step begins.
        device: device of the model.
        clock: timer of the steps.
        step: number of the step to record, counted from 0.
        title: title of the timeline.
        devices: number of devices of the run.

    Attributes:
        step: number of the step to record, counted from 0.
        is_active: whether the step is running.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, clock: PartTimer, *, step: int, title: str, devices: int
    ) -> None:
        self.step, self.is_active = step, False
        self._model, self._device, self._clock = model, device, clock
        self._title, self._devices = title, devices
        self._sampler: CudaMemorySampler | ProcessMemorySampler
        self._sampler = CudaMemorySampler(device, clock) if device.type == "cuda" else ProcessMemorySampler()
        self._tallies = {tier: MemoryTally() for tier in TIERS}
        self._offloaded: dict[TierName, list[tuple[Mark, int]]] = {tier: [] for tier in OFFLOAD_TIERS}
        self._labels: list[tuple[Mark, str]] = []
        self._states: dict[TierName, Counter[str]] = {tier: Counter() for tier in TIERS}
        self._holders: dict[TierName, Counter[str]] = {tier: Counter() for tier in TIERS}
        self._peaks: dict[TierName, int] = dict.fromkeys(TIERS, 0)
        self._optimizer: Optimizer | None = None
        self._log: TransferLog | None = None

    @property
    def device_peak(self) -> int:
        """Peak bytes of this rank's device in the recorded step, up to the last sample."""
        return self._peaks["device"]

    @contextlib.contextmanager
    def recording(self, optimizer: Optimizer) -> Iterator[None]:
        """Record while the body runs the step; the timer must be in its first part.

        Args:
            optimizer: optimizer of the run, whose states are counted.
        """
        self._optimizer = optimizer
        tiers, begin = tiers_of(self._model), self._clock.begin
        # The device is idle between two steps, so that the event and the host's clock mark the same moment.
        self._log = TransferLog(begin) if isinstance(begin, float) else TransferLog(time.perf_counter(), begin)
        self._count_states()
        tiers.observer = self._count_store
        if tiers.limited:
            tiers.lanes.log = self._log
        self._sampler.start()
        self._sample(begin)
        self.is_active = True
        try:
            yield
        finally:
            self.is_active = False
            self._sampler.stop()
            tiers.observer = None
            if tiers.limited:
                tiers.lanes.log = None

    def progress(self, position: Progress) -> None:
        """Sample at the beginning of a chunk; does nothing outside of `recording`."""
        if not self.is_active:
            return
        label = position.part if position.layer < 0 else f"{position.part} {position.layer}"
        mark = self._clock.now()
        if not self._labels or self._labels[-1][1] != label:
            self._labels.append((mark, label))
            if position.part == "backward":
                self._count_gradients()
        self._sample(mark)

    def stop(self) -> None:
        """Take the last sample, when all work of the step is launched and the timer still runs.

        Does nothing outside of `recording`.
        """
        if not self.is_active:
            return
        self._count_states()
        self._sampler.stop()  # before the last sample: a later one would be in no peak
        self._sample(self._clock.now())

    def timeline(self, metrics: StepMetrics) -> Timeline:
        """Return the timeline of the step, after the timer has stopped.

        Args:
            metrics: metrics of the step.
        """
        assert self._log is not None
        seconds = metrics.total_seconds
        spans = self._clock.spans()
        moves = {str(lane): segments for lane, segments in self._log.moves.items() if segments}
        points: dict[TierName, list[tuple[Mark, int]]] = {"device": self._sampler.points}
        points |= {tier: found for tier, found in self._offloaded.items() if self._peaks[tier]}
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

    def _count_store(self, tier: TierName, kind: str, nbytes: int) -> None:
        self._tallies[tier].add(STORE_LABELS.get(kind, kind), nbytes)

    def _sample(self, mark: Mark) -> None:
        _, most = self._sampler.sample()
        self._keep_peak("device", most)
        for tier, points in self._offloaded.items():
            tally = self._tallies[tier]
            away = self._states[tier].total()
            if points:
                points.append((points[-1][0], tally.peak + away))
            points.append((mark, tally.held + away))
            self._keep_peak(tier, tally.peak + away)
        for tally in self._tallies.values():
            tally.reset_peak()

    def _keep_peak(self, tier: TierName, peak: int) -> None:
        """Keep the holders of a tier if its peak is a new maximum."""
        if peak > self._peaks[tier]:
            self._peaks[tier] = peak
            self._holders[tier] = self._tallies[tier].parts_at_peak + self._states[tier]

    def _count_states(self) -> None:
        """Count this rank's bytes of parameters, optimizer states and gradients in each tier."""
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
        """Return the segments of the compute lane, by layer and part, without its waits."""
        assert self._log is not None
        begins = [(self._clock.since_begin(mark), label) for mark, label in self._labels]
        begins += [(begin, part) for part, begin, _ in spans if part in ("data", "optimizer")]
        begins = [*sorted(begins), (seconds, "")]
        waits = sorted(wait for wait in self._log.waits if wait[1] - wait[0] > _MIN_WAIT)
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
        on_cuda, budgets = self._device.type == "cuda", tiers_of(self._model).budgets
        device = torch.cuda.get_device_properties(self._device) if on_cuda else None
        total = psutil.virtual_memory().total if device is None else device.total_memory
        return {"device": total, **{tier: budgets[tier].budget for tier in OFFLOAD_TIERS}}


def _without(segments: list[Segment], waits: list[Segment]) -> list[Segment]:
    """Return the parts of segments outside of waits; both are in order and do not overlap among themselves."""
    left: list[Segment] = []
    index = 0
    for begin, end, label in segments:
        while index < len(waits) and waits[index][0] < end:
            if waits[index][0] > begin:
                left.append((begin, waits[index][0], label))
            begin = max(begin, min(end, waits[index][1]))
            if waits[index][1] > end:
                break
            index += 1
        if end > begin:
            left.append((begin, end, label))
    return left
