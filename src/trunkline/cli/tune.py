"""`trunkline tune`: measure this machine, write its profile, draw its sweet spot, and say what was found."""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from trunkline.cli.found import found_lines
from trunkline.distributed import failure
from trunkline.distributed.mesh import init_mesh
from trunkline.plan import hardware as profiles
from trunkline.plan import own, sweet_spot, tuning
from trunkline.plan.hardware import Hardware
from trunkline.plan.survey import Survey
from trunkline.train.models import resolve_device

_PATIENCE = timedelta(minutes=30)  # the longest that a rank may be behind another


def run_tune(output: Path | None, disk: Path | None, device: str, head_dims: str) -> None:
    """Measure this machine, together with the other ranks where torchrun has started several.

    Args:
        output: profile to write; None for the user's own.
        disk: folder whose speed is measured; None for the one of temporary files.
        device: `auto`, `cpu` or `cuda`.
        head_dims: of attention, with commas between them.

    Raises:
        ValueError: an option is out of range, or a folder cannot be written to.
        RankError: another rank has failed.
    """
    path = own.path() if output is None else output
    dims = _head_dims(head_dims)
    kind = _device(device)
    _check_output(path, ".toml")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        failure.heed_termination()
        init_mesh(device_type=kind.type, timeout=_PATIENCE)
    with failure.guard() if failure.in_job() else contextlib.nullcontext():
        is_main = not failure.in_job() or dist.get_rank() == 0
        console = Console(quiet=not is_main)
        survey = Survey(kind, disk or tuning.default_folder(), dims)
        _measure(survey, console)
        if is_main:
            figures = survey.profile()
            measured = Hardware.from_figures(figures, name=own.NAME if output is None else path.stem)
            _write(profiles.to_toml(figures), path)
            _show(measured, path, console)
        if failure.in_job():
            dist.barrier()  # rank 0 may still fail, of which the others are to know
    if failure.in_job():
        dist.destroy_process_group()


def run_drawing(name: str, output: Path | None) -> None:
    """Draw the sweet spot of a profile, and say where it lies.

    Args:
        name: of the profile, or its file.
        output: the picture; None for one in the current folder.

    Raises:
        ValueError: there is no such profile, the picture cannot be written there, or matplotlib is not installed.
    """
    if int(os.environ.get("RANK", "0")):
        return
    known = profiles.load(name)
    path = _picture(Path(f"{known.name}.toml")) if output is None else output
    _check_output(path, ".png")
    console = Console()
    pairs = sweet_spot.sweet_spot(known)
    _say(console, [known.title, *_hidden(pairs, known)])
    sweet_spot.draw(pairs, known, path)
    _say(console, ["", f"Drew {_short(path)}"])


def _measure(survey: Survey, console: Console) -> None:
    """Run all tasks, a line for each; on a terminal with a bar below them."""
    width = max(len(task.name) for task in survey.tasks)
    columns = (SpinnerColumn(), BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.description}"))  # fmt: skip
    _say(console, ["Measuring this machine; other programs that are busy now make it look slower."])
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(survey.tasks))
        for task in survey.tasks:
            progress.update(bar, description=task.name)
            start = time.perf_counter()
            survey.run(task)
            progress.advance(bar)
            _say(console, [f"  {task.name:<{width}}  {time.perf_counter() - start:6.1f} s"])


def _show(measured: Hardware, path: Path, console: Console) -> None:
    """Say what was found and where the files are, and draw the sweet spot beside the profile."""
    devices = measured.devices_per_node if failure.in_job() else 1
    pairs = sweet_spot.sweet_spot(measured, devices=devices)
    _say(console, ["", measured.title, *found_lines(measured), *_hidden(pairs, measured), ""])
    name = own.NAME if measured.name == own.NAME else str(path)
    _say(console, [f"Wrote {_short(path)}: plans take it as hardware={name!r}."])
    picture = _picture(path)
    if sweet_spot.can_draw():
        sweet_spot.draw(pairs, measured, picture, devices=devices)
        _say(console, [f"Drew {_short(picture)}"])
    else:
        _say(console, [
            "No picture: matplotlib is not installed. pip install 'trunkline[report]', then trunkline tune "
            f"--hardware {name} draws it."
        ])  # fmt: skip


def _hidden(pairs: dict[str, sweet_spot.Pair], machine: Hardware) -> list[str]:
    """In which chunks attention hides the moves."""
    source = sweet_spot.route(machine)
    lines = [f"  {pair.direction:<10}{sweet_spot.in_words(pair)}" for pair in pairs.values()]
    return ["", f"Keys and values of {sweet_spot.Shape().name} from {source}, while attention computes", *lines]


def _head_dims(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--head-dims {text}: give head dims of models with commas between them, such as 64,128.")
    return sorted({int(part) for part in parts})


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {name}: give auto, cpu or cuda.")
    return resolve_device(name)


def _check_output(path: Path, ending: str) -> None:
    """Refuse before the minutes are spent what cannot be written after them."""
    if path.suffix != ending:
        raise ValueError(f"--output {path}: give the name of a {ending} file.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"--output {path}: no file can be written there; give another name.")


def _write(text: str, path: Path) -> None:
    """Write a file that is there as a whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _picture(profile: Path) -> Path:
    return profile.with_name(f"{profile.stem}-sweet-spot.png")


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _say(console: Console, lines: list[str]) -> None:
    # Not wrapped and not marked up: these lines are read by programs too.
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
