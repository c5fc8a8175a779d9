"""`trunkline plan`: whether a recipe fits a machine, with which settings it is fastest, and what it costs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from trunkline.plan.hardware import load
from trunkline.plan.planner import DoesNotFit, Plan, Planner
from trunkline.plan.search_space import Cluster
from trunkline.train.planning import job_of, meta_model_of, written
from trunkline.train.recipe import Recipe
from trunkline.train.run import count_text
from trunkline.train.settings import dump_recipe, load_recipe
from trunkline.units import in_units, parse_bytes


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for.

    Attributes:
        hardware: name or file of a profile.
        gpus: devices.
        host_memory: of a node, with a unit; None is the profile's.
        disk: of a node's scratch disks, with a unit.
        max_length: look for the longest context, not the recipe's own.
        tokens: of a run, whose cost is told; None for the recipe's steps.
        as_json: print JSON.
        write: file for the recipe with the plan's settings.
        attention: kernel whose figures count, such as fa3; None is the profile's default.
        step: folder for what `trunkline report` draws of the plan.
    """

    hardware: str
    gpus: int
    host_memory: str | None = None
    disk: str | None = None
    max_length: bool = False
    tokens: int | None = None
    as_json: bool = False
    write: Path | None = None
    attention: str | None = None
    step: Path | None = None


