"""One training run from recipe to output folder, in the order that finds mistakes before it costs time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import trunkline
from trunkline.data import CutReport, cut_documents, find_files, load_encoder, read_documents
from trunkline.flops import UncountedModuleError, attention_flops, model_flops
from trunkline.train.clock import PartClock
from trunkline.train.display import Display, RunInfo
from trunkline.train.loop import Monitor, Trainer
from trunkline.train.metrics import StepMetrics
from trunkline.train.models import build_config, build_model, resolve_device, tokenizer_spec
from trunkline.train.optimizer import Optimizer
from trunkline.train.output import OutputFolder
from trunkline.train.recipe import Recipe


@dataclass(frozen=True)
class RunResult:
    """What a run leaves.

    Attributes:
        output: The output folder.
        steps: The records of all steps.
        cut: What of the data was used.
    """

    output: Path
    steps: list[StepMetrics]
    cut: CutReport


def train(recipe: Recipe, display: Display) -> RunResult:
    """Train by a recipe and write its output folder.

    Args:
        recipe: The settings.
        display: Told what happens.

    Returns:
        Where the result is, and how it went.

    Raises:
        ValueError: Something in recipe, data or model folder is wrong; the text names the setting and the mend, and
            nothing was written.
        TrainingDivergedError: Loss or gradient became non-finite.
    """
    output = OutputFolder(recipe)
    device = resolve_device(recipe.device)
    encoder = load_encoder(tokenizer_spec(recipe))
    config = build_config(recipe, encoder)
    files = find_files(recipe.data.files)
    display.note(f"reading {len(files):,} files")
    samples = cut_documents(read_documents(files, text_field=recipe.data.text_field), encoder, context=recipe.context)
    model = build_model(recipe, config, device)
    flops = _flops(model, recipe.context, display)
    clock = PartClock(device)
    trunkline.stream(model, **recipe.stream_settings, progress=Monitor(clock, display))
    trainer = Trainer(recipe, model, samples, Optimizer(model, recipe.optimizer), clock, display, device, flops)
    info = RunInfo(
        headline=_headline(recipe, model, device, samples.report),
        steps=recipe.steps,
        log_every=recipe.log_every,
        num_micro_batches=recipe.gradient_accumulation,
        attention_share=0.5 if flops is None else attention_flops(model, seq_len=recipe.context) / flops,
    )
    steps: list[StepMetrics] = []
    with output:
        torch.manual_seed(recipe.seed)
        display.begin(info)
        try:
            for index in range(recipe.steps):
                metrics = trainer.step(index)
                output.write(metrics)
                display.step(metrics)
                steps.append(metrics)
        finally:
            display.end()
        trunkline.unstream(model)
        output.finish(model, encoder.tokenizer)
    return RunResult(output.path, steps, samples.report)


def _flops(model: nn.Module, context: int, display: Display) -> int | None:
    try:
        return model_flops(model, seq_len=context)
    except UncountedModuleError as error:
        display.note(f"note: {error} model_flops is null in metrics.jsonl.")
        return None


def _headline(recipe: Recipe, model: nn.Module, device: torch.device, cut: CutReport) -> list[str]:
    count = sum(parameter.numel() for parameter in model.parameters())
    name = recipe.model.preset or recipe.model.path
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    accumulation = f" x {recipe.gradient_accumulation} micro-batches" if recipe.gradient_accumulation > 1 else ""
    samples = "1 sample" if recipe.batch_size == 1 else f"{recipe.batch_size} samples"
    return [
        f"trunkline {trunkline.__version__}: {name}, {_count_text(count)} parameters in {recipe.model.dtype} on "
        f"{place}",
        f"context {recipe.context:,} tokens (global), chunk_size {recipe.chunk_size}, "
        f"keep [{', '.join(recipe.keep)}], {samples}{accumulation} a step, {recipe.steps} steps",
        f"data: {cut}",
    ]


def _count_text(count: int) -> str:
    for suffix, unit in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= unit:
            return f"{count / unit:.2f}{suffix}"
    return str(count)
