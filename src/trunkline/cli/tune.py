"""`trunkline tune`: measure this machine, write its hardware profile, and draw the chunk sizes that suit it."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from trunkline.cli.console import say
from trunkline.cli.options import command, short_path

if TYPE_CHECKING:
    from trunkline.plan.hardware import Hardware
    from trunkline.plan.machine_survey import MachineSurvey
    from trunkline.plan.sweet_spot import ChunkPair

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
    from trunkline.plan.hardware import Hardware, to_toml
    from trunkline.plan.hardware.hardware_profile import THIS_MACHINE, this_machine_path
    from trunkline.plan.machine_survey import MachineSurvey
    from trunkline.utils.devices import parse_device

    path, name = (this_machine_path(), THIS_MACHINE) if output is None else (output, output.stem)
    dims = _head_dims(head_dims)
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device}: give auto, cpu or cuda.")
    measured_device = parse_device(device)
    _check_output(path, ".toml")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        failure.raise_on_sigterm()
        init_mesh(device_type=measured_device.type, timeout=_PATIENCE)
    with failure.guard() if failure.in_job() else contextlib.nullcontext():
        is_main = not failure.in_job() or dist.get_rank() == 0
        console = Console(quiet=not is_main)
        survey = MachineSurvey(measured_device, disk or Path(tempfile.gettempdir()), dims)
        _measure(survey, console)
        if is_main:
            figures = survey.profile()
            machine = Hardware.from_figures(figures, name=name)
            _write(to_toml(figures), path)
            devices = machine.devices_per_node if failure.in_job() else 1
            _show(machine, path, name if output is None else str(path), devices, console)
        if failure.in_job():
            dist.barrier()  # rank 0 may still fail, and the others must learn of it
    if failure.in_job():
        dist.destroy_process_group()


def _draw(name: str, output: Path | None) -> None:
    """Draw the sweet spot of a profile, given by its name or file, and print it in words."""
    from trunkline.plan import hardware, sweet_spot

    machine = hardware.load(name)
    path = Path(f"{machine.name}-sweet-spot.png") if output is None else output
    _check_output(path, ".png")
    console = Console()
    pairs = sweet_spot.sweet_spot(machine)
    say(console, machine.title, *_crossings(pairs, machine))
    sweet_spot.draw(pairs, machine, path)
    say(console, "", f"Drew {short_path(path)}")


def _measure(survey: MachineSurvey, console: Console) -> None:
    """Run all measurements, with a line for each; on a terminal with a bar below them."""
    width = max(map(len, survey.tasks))
    columns = (SpinnerColumn(), BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.description}"))  # fmt: skip
    say(console, "Measuring this machine; other programs that are busy now make it look slower.")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(survey.tasks))
        for task in survey.tasks:
            progress.update(bar, description=task)
            start = time.perf_counter()
            survey.run(task)
            progress.advance(bar)
            say(console, f"  {task:<{width}}  {time.perf_counter() - start:6.1f} s")


def _show(machine: Hardware, path: Path, name: str, devices: int, console: Console) -> None:
    """Print the profile and the paths of the files, and draw the sweet spot beside the profile."""
    from trunkline.cli.hardware_table import hardware_lines
    from trunkline.plan import sweet_spot

    pairs = sweet_spot.sweet_spot(machine, devices=devices)
    say(console, "", machine.title, *hardware_lines(machine), *_crossings(pairs, machine), "")
    say(console, f"Wrote {short_path(path)}: plans take it as hardware={name!r}.")
    picture = path.with_name(f"{path.stem}-sweet-spot.png")
    if sweet_spot.can_draw():
        sweet_spot.draw(pairs, machine, picture, devices=devices)
        say(console, f"Drew {short_path(picture)}")
    else:
        say(console, "No picture: matplotlib is not installed. pip install 'trunkline[report]', then trunkline tune "
             f"--hardware {name} draws it.")  # fmt: skip


def _crossings(pairs: dict[str, ChunkPair], machine: Hardware) -> Iterator[str]:
    """Yield lines that say from which chunk size on attention hides the moves."""
    from trunkline.plan.sweet_spot import LLAMA_3_8B, in_words, route

    yield from ("", f"Keys and values of {LLAMA_3_8B.name} from {route(machine)}, while attention computes")
    yield from (f"  {pair.direction:<10}{in_words(pair)}" for pair in pairs.values())


def _head_dims(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--head-dims {text}: give head dims of models with commas between them, such as 64,128.")
    return sorted({int(part) for part in parts})


def _check_output(path: Path, ending: str) -> None:
    """Make the folder of a path, and refuse one that has another ending or that cannot be written to."""
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
