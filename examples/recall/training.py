"""Training on growing lengths, and accuracy at every depth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from models import Learner
from task import draw, num_pairs
from torch import nn

QUESTIONS = 1024  # questions in a step, at every length
WARMUP = 50
MUON_RATE, ADAM_RATE = 0.02, 4e-3
FLOOR = 0.1  # learning rates of the last step, as a share of the largest
NUM_DEPTHS = 16
EVALUATION_SEED = 1_000_003  # other sequences than in training


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps at one length."""

    length: int
    steps: int


@dataclass(slots=True)
class History:
    """History of a training.

    Attributes:
        losses: loss of each step.
        lengths: sequence length of each step.
        seconds: wall time of each stage.
        processor_seconds: CPU time of each stage over all threads, which other load does not lengthen.
    """

    losses: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)


def train(
    learner: Learner,
    stages: Sequence[Stage],
    seed: int,
    tell: Callable[[int, int, float], None] = lambda *_: None,
    after: Callable[[Stage], None] = lambda _: None,
) -> History:
    """Train on each length in turn; learning rates rise over the first 50 steps and fall over the second half.

    Args:
        learner: the model.
        stages: lengths and their numbers of steps.
        seed: seed of the sequences.
        tell: called with step, length and loss after each step.
        after: called after each stage; its time is not counted.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizers = _optimizers(learner.model)
    total = sum(stage.steps for stage in stages)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: _rate(step, total)) for each in optimizers]
    history = History()
    for stage in stages:
        began, worked = time.perf_counter(), time.process_time()
        learner.model.train()
        learner.set_length(stage.length)
        for _ in range(stage.steps):
            samples = draw(max(1, QUESTIONS // num_pairs(stage.length)), stage.length, generator)
            loss = learner.loss(samples.ids_BS, samples.targets_BS)
            loss.backward()
            nn.utils.clip_grad_norm_(learner.model.parameters(), 1.0)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            history.losses.append(float(loss.detach()))
            history.lengths.append(stage.length)
            tell(len(history.losses), stage.length, history.losses[-1])
        history.seconds.append(time.perf_counter() - began)
        history.processor_seconds.append(time.process_time() - worked)
        after(stage)
    return history


def evaluate(learner: Learner, length: int, sequences: int, seed: int = EVALUATION_SEED) -> dict[str, Any]:
    """Measure the share of right answers on new sequences.

    Args:
        learner: the model.
        length: tokens of each sequence.
        sequences: number of sequences.
        seed: seed of the sequences.

    Returns:
        `length`, `questions`, `accuracy`, and for each of 16 depths, from the beginning, `by_depth` (accuracy) and
        `questions_by_depth`.
    """
    generator = torch.Generator().manual_seed(seed + length)
    right, asked = torch.zeros(NUM_DEPTHS), torch.zeros(NUM_DEPTHS)
    learner.model.eval()
    learner.set_length(length)
    for _ in range(sequences):
        samples = draw(1, length, generator)
        expected_BP = samples.targets_BS[samples.targets_BS >= 0][None]
        bins = (samples.depth_BP * NUM_DEPTHS).long().flatten()
        asked += torch.bincount(bins, minlength=NUM_DEPTHS)
        hits = (learner.answers(samples.ids_BS) == expected_BP).flatten()
        right += torch.bincount(bins[hits], minlength=NUM_DEPTHS)
    return {
        "length": length,
        "questions": int(asked.sum()),
        "accuracy": float(right.sum() / asked.sum()),
        "by_depth": (right / asked).tolist(),
        "questions_by_depth": asked.int().tolist(),
    }


def _optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for the rest; AdamW alone takes many times the steps."""
    layers: Any = model.get_submodule("model.layers")
    matrices = [p for p in layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _rate(step: int, total: int) -> float:
    falling = max(0.0, 2 * step / total - 1)
    return min(1.0, (step + 1) / WARMUP) * (1 - (1 - FLOOR) * falling)