def run_plan(recipe_path: Path, overrides: Sequence[tuple[str, str]], asked: Asked) -> int:
    """Plan and print.

    Returns:
        The exit code: 1 where nothing fits.
    """
    console, errors = Console(), Console(stderr=True)
    recipe = load_recipe(recipe_path, overrides, notice=lambda text: errors.print(text, style="dim"))
    if asked.write is not None and asked.write.exists():
        raise ValueError(f"--write: '{asked.write}' exists: give another file.")
    if asked.step is not None and asked.step.exists():
        raise ValueError(f"--step: '{asked.step}' exists: give another folder.")
    if asked.tokens is not None and asked.tokens < 1:
        raise ValueError(f"--tokens {asked.tokens}: give a positive number of tokens.")
    if asked.write is not None and asked.disk is not None and recipe.offload_dir is None:
        raise ValueError(
            "--write with --scratch: set offload_dir (in the recipe, or --offload_dir FOLDER) to a folder."
        )
    cluster = _cluster(asked)
    with Bar(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:
        line = bar.add_task("building the model without contents")

        def tell(text: str) -> None:
            bar.update(line, description=f"rehearsed {text}")
            if bar.disable:  # a log: a search of minutes must not be silent
                errors.print(f"rehearsed {text}", highlight=False, markup=False, soft_wrap=True)

        planner = Planner(meta_model_of(recipe), cluster, tell)
        bar.update(line, description="looking for what fits")
        job = job_of(recipe)
        try:
            plan = planner.longest(job) if asked.max_length else planner.best(job)
        except DoesNotFit as error:
            if asked.as_json:
                console.print_json(json.dumps({"fits": False, "why_not": str(error)}))
            else:
                console.print(f"does not fit: {error}", soft_wrap=True, highlight=False, markup=False)
            return 1
        drawn = None
        if asked.step is not None:
            bar.update(line, description="rehearsing the step once more, and without chunks, to draw them")
            title = f"{_described(recipe, planner.model)}, {plan.job.context:,} tokens, {plan.candidate}"
            drawn = planner.timelines(plan, title)
    a_step = plan.job.context * plan.job.batch_size * plan.job.micro_batches
    tokens = asked.tokens or a_step * recipe.steps
    if asked.as_json:
        console.print_json(json.dumps(record(plan, tokens)))
    else:
        show(console, _described(recipe, planner.model), plan, tokens, longest=asked.max_length)
    if asked.step is not None and drawn is not None:
        asked.step.mkdir(parents=True)
        texts = {"plan.json": json.dumps(record(plan, tokens)), "timeline.json": drawn[0].to_json(),
                 "before.json": drawn[1].to_json()}  # fmt: skip
        for name, text in texts.items():
            (asked.step / name).write_text(text, encoding="utf-8")
        errors.print(f"wrote {asked.step}: `trunkline report {asked.step}` draws it", highlight=False, markup=False)
    if asked.write is not None:
        asked.write.write_text(dump_recipe(written(recipe, plan)), encoding="utf-8")
        errors.print(f"wrote {asked.write}", highlight=False)
    return 0


def _described(recipe: Recipe, model: Any) -> str:
    """The model for people: what it is called, and how large it turned out with the recipe's tokenizer."""
    count = sum(parameter.numel() for parameter in model.parameters())
    words = model.config.get_text_config().vocab_size
    return f"{recipe.model.preset or recipe.model.path} ({count_text(count)} parameters, vocabulary {words:,})"


def _cluster(asked: Asked) -> Cluster:
    hardware = load(asked.hardware, attention=asked.attention)
    host = parse_bytes("host_memory", asked.host_memory)
    if host is None and hardware.host_bytes is None:
        raise ValueError(
            f"host_memory: the profile '{hardware.name}' does not say how much a node has: give --host-memory, such as "
            "1TiB."
        )
    disk = parse_bytes("disk", asked.disk) or 0
    return Cluster(hardware, asked.gpus, hardware.host_bytes or 0 if host is None else host, disk)


def record(plan: Plan, tokens: int) -> dict[str, Any]:
    """A plan as JSON: what `trunkline report` reads, and what scripts want.

    Args:
        plan: the plan.
        tokens: of the run whose cost is told.
    """
    rehearsal, step = plan.estimate, plan.estimate.step
    assert step is not None
    return {
        "fits": True,
        "hardware": f"{plan.cluster.devices} x {plan.cluster.hardware.title}",
        "context": plan.job.context,
        "settings": plan.settings,
        "parallel": {
            "dp": plan.candidate.parallel_dims.dp,
            "sp": plan.candidate.parallel_dims.sp,
            "cp": plan.candidate.parallel_dims.cp,
            "tp": plan.candidate.parallel_dims.tp,
            "zero": plan.candidate.sharding_spec.zero,
            "offload": plan.candidate.sharding_spec.offload,
        },
        "seconds": step.seconds,
        "tokens_per_second": step.tokens_per_second * step.devices,
        "mfu": step.mfu,
        "mfu_recompute_counted": step.hardware_utilisation,
        "peaks": {tier: sum(parts.values()) for tier, parts in rehearsal.memory.items()},
        "holders": rehearsal.memory,
        "capacity": {
            "device": plan.cluster.usable_device_bytes,
            "host": plan.cluster.usable_host_bytes,
            "disk": plan.cluster.usable_disk_bytes,
        },
        "exposed": step.exposed,
        "moved": rehearsal.moved,
        "loading": plan.loading,
        "tokens": tokens,
        "gpu_hours": plan.gpu_hours(tokens),
        "others": [{"choice": str(candidate), "seconds": seconds} for candidate, seconds in plan.alternatives],
    }


def show(console: Console, model: str, plan: Plan, tokens: int, *, longest: bool) -> None:
    """A plan for people.

    Args:
        console: where.
        model: what is trained.
        plan: the plan.
        tokens: of the run whose cost is told.
        longest: whether the context was looked for.
    """
    step, cluster, budgets = plan.estimate.step, plan.cluster, plan.budgets
    assert step is not None

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, markup=False)

    mfu = "MFU not countable"
    if step.mfu is not None:
        mfu = f"MFU {step.mfu:.1%} (recomputation counted: {step.hardware_utilisation:.1%})"
    say(f"{model} on {cluster.devices} x {cluster.hardware.title}, attention {cluster.hardware.attention}", "bold")
    say(f"{'longest context' if longest else 'fits'}: {plan.job.context:,} tokens x {plan.job.batch_size}", "green")
    say(f"speed: {duration(step.seconds)} a step, {step.tokens_per_second:,.1f} tokens/s a device, {mfu}")
    say(f"with: {plan.candidate}")
    table = Table(header_style="bold", box=None, pad_edge=False)
    for column, right in (("a rank's memory", False), ("peak", True), ("of", True), ("what holds it", False)):
        table.add_column(column, justify="right" if right else "left", no_wrap=right)
    rooms = {
        "device": cluster.usable_device_bytes,
        "host": cluster.usable_host_bytes,
        "disk": cluster.usable_disk_bytes,
    }
    for tier, parts in plan.estimate.memory.items():
        held = sum(parts.values())
        if held:
            largest = sorted(parts.items(), key=lambda part: -part[1])
            text = ", ".join(f"{what} {in_units(nbytes)}" for what, nbytes in largest if nbytes > held / 50)
            table.add_row(tier, in_units(held), in_units(rooms[tier]), text)
    console.print(table)
    waits = [
        f"{lane} {duration(seconds)} ({seconds / step.seconds:.1%})"
        for lane, seconds in step.exposed.items()
        if seconds > 0
    ]
    moved = [f"{lane} {in_units(nbytes)}" for lane, nbytes in plan.estimate.moved.items() if nbytes]
    say(f"compute waits for: {', '.join(waits) or 'nothing'}")
    say(f"moved a step and rank: {', '.join(moved) or 'nothing'}")
    needed = [f"{tier}_budget {in_units(nbytes)}" for tier, nbytes in plan.estimate.reserved.items() if nbytes]
    needed_budgets = [f"device_budget {in_units(budgets.device)}", *needed]
    say(f"budgets of stream(): {', '.join(needed_budgets)}")
    if plan.loading:
        node = plan.loading * cluster.devices_per_node_used
        text = f"loading: each rank builds the whole model in host memory, {in_units(node)} on a node"
        if node > cluster.host_bytes:
            halved = ", or optimizer.fp32_master false, which halves it" if plan.candidate.sharding_spec.dtype else ""
            text += f", which has {in_units(cluster.host_bytes)}: use nodes with more memory{halved}"
        say(text, "red" if node > cluster.host_bytes else "")
    say(f"cost: {tokens:,} tokens take {plan.gpu_hours(tokens):,.1f} device hours")
    if plan.alternatives:
        say("also rehearsed, and slower:")
    for candidate, seconds in sorted(plan.alternatives, key=lambda other: other[1]):
        say(f"  {seconds / step.seconds:.3f} x the time with {candidate}", "dim")


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
