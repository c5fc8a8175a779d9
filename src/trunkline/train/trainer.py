"""Training loop: micro-batches, one optimizer step, one record of metrics."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from trunkline.api import stats
from trunkline.config import Progress, ProgressCallback
from trunkline.data import SampleOrder, Samples
from trunkline.distributed.fsdp import no_sync
from trunkline.offload.stats import Stats
from trunkline.report.timeline import Timeline
from trunkline.train.display import Display
from trunkline.train.optimizer import Optimizer, clip_scale, learning_rate
from trunkline.train.part_timer import PartTimer
from trunkline.train.recipe import Recipe
from trunkline.train.step_metrics import StepMetrics, peak_memory_bytes
from trunkline.train.step_recorder import StepRecorder
from trunkline.train.world import World


class TrainingDivergedError(RuntimeError):
    """Loss or gradient norm that is not finite; the parameters are those of the step before."""


def progress_hook(clock: PartTimer, display: Display, recorder: StepRecorder | None = None) -> ProgressCallback:
    """Return the progress callback of the engine: it sets the part of the timer, and informs display and recorder."""

    def note(position: Progress) -> None:
        clock.enter(position.part)
        if recorder is not None:
            recorder.progress(position)
        display.progress(position)

    return note


@dataclass
class Trainer:
    """Trainer of a streamed model: it runs the steps of a recipe.

    Attributes:
        recipe: settings.
        model: streamed model, with a `progress_hook` of `clock` and `display` as its progress callback.
        samples: training data.
        optimizer: optimizer of the model.
        clock: timer of the parts of a step.
        display: display of the run.
        device: device of the model.
        flops_per_sample: model FLOPs of one sample, over all ranks; None if unknown.
        world: processes of the run.
        stats: function that returns `trunkline.Stats` of the model.
        recorder: recorder of one of the steps on this rank; None for none.
        timeline: timeline of that step, once it is over; None before.
    """

    recipe: Recipe
    model: nn.Module
    samples: Samples
    optimizer: Optimizer
    clock: PartTimer
    display: Display
    device: torch.device
    flops_per_sample: int | None
    world: World
    stats: Callable[[nn.Module], Stats] = stats
    recorder: StepRecorder | None = None
    timeline: Timeline | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._order = SampleOrder(len(self.samples), self.recipe.seed)

    def step(self, index: int) -> StepMetrics:
        """Run one optimizer step; all ranks call this, and each replica takes its share of every micro-batch.

        Args:
            index: number of the step, counted from 0.

        Returns:
            Its metrics.

        Raises:
            TrainingDivergedError: loss or gradient norm is not finite; nothing was updated.
        """
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.clock.enter("data")
        if self.recorder is None or self.recorder.step != index:
            return self._step(index)
        with self.recorder.recording(self.optimizer):
            metrics = self._step(index)
        self.timeline = self.recorder.timeline(metrics)
        return metrics

    def _step(self, index: int) -> StepMetrics:
        recipe = self.recipe
        micro_batches = self._micro_batches(index)
        # Normalised by the tokens of the whole step, so that the split into micro-batches changes nothing.
        num_items = sum(int((labels_BS[:, 1:] != -100).sum()) for labels_BS in micro_batches)
        loss = 0.0
        for number, ids_BS in enumerate(micro_batches):
            self.display.micro_batch(number)
            self.clock.enter("data")
            ids_BS = ids_BS.tensor_split(self.world.parallel_dims.dp)[self.world.replica]  # this replica's samples
            ids_BS = ids_BS.to(self.device, non_blocking=True)
            part = self.model(input_ids=ids_BS, labels=ids_BS, num_items_in_batch=num_items).loss
            part_value = self.world.sum_over_replicas(float(part.detach()))
            self._require_finite(part_value, "loss", index)
            last = number == len(micro_batches) - 1
            with contextlib.nullcontext() if last else no_sync(self.model):
                part.backward()
            loss += part_value
            self.clock.enter("optimizer")
            norm = self.optimizer.collect()
        grad_norm = float(norm)
        self._require_finite(grad_norm, "gradient norm", index)
        rate = learning_rate(index, steps=recipe.steps, settings=recipe.optimizer)
        self.optimizer.step(lr=rate, scale=clip_scale(grad_norm, recipe.clip))
        if self.recorder is not None:
            self.recorder.stop()
        seconds = self.clock.stop()
        return self._record(index, loss, grad_norm, rate, seconds)

    def _micro_batches(self, index: int) -> list[torch.Tensor]:
        """Return each micro-batch's token ids (B, S), int64 on the CPU, of all replicas; seed and step decide them."""
        recipe = self.recipe
        per_step = recipe.batch_size * recipe.gradient_accumulation
        chosen = self._order.take(index * per_step, per_step)
        ids = torch.from_numpy(np.stack([self.samples.pieces[i] for i in chosen]).astype(np.int64))
        return [ids[start : start + recipe.batch_size] for start in range(0, per_step, recipe.batch_size)]

    def _record(self, index: int, loss: float, grad_norm: float, rate: float, seconds: dict[str, float]) -> StepMetrics:
        recipe = self.recipe
        total = sum(seconds.values())
        num_samples = recipe.batch_size * recipe.gradient_accumulation
        stats = self.stats(self.model)
        flops = None if self.flops_per_sample is None else self.flops_per_sample * num_samples
        return StepMetrics(
            step=index + 1,
            loss=loss,
            grad_norm=grad_norm,
            lr=rate,
            tokens=recipe.tokens_per_step,
            tokens_per_second=recipe.tokens_per_step / total,
            model_flops=flops,
            flops_per_second=None if flops is None else flops / total,
            peak_memory_bytes=self._peak_memory_bytes(),
            seconds=seconds,
            tiers={str(tier): peak for tier, peak in stats.peaks.items()},
            lanes={
                lane: {"bytes": x.moved, "gb_per_second": x.gigabytes_per_second, "exposed_seconds": x.exposed}
                for lane, x in stats.lanes.items()
            },
        )

    def _peak_memory_bytes(self) -> int:
        peak = peak_memory_bytes(self.device)
        # A recorder resets the allocator's peak at every chunk, and keeps the peak of the step itself.
        return max(peak, self.recorder.device_peak) if self.recorder is not None and self.recorder.is_active else peak

    def _require_finite(self, value: float, quantity: str, index: int) -> None:
        if not math.isfinite(value):
            raise TrainingDivergedError(
                f"the {quantity} of step {index + 1} is {value}, so training stopped before that update. Lower "
                "optimizer.lr "
                f"({self.recipe.optimizer.lr:g}), lengthen optimizer.warmup_steps "
                f"({self.recipe.optimizer.warmup_steps}), or use model.dtype float32."
            )
