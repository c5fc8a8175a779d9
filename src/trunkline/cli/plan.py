"""`trunkline plan`: whether a recipe fits a machine, its fastest settings there, and its cost."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from trunkline.cli.console import say
from trunkline.cli.options import RECIPE_SETTINGS, RecipeArguments, command, split_recipe_arguments
from trunkline.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from trunkline.plan.planner import Plan
    from trunkline.train.recipe import Recipe


@command(
    context_settings=RECIPE_SETTINGS,
    epilog="Estimates, and profiles of hardware: docs/plan.md. No data is read. Exit code: 1 if nothing fits.",
)
def plan(
    arguments: RecipeArguments,
    hardware: Annotated[
        str, typer.Option(help="Profile, such as a100-80g or h100-sxm, or a file that trunkline tune wrote.")
    ],
    gpus: Annotated[int, typer.Option(help="Number of devices.")] = 1,
    host_memory: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Memory of a node, such as 1TiB; default: the profile's.")
    ] = None,
    scratch: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Scratch disk of a node, such as 4TB; default: none.")
    ] = None,
    max_length: Annotated[bool, typer.Option("--max-length", help="Find the longest context that fits.")] = False,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the run, for its cost; default: the recipe's steps.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the recipe with the plan's settings to a new file.")
    ] = None,
    step: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write the estimated step, with and without chunks, for trunkline report."),
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help="Attention kernel to estimate with, such as fa3; default: the profile's.")
    ] = None,
) -> int:
    """Say whether a recipe fits a machine (which you need not own), its fastest settings there, and its cost."""
    from trunkline.plan.hardware import load
    from trunkline.plan.planner import DoesNotFit, Planner
    from trunkline.plan.search_space import Cluster
    from trunkline.train.load_recipe import dump_recipe, load_recipe
    from trunkline.train.planning import job_of, meta_model_of, planned_recipe

    console, errors = Console(), Console(stderr=True)
    path, overrides = split_recipe_arguments(arguments)
    recipe = load_recipe(path, overrides, notice=lambda text: errors.print(text, style="dim"))
    for option, target in (("--write", write), ("--step", step)):
        if target is not None and target.exists():
            raise ValueError(f"{option}: '{target}' exists: give another {'file' if target is write else 'folder'}.")
    if write is not None and scratch is not None and recipe.offload_dir is None:
        raise ValueError(
            "--write with --scratch: set offload_dir (in the recipe, or --offload_dir FOLDER) to a folder."
        )
    profile = load(hardware, attention=attention)
    node_bytes = parse_bytes("host_memory", host_memory)
    if node_bytes is None:
        node_bytes = profile.host_bytes
    if node_bytes is None:
        raise ValueError(
            f"host_memory: the profile '{profile.name}' does not have a node's memory: give --host-memory, such as "
            "1TiB."
        )
    cluster = Cluster(profile, gpus, node_bytes, parse_bytes("scratch", scratch) or 0)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not sys.stderr.isatty()) as bar:
        line = bar.add_task("building the model without weights")

        def tell(text: str) -> None:
            bar.update(line, description=f"simulated {text}")
            if bar.disable:  # a search takes minutes; a log must not be silent for so long
                say(errors, f"simulated {text}")

        planner = Planner(meta_model_of(recipe), cluster, tell)
        described = _describe(recipe, planner.model)
        bar.update(line, description="looking for settings that fit")
        job = job_of(recipe)
        try:
            best = planner.longest(job) if max_length else planner.best(job)
        except DoesNotFit as error:
            if as_json:
                console.print_json(json.dumps({"fits": False, "why_not": str(error)}))
            else:
                say(console, f"does not fit: {error}")
            return 1
        drawn = None
        if step is not None:
            bar.update(line, description="estimating the step again, with and without chunks, to draw it")
            drawn = planner.timelines(best, f"{described}, {best.job.context:,} tokens, {best.candidate}")
    tokens = tokens or best.job.context * best.job.batch_size * best.job.micro_batches * recipe.steps
    figures = json.dumps(record(best, tokens))
    if as_json:
        console.print_json(figures)
    else:
        show(console, described, best, tokens, longest=max_length)
    if step is not None and drawn is not None:
        step.mkdir(parents=True)
        texts = {"plan.json": figures, "timeline.json": drawn[0].to_json(), "before.json": drawn[1].to_json()}
        for name, text in texts.items():
            (step / name).write_text(text, encoding="utf-8")
        say(errors, f"wrote {step}: `trunkline report {step}` draws it", wrap=True)
    if write is not None:
        write.write_text(dump_recipe(planned_recipe(recipe, best)), encoding="utf-8")
        say(errors, f"wrote {write}", wrap=True)
    return 0


def _describe(recipe: Recipe, model: Any) -> str:
    """Return the model's name, and its size with the recipe's tokenizer."""
    from trunkline.train.run_training import count_text

    count = sum(parameter.numel() for parameter in model.parameters())
    words = model.config.get_text_config().vocab_size
    return f"{recipe.model.preset or recipe.model.path} ({count_text(count)} parameters, vocabulary {words:,})"


def record(plan: Plan, tokens: int) -> dict[str, Any]:
    """Return a plan as a JSON object; `trunkline report` reads it, too.

    Seconds are those of a micro-batch. Tokens/s and device hours are those of all devices. Bytes and waits are those of
    one rank.

    Args:
        plan: the plan, with the time of its step.
        tokens: tokens of the run over all devices, for its cost.
    """
    step = plan.timing
    return {
        "fits": True,
        "hardware": f"{plan.cluster.devices} x {plan.cluster.hardware.title}",
        "context": plan.job.context,
        **plan.settings,  # by group: streaming, memory, ranks
        "seconds": step.seconds,
        "tokens_per_second": step.tokens_per_second * step.devices,
        "mfu": step.mfu,
        "mfu_recompute_counted": step.hardware_utilisation,
        "peaks": {tier: sum(parts.values()) for tier, parts in plan.estimate.memory.items()},
        "holders": plan.estimate.memory,
        "capacity": plan.cluster.usable_bytes,
        "exposed": step.exposed,
        "moved": plan.estimate.moved,
        "loading": plan.loading,
        "tokens": tokens,
        "gpu_hours": plan.gpu_hours(tokens),
        "alternatives": [{"candidate": str(candidate), "seconds": seconds} for candidate, seconds in plan.alternatives],
    }


def show(console: Console, model: str, plan: Plan, tokens: int, *, longest: bool) -> None:
    """Print a plan: what fits, speed, memory of a rank by tier, waits, cost, slower settings.

    Args:
        console: where to print.
        model: name and size of the model.
        plan: the plan, with the time of its step.
        tokens: tokens of the run over all devices, for its cost.
        longest: whether the context is the longest that fits, not the recipe's.
    """
    step, cluster, tell = plan.timing, plan.cluster, partial(say, console, wrap=True)
    mfu = "MFU not countable"
    if step.mfu is not None:
        mfu = f"MFU {step.mfu:.1%} (recomputation counted: {step.hardware_utilisation:.1%})"
    attention = f"attention {cluster.hardware.attention_kernel}"
    tell(f"{model} on {cluster.devices} x {cluster.hardware.title}, {attention}", style="bold")
    tell(
        f"{'longest context' if longest else 'fits'}: {plan.job.context:,} tokens x {plan.job.batch_size}",
        style="green",
    )
    tell(f"speed: {duration(step.seconds)} a step, {step.tokens_per_second:,.1f} tokens/s a device, {mfu}")
    for group, settings in plan.settings.items():
        tell(f"{group}: {', '.join(f'{name} {setting_text(name, value)}' for name, value in settings.items())}")
    table = Table(header_style="bold", box=None, pad_edge=False)
    for column, right in (("a rank's memory", False), ("peak", True), ("of", True), ("held by", False)):
        table.add_column(column, justify="right" if right else "left", no_wrap=right)
    for tier, parts in plan.estimate.memory.items():
        held = sum(parts.values())
        if held:
            largest = sorted(parts.items(), key=lambda part: -part[1])
            text = ", ".join(f"{what} {format_bytes(nbytes)}" for what, nbytes in largest if nbytes > held / 50)
            table.add_row(tier, format_bytes(held), format_bytes(cluster.usable_bytes[tier]), text)
    console.print(table)
    waits = [
        f"{lane} {duration(seconds)} ({seconds / step.seconds:.1%})"
        for lane, seconds in step.exposed.items()
        if seconds > 0
    ]
    moved = [f"{lane} {format_bytes(nbytes)}" for lane, nbytes in plan.estimate.moved.items() if nbytes]
    tell(f"compute waits for: {', '.join(waits) or 'nothing'}")
    tell(f"moved a step and rank: {', '.join(moved) or 'nothing'}")
    if plan.loading:
        node = plan.loading * cluster.devices_per_node
        text = f"loading: each rank builds the whole model in host memory, {format_bytes(node)} on a node"
        if node > cluster.host_bytes:
            halved = ", or optimizer.fp32_master false, which halves it" if plan.candidate.sharding_spec.dtype else ""
            text += f", which has {format_bytes(cluster.host_bytes)}: use nodes with more memory{halved}"
        tell(text, style="red" if node > cluster.host_bytes else "")
    tell(f"cost: {tokens:,} tokens take {plan.gpu_hours(tokens):,.1f} device hours")
    if plan.alternatives:
        tell("also simulated, and slower:")
    for candidate, seconds in sorted(plan.alternatives, key=lambda other: other[1]):
        tell(f"  {seconds / step.seconds:.3f} x the time with {candidate}", style="dim")


def setting_text(name: str, value: Any) -> str:
    """Return the value of a setting for people: bytes with a unit, thousands apart, lists in brackets."""
    if name.endswith("_budget") and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return str(value) if isinstance(value, str | Path) else f"[{', '.join(value)}]"


def duration(seconds: float) -> str:
    """Return a duration as text: seconds below 100 s, else minutes or hours."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
