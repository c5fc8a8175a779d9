"""`trunkline tune`: measure this machine, write its hardware profile, and draw the chunk sizes that suit it."""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from trunkline.cli.options import command, short_path

if TYPE_CHECKING:
    import torch

    from trunkline.plan.hardware import Hardware
    from trunkline.plan.survey import Survey
    from trunkline.plan.sweet_spot import Pair

_PATIENCE = timedelta(minutes=30)  # the longest that a rank may be behind another


@command(epilog="Measurements, the file, and how plans use it: docs/plan.md.")
def tune(
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Profile to write (.toml), or with --hardware the picture (.png); default: your own."
        ),
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder whose speed is measured; default: the one for temporary files."),
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="auto|cpu|cuda", help="Device to measure.")] = None,
    head_dims: Annotated[
        str | None, typer.Option(metavar="D,D,…", help="Head dims of attention; default: 64,128.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(metavar="PROFILE", help="Measure nothing; draw the sweet spot of a known profile.")
    ] = None,
) -> None:
    """Measure this machine for plans: write its hardware profile, and a picture of the chunk sizes that suit it."""
    if hardware is None:
        _tune(output, disk, device or "auto", head_dims or "64,128")
    elif (disk, device, head_dims) != (None, None, None):
        raise ValueError("--hardware measures nothing: leave --disk, --device and --head-dims out, or --hardware.")
    elif not int(os.environ.get("RANK", "0")):
        _draw(hardware, output)


def _tune(output: Path | None, disk: Path | None, device: str, head_dims: str) -> None:
    """Measure this machine, together with the other ranks if torchrun started several; write and show the profile."""
    import torch.distributed as dist

    from trunkline.distributed import failure
    from trunkline.distributed.mesh import init_mesh
    from trunkline.plan import own, tuning
    from trunkline.plan.hardware import Hardware, to_toml
    from trunkline.plan.survey import Survey

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
            _write(to_toml(figures), path)
            _show(measured, path, console)
        if failure.in_job():
            dist.barrier()  # rank 0 may still fail, and the others must learn of it
    if failure.in_job():
        dist.destroy_process_group()


def _draw(name: str, output: Path | None) -> None:
    """Draw the sweet spot of a profile, given by its name or file, and print it in words."""
    from trunkline.plan import hardware, sweet_spot

    known = hardware.load(name)
    path = _picture(Path(f"{known.name}.toml")) if output is None else output
    _check_output(path, ".png")
    console = Console()
    pairs = sweet_spot.sweet_spot(known)
    _say(console, [known.title, *_hidden(pairs, known)])
    sweet_spot.draw(pairs, known, path)
    _say(console, ["", f"Drew {short_path(path)}"])


def _measure(survey: Survey, console: Console) -> None:
    """Run all measurements, with a line for each; on a terminal with a bar below them."""
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
    """Print the profile and the paths of the files, and draw the sweet spot beside the profile."""
    from trunkline.cli.hardware_table import hardware_lines
    from trunkline.distributed import failure
    from trunkline.plan import own, sweet_spot

    devices = measured.devices_per_node if failure.in_job() else 1
    pairs = sweet_spot.sweet_spot(measured, devices=devices)
    _say(console, ["", measured.title, *hardware_lines(measured), *_hidden(pairs, measured), ""])
    name = own.NAME if measured.name == own.NAME else str(path)
    _say(console, [f"Wrote {short_path(path)}: plans take it as hardware={name!r}."])
    picture = _picture(path)
    if sweet_spot.can_draw():
        sweet_spot.draw(pairs, measured, picture, devices=devices)
        _say(console, [f"Drew {short_path(picture)}"])
    else:
        _say(console, [
            "No picture: matplotlib is not installed. pip install 'trunkline[report]', then trunkline tune "
            f"--hardware {name} draws it."
        ])  # fmt: skip


def _hidden(pairs: dict[str, Pair], machine: Hardware) -> list[str]:
    """Return lines that say from which chunk size on attention hides the moves."""
    from trunkline.plan import sweet_spot

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
    from trunkline.train.models import resolve_device

    return resolve_device(name)


def _check_output(path: Path, ending: str) -> None:
    """Refuse a path that cannot be written, before minutes are spent on measuring."""
    if path.suffix != ending:
        raise ValueError(f"--output {path}: give the name of a {ending} file.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"--output {path}: no file can be written there; give another name.")


def _write(text: str, path: Path) -> None:
    """Write a file atomically."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _picture(profile: Path) -> Path:
    return profile.with_name(f"{profile.stem}-sweet-spot.png")


def _say(console: Console, lines: list[str]) -> None:
    # Not wrapped and not marked up: these lines are read by programs too.
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
