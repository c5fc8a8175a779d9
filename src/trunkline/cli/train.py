"""`trunkline train`: train by a recipe, then list the files written and commands to try next."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from trunkline.cli.console import say
from trunkline.cli.options import RECIPE_SETTINGS, RecipeArguments, command, short_path, split_recipe_arguments

if TYPE_CHECKING:
    from trunkline.train.recipe import Recipe
    from trunkline.train.run_training import TrainResult


@command(
    context_settings=RECIPE_SETTINGS,
    epilog="All settings: docs/settings.md. An unknown one is answered with the nearest name.",
)
def train(arguments: RecipeArguments) -> None:
    """Train a model by a recipe and write a Hugging Face model folder."""
    from transformers.utils import logging as transformers_logging

    from trunkline.distributed import failure
    from trunkline.train import run_training
    from trunkline.train.display import Display, make_display
    from trunkline.train.load_recipe import load_recipe
    from trunkline.train.world import RankLog, join

    path, overrides = split_recipe_arguments(arguments)
    transformers_logging.disable_progress_bar()  # it would be drawn across the display
    log = RankLog() if int(os.environ.get("RANK", "0")) else None
    console = Console(file=log) if log else Console()
    display = Display(console) if log else make_display(console)
    recipe = load_recipe(path, overrides, notice=display.note)
    world = join(recipe)
    if world.mesh is not None:
        failure.raise_on_sigterm()
    result = run_training.train(recipe, display, world, log)
    world.shut_down()
    if world.is_main:
        say(console, *summary(recipe, result, world.world_size))


def summary(recipe: Recipe, result: TrainResult, processes: int = 1) -> list[str]:
    """Return the lines printed after a run: the loss, the files written, three commands to try next.

    Args:
        recipe: the recipe of the run.
        result: the result of the run.
        processes: number of processes of the run, on all nodes.

    Returns:
        Lines of text. Their commands work unchanged from the current folder.
    """
    from trunkline.train.display import clock_text
    from trunkline.train.output_folder import EVALUATION, EVALUATIONS, PLAN

    steps = result.steps
    folder = short_path(result.output)
    seconds = sum(step.total_seconds for step in steps)
    evaluating = sum(record.seconds for record in result.evaluations)
    beside = f" and {clock_text(evaluating)} of evaluations" if result.evaluations else ""
    tokens = sum(step.tokens for step in steps)
    lines = [
        "",
        f"Done in {clock_text(seconds)}{beside}: "
        f"loss {steps[0].loss:.4f} → {steps[-1].loss:.4f} over {tokens:,} tokens.",
        "",
        f"Wrote {folder}/",
        "  model/         weights, config and tokenizer; AutoModelForCausalLM.from_pretrained loads it",
        f"  metrics.jsonl  {len(steps)} lines: loss, gradient norm, speed, FLOPs, memory, seconds of each part",
        *(["  plan.json      estimate of a step"] if (result.output / PLAN).exists() else []),
        "  timeline.json  one step over time, memory and lanes: "
        f"`{_program('trunkline')} report {shlex.quote(folder)}` draws it",
        *(
            [
                f"  {EVALUATIONS}  {len(result.evaluations)} lines: loss of held-out files, scores of tasks",
                f"  {EVALUATION}/    tables and pictures of the last one",
            ]
            if result.evaluations
            else []
        ),
        "  recipe.yaml    every setting of this run, defaults filled in",
        *(["  logs/          output of the other processes, a file each"] if processes > 1 else []),
        "",
        "Next, for example:",
    ]
    for number, (purpose, line) in enumerate(next_commands(recipe, result, processes), start=1):
        lines += [f"  {number}. {purpose}:", f"     {line}"]
    return lines


def next_commands(recipe: Recipe, result: TrainResult, processes: int = 1) -> list[tuple[str, str]]:
    """Return three things to try: (purpose, command line that works from the current folder)."""
    folder = short_path(result.output)
    start = (
        _program("trunkline") if processes == 1 else f"{_program('torchrun')} --nproc-per-node {processes} -m trunkline"
    )
    again = f"{start} train {shlex.quote(f'{folder}/recipe.yaml')}"
    model = shlex.quote(f"{folder}/model")
    go_on = f"{again} --model.preset null --model.path {model} --output {shlex.quote(f'{folder}-2')}"
    longer = 2 * recipe.context
    if recipe.model.preset is not None and result.cut.longest_document >= longer:
        second = (
            f"Twice the context, {longer:,} tokens, for a few steps",
            f"{again} --context {longer} --steps {min(4, recipe.steps)} --optimizer.warmup_steps 0 "
            f"--output {shlex.quote(f'{folder}-{longer}')}",
        )
    else:
        second = (
            "The same with less memory and more time: keep nothing between forward and backward",
            f"{again} --keep '[]' --output {shlex.quote(f'{folder}-keep-nothing')}",
        )
    code = (
        f"from transformers import pipeline; p = pipeline('text-generation', {f'{folder}/model'!r}); "
        "print(p('def ', max_new_tokens=200)[0]['generated_text'])"
    )
    # Double quotes read better around Python's single ones, where nothing in the path needs more.
    quoted = f'"{code}"' if re.fullmatch(r"[\w./-]+", folder) else shlex.quote(code)
    return [
        ("Go on training from the model just written", go_on),
        second,
        ("Let it write something", f"{_program('python')} -c {quoted}"),
    ]


def _program(name: str) -> str:
    """Return the shell command of a program of this environment: its name if PATH finds it, else its path."""
    program = Path(sys.executable).with_name(name)
    on_path = shutil.which(name)
    return name if on_path is not None and Path(on_path) == program else shlex.quote(short_path(program))
