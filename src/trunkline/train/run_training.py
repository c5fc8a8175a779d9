"""Training run from recipe to output folder. Its order finds mistakes before they cost time."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trunkline
from trunkline.data import CutReport, cut_documents, find_files, load_encoder, read_documents
from trunkline.distributed import failure
from trunkline.distributed.mesh import heads_of
from trunkline.hf.flops import UncountedModuleError, attention_flops, model_flops
from trunkline.train.build_model import build_config, build_model, tokenizer_spec
from trunkline.train.display import Display, RunHeader
from trunkline.train.evaluating import EvaluationRecord, Evaluator
from trunkline.train.optimizer import Optimizer
from trunkline.train.output_folder import LOGS, PLAN, TIMELINE, OutputFolder
from trunkline.train.part_timer import PartTimer
from trunkline.train.preflight import PreflightResult, preflight
from trunkline.train.recipe import Recipe
from trunkline.train.step_metrics import StepMetrics
from trunkline.train.step_recorder import StepRecorder
from trunkline.train.trainer import Trainer, progress_hook
from trunkline.train.world import RankLog, World, expected_seconds
from trunkline.utils.devices import parse_device


@dataclass(frozen=True)
class TrainResult:
    """Result of a run.

    Attributes:
        output: absolute path of the output folder.
        steps: metrics of all steps; memory, parts and lanes in them are this rank's.
        cut: report of the data used and dropped.
        evaluations: records of the evaluations during the run.
    """

    output: Path
    steps: list[StepMetrics]
    cut: CutReport
    evaluations: list[EvaluationRecord] = field(default_factory=list)


def train(recipe: Recipe, display: Display, world: World | None = None, log: RankLog | None = None) -> TrainResult:
    """Train by a recipe and write its output folder.

    An error before the end of the first step leaves nothing on disk. After a later one the metrics stay, and a note of
    the error says where.

    Args:
        recipe: settings.
        display: display of the run.
        world: processes of the run, all of which call this; None for this one alone.
        log: output of `display` on a rank other than 0; it goes to a file in the output folder.

    Returns:
        The output folder, the metrics of all steps, the report of the data, and the evaluations.

    Raises:
        ValueError: recipe, data or model folder is wrong; the text names the setting and the fix.
        TrainingDivergedError: loss or gradient norm became non-finite.
        RankError: another process of the run failed.
    """
    world = world or World()
    with contextlib.nullcontext() if world.mesh is None else failure.guard():
        return _train(recipe, display, world, log)


def _train(recipe: Recipe, display: Display, world: World, log: RankLog | None) -> TrainResult:
    output = OutputFolder(recipe) if world.is_main else None
    device = parse_device(recipe.device)
    encoder = load_encoder(tokenizer_spec(recipe))
    config = build_config(recipe, encoder)
    world.parallel_dims.check_heads(*heads_of(config))
    files = find_files(recipe.data.files)
    display.note(f"reading {len(files):,} files")
    samples = cut_documents(read_documents(files, text_field=recipe.data.text_field), encoder, context=recipe.context)
    evaluator = Evaluator(recipe, encoder, files, display.note) if recipe.evaluate.every is not None else None
    ready = preflight(recipe, config, world, device, display.note) if recipe.preflight else PreflightResult(recipe)
    recipe = ready.recipe
    if output is not None:
        output.recipe = recipe
    if ready.note:
        display.note(ready.note)
    model, flops, attention_share = _model(recipe, config, device, world, display)
    clock = PartTimer(device)
    recorder = None
    if world.is_main:
        # The second step: the first one also allocates memory and loads kernels.
        recorder = StepRecorder(model, device, clock, step=min(1, recipe.steps - 1),
                                title=_title(recipe, device, world), devices=world.world_size)  # fmt: skip
    trunkline.stream(model, **recipe.stream_settings, mesh=world.mesh, progress=progress_hook(clock, display, recorder))
    if evaluator is not None:
        evaluator.check(model)
    trainer = Trainer(recipe, model, samples, Optimizer(model, recipe.optimizer), clock, display, device, flops, world,
                      recorder=recorder)  # fmt: skip
    info = RunHeader(
        headline=_headline(recipe, model, device, samples.report, world),
        steps=recipe.steps,
        log_every=recipe.log_every,
        num_micro_batches=recipe.gradient_accumulation,
        attention_share=attention_share,
        evaluate_every=recipe.evaluate.every,
    )
    steps: list[StepMetrics] = []
    evaluations: list[EvaluationRecord] = []
    with contextlib.nullcontext() if output is None else output:
        folder = world.share_folder(None if output is None else output.partial)
        if log is not None:
            log.open(folder / LOGS / f"rank-{world.rank}.log")
        if output is not None and (plan := ready.plan_json()) is not None:
            output.write_text(PLAN, plan)
        torch.manual_seed(recipe.seed)
        display.begin(info)
        try:
            for index in range(recipe.steps):
                metrics = trainer.step(index)
                if output is not None:
                    output.write(metrics)
                    if recorder is not None and recorder.step == index and trainer.timeline is not None:
                        output.write_text(TIMELINE, trainer.timeline.to_json())
                display.step(metrics)
                steps.append(metrics)
                if evaluator is not None and evaluator.is_due(index + 1):
                    record, found = evaluator.run(model, index + 1, clock, display.evaluating)
                    notes = [] if output is None else output.write_evaluation(record, found)
                    for note in [] if evaluations else notes:
                        display.note(note)
                    display.evaluated(record)
                    evaluations.append(record)
                world.expect_step_seconds(max(step.total_seconds for step in steps))
        finally:
            display.end()
        trunkline.unstream(model)
        world.allow_long_waits()  # for saving
        saved, state_dict = world.gather_model(model, getattr(torch, recipe.model.dtype))
        if output is not None:
            output.finish(saved, encoder.tokenizer, state_dict)
        world.barrier()
    return TrainResult(Path(recipe.output).expanduser().absolute(), steps, samples.report, evaluations)


def _model(
    recipe: Recipe, config: Any, device: torch.device, world: World, display: Display
) -> tuple[nn.Module, int | None, float]:
    """Build the model and shard it; return it, its FLOPs a sample, and attention's share of them.

    Where FLOPs cannot be counted they are None, and the share 0.5.
    """
    ranks, parallel_dims, dtype = recipe.ranks, world.parallel_dims, recipe.model.dtype
    sharded = bool(ranks.zero) and (parallel_dims.dp * parallel_dims.sp * parallel_dims.cp > 1 or ranks.offload)
    # With sharding, the shards are the float32 masters; gathering them rounds to the model's dtype.
    masters = sharded and dtype != "float32" and recipe.optimizer.fp32_master
    wide = recipe  # with the dtype of the masters
    if masters:
        wide = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": "float32"})})
    # A model that is sharded later need not fit on one device: build it in host memory.
    model = build_model(wide, config, torch.device("cpu") if sharded or parallel_dims.tp > 1 else device)
    flops = _flops(model, recipe.context, display)
    attention_share = 0.5 if flops is None else attention_flops(model, seq_len=recipe.context) / flops
    if world.mesh is None:
        return model, flops, attention_share
    world.barrier()  # ranks load at the speed of their disks: meet before the timeout is shortened
    if flops is not None:
        per_rank = flops * recipe.batch_size * recipe.gradient_accumulation // world.world_size
        world.expect_step_seconds(expected_seconds(per_rank, device, getattr(torch, dtype)))
    if sharded or parallel_dims.tp > 1:
        param_dtype = getattr(torch, dtype) if masters else None
        trunkline.shard(model, world.mesh, zero=ranks.zero, param_dtype=param_dtype, offload=ranks.offload and sharded)
    return model, flops, attention_share


def _flops(model: nn.Module, context: int, display: Display) -> int | None:
    try:
        return model_flops(model, seq_len=context)
    except UncountedModuleError as error:
        display.note(f"note: {error} model_flops is null in metrics.jsonl.")
        return None


def _headline(recipe: Recipe, model: nn.Module, device: torch.device, cut: CutReport, world: World) -> list[str]:
    count = sum(parameter.numel() for parameter in model.parameters())
    name = recipe.model.preset or recipe.model.path
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    accumulation = f" x {recipe.gradient_accumulation} micro-batches" if recipe.gradient_accumulation > 1 else ""
    samples = "1 sample" if recipe.batch_size == 1 else f"{recipe.batch_size} samples"
    processes = (
        f", {world.world_size} processes ({world.parallel_dims}, zero={recipe.ranks.zero})"
        if world.world_size > 1
        else ""
    )
    processes += ", offload" if recipe.ranks.offload else ""
    return [
        f"trunkline {trunkline.__version__}: {name}, {count_text(count)} parameters in {recipe.model.dtype} on "
        f"{place}{processes}",
        f"context {recipe.context:,} tokens (global), chunk_size {recipe.chunk_size}, "
        f"keep [{', '.join(recipe.keep)}], {samples}{accumulation} a step, {recipe.steps} steps",
        f"data: {cut}",
    ]


def _title(recipe: Recipe, device: torch.device, world: World) -> str:
    """Return the title of the recorded step's timeline."""
    name = recipe.model.preset or Path(recipe.model.path or "").name
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    chunk = trunkline.StreamConfig(chunk_size=recipe.chunk_size).chunk_tokens(device)
    count = f"{world.world_size} x " if world.world_size > 1 else ""
    return f"{name}, {recipe.context:,} tokens in chunks of {chunk:,}, {count}{place}"


def count_text(count: int) -> str:
    """Return a count as 377.73K or 8.03B."""
    for suffix, unit in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= unit:
            return f"{count / unit:.2f}{suffix}"
    return str(count)
