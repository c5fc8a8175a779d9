"""The application: its commands, and what becomes of errors.

Exit codes: 0 done; 1 the run failed (diverged), or the doctor found that training would; 2 something the user can mend,
told in one paragraph; 130 interrupted.
Torch and transformers are imported by the commands that need them, so `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from trunkline.cli.arguments import split_arguments

Job = Callable[[], int | None]  # its exit code; None is 0

# typer carries its own click or takes the installed one, by version; this is that one's base of all usage errors.
_COMMAND_LINE_ERROR: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

PACKAGE = Path(__file__).resolve().parent.parent

app = typer.Typer(
    name="trunkline",
    help="Train Hugging Face language models on very long contexts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


# Options of all commands that load a model and run it in chunks.
_Dtype = Annotated[str, typer.Option(metavar="auto|bfloat16|float16|float32", help="Of the model.")]
_Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where it runs.")]
_ChunkSize = Annotated[str, typer.Option(metavar="TOKENS|auto", help="Tokens of a sequence in a chunk.")]
_DeviceBudget = Annotated[
    str | None, typer.Option(metavar="BYTES", help="Most of keys and values on the device, such as 20GiB.")
]
_HostBudget = Annotated[str | None, typer.Option(metavar="BYTES", help="Most of the rest in host memory.")]
_OffloadDir = Annotated[Path | None, typer.Option(metavar="FOLDER", help="For what the host has no room for.")]
_DiskBudget = Annotated[str | None, typer.Option(metavar="BYTES", help="Most of that on disk.")]
_Prefetch = Annotated[int | None, typer.Option(help="Tensors of a store on the device at a time, 2 by default.")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"trunkline {version('trunkline')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train Hugging Face language models on very long contexts."""


@app.command(
    "train",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="All settings are in docs/train.md; an unknown one is answered with the nearest name.",
)
def train_command(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [--dotted.key VALUE]...",
            help="YAML recipe, then settings that win over it, such as --steps 10 or --optimizer.lr=3e-4.",
        ),
    ],
) -> Job:
    """Train a model by a recipe and write a Hugging Face model folder."""

    def job() -> None:
        from trunkline.cli.train import run_train

        run_train(*split_arguments(arguments))

    return job


@app.command(
    "plan",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="How a plan is made, and what the profiles of hardware say: docs/plan.md. Exit code: 1 where nothing fits.",
)
def plan_command(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE [--dotted.key VALUE]...", help="As for trunkline train; no data is read."),
    ],
    hardware: Annotated[
        str, typer.Option(help="Name of a profile, such as a100-80g or h100-sxm, or file of one, as tune writes it.")
    ],
    gpus: Annotated[int, typer.Option(help="Devices in all.")] = 1,
    host_memory: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Memory of a node, such as 1TiB; default: the profile's.")
    ] = None,
    scratch: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Scratch disk of a node, such as 4TB; default: none.")
    ] = None,
    max_length: Annotated[bool, typer.Option("--max-length", help="Look for the longest context that fits.")] = False,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of a run whose cost is told; default: the recipe's steps.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the recipe with the plan's settings.")
    ] = None,
    step: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write the rehearsed step, and the same unchunked, for trunkline report."),
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help="Attention kernel whose figures count, such as fa3; default: the profile's.")
    ] = None,
) -> Job:
    """Say whether a recipe fits a machine, with which settings it is fastest, and what it costs."""

    def job() -> int:
        from trunkline.cli.plan import Asked, run_plan

        asked = Asked(hardware, gpus, host_memory, scratch, max_length, tokens, as_json, write, attention, step)
        return run_plan(*split_arguments(arguments), asked)

    return job


@app.command("doctor", epilog="docs/doctor.md says what each line means. Exit code: 1 where something fails, else 0.")
def doctor_command(
    disk: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder whose speed is measured; by default the one for temporary files."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> Job:
    """Check what training depends on in this machine, and say what to do where something is not well."""

    def job() -> int:
        from trunkline.cli.doctor import run_doctor

        return run_doctor(disk, as_json=as_json)

    return job


@app.command("tune", epilog="What is measured, what the file holds and how plans use it: docs/plan.md.")
def tune_command(
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Profile to write (.toml), or with --hardware the picture (.png); default: your own."
        ),
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder whose speed is measured; by default the one for temporary files."),
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="auto|cpu|cuda", help="What is measured.")] = None,
    head_dims: Annotated[
        str | None, typer.Option(metavar="D,D,…", help="Head dims of attention; default: 64,128.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(metavar="PROFILE", help="Measure nothing: draw the sweet spot of a known profile.")
    ] = None,
) -> Job:
    """Measure this machine for plans: its hardware profile, and a picture of the chunk sizes that suit it."""

    def job() -> None:
        from trunkline.cli.tune import run_drawing, run_tune

        if hardware is None:
            run_tune(output, disk, device or "auto", head_dims or "64,128")
        elif (disk, device, head_dims) != (None, None, None):
            raise ValueError("--hardware measures nothing: leave --disk, --device and --head-dims out, or --hardware.")
        else:
            run_drawing(hardware, output)

    return job


@app.command("report", epilog="What a run's folder may hold, and how each figure is counted: docs/report.md.")
def report_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, such as the output of trunkline train.")],
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder to write; default: report in the run's folder.")
    ] = None,
) -> Job:
    """Write a page about a training run or a rehearsed step: one HTML file, pictures, a trace."""

    def job() -> None:
        from trunkline.cli.report import run_report

        run_report(run, output)

    return job


@app.command(
    "generate", epilog="How prompts are read, where keys and values rest, and caches on disk: docs/generate.md."
)
def generate_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a Hugging Face model with its tokenizer.")],
    file: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Text of the prompt, - for standard input; may be repeated."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text right behind that of the files.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to write; 0 with --save-cache reads only.")] = 256,
    temperature: Annotated[float, typer.Option(help="Of sampling; 0 takes the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that make up this share.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from so many of the likeliest tokens; 0 for all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the tokenizer's chat template.")] = False,
    dtype: _Dtype = "auto",
    device: _Device = "auto",
    chunk_size: _ChunkSize = "auto",
    device_budget: _DeviceBudget = None,
    host_budget: _HostBudget = None,
    offload_dir: _OffloadDir = None,
    disk_budget: _DiskBudget = None,
    prefetch: _Prefetch = None,
    save_cache: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write what was read, to go on from another time.")
    ] = None,
    load_cache: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Go on from what was read and written there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: the text, speeds, peaks.")] = False,
) -> Job:
    """Read a prompt of any length, and print what a model writes behind it."""

    def job() -> None:
        from trunkline.cli.generate import Asked, run_generate

        stream = _stream_settings(chunk_size, device_budget, host_budget, offload_dir, disk_budget, prefetch)
        run_generate(
            Asked(model, file or (), prompt, max_new_tokens, dtype, device, temperature, top_p, top_k, seed, chat,
                  save_cache, load_cache, as_json, stream)
        )  # fmt: skip

    return job


@app.command("evaluate", epilog="What each task asks, what counts, and what is written: docs/evaluate.md.")
def evaluate_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a Hugging Face model with its tokenizer.")],
    tasks: Annotated[
        str | None,
        typer.Option(metavar="TASK,…", help="Names out of docs/evaluate.md, or none; default: all that fit."),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="4K,16K,…", help="Tokens of samples; default: 4K, 8K, … 128K, as far as the model goes."),
    ] = None,
    depths: Annotated[int, typer.Option(help="Places of answers in each haystack; they cost no more time.")] = 11,
    samples: Annotated[int, typer.Option(help="Haystacks of each task and length.")] = 5,
    seed: Annotated[int, typer.Option(help="Of names, numbers and texts.")] = 0,
    threshold: Annotated[float, typer.Option(help="Least share of answers at an effective length.")] = 0.85,
    generated: Annotated[
        bool, typer.Option("--generated", help="Have the model answer in its own words, too; takes longer.")
    ] = False,
    haystack: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Your text around needles; may be repeated.")
    ] = None,
    perplexity: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Text whose perplexity is measured, by position; may be repeated."),
    ] = None,
    dtype: _Dtype = "auto",
    device: _Device = "auto",
    chunk_size: _ChunkSize = "auto",
    device_budget: _DeviceBudget = None,
    host_budget: _HostBudget = None,
    offload_dir: _OffloadDir = None,
    disk_budget: _DiskBudget = None,
    prefetch: _Prefetch = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder to write: tables, JSON, CSV, heat maps.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier evaluation there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print results.json instead of tables.")] = False,
) -> Job:
    """Say how far a model uses its context: long-context tasks, perplexity by position."""

    def job() -> None:
        from trunkline.cli.evaluate import Asked, run_evaluate

        run_evaluate(
            Asked(model, tasks, lengths, depths, samples, seed, threshold, generated, haystack or (), perplexity or (),
                  dtype, device, output, overwrite, as_json,
                  _stream_settings(chunk_size, device_budget, host_budget, offload_dir, disk_budget, prefetch))
        )  # fmt: skip

    return job


def _stream_settings(
    chunk_size: str,
    device_budget: str | None,
    host_budget: str | None,
    offload_dir: Path | None,
    disk_budget: str | None,
    prefetch: int | None,
) -> dict[str, Any]:
    """Settings of `trunkline.stream`, those that were given."""
    given = {
        "device_budget": device_budget,
        "host_budget": host_budget,
        "offload_dir": offload_dir,
        "disk_budget": disk_budget,
        "prefetch": prefetch,
    }
    if chunk_size != "auto" and not chunk_size.isdigit():
        raise ValueError(f"--chunk-size {chunk_size}: give a positive number of tokens, or auto.")
    return {
        "chunk_size": int(chunk_size) if chunk_size != "auto" else "auto",
        **{name: value for name, value in given.items() if value is not None},
    }


def main() -> None:
    """Run the command line and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line.

    Args:
        arguments: What follows the program's name.

    Returns:
        The exit code.

    Raises:
        Exception: Anything that is neither the user's to mend nor an expected failure: a bug, with its traceback.
    """
    try:
        # A command gives its work back instead of doing it, so that typer's own handling of interruptions is out of
        # the way when it runs.
        job = app(arguments, standalone_mode=False)
        if callable(job):
            return job() or 0
    except KeyboardInterrupt as error:
        _say(f"Interrupted; {'no model' if arguments[:1] == ['train'] else 'nothing'} was written.", error)
        return 130
    except Exception as error:
        code = _explained(error)
        if code is None:
            raise
        return code
    return 0


def _explained(error: Exception) -> int | None:
    """Print an error that has an explanation; return its exit code, None for a bug."""
    if isinstance(error, _COMMAND_LINE_ERROR):
        error.show()
        return int(error.exit_code)
    # A ValueError raised by this package's own code is written for the user; one from below it is a bug.
    if isinstance(error, ValueError) and _raised_here(error):
        _say(f"error: {error}", error)
        return 2
    for module, name in (
        ("trunkline.train.loop", "TrainingDivergedError"),
        ("trunkline.offload.storage", "TierError"),
        ("trunkline.distributed.failure", "RankError"),
    ):
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(error, kind):
            _say(f"error: {error}", error)
            return 1
    signs = ("out of memory", "not enough memory", "can't allocate memory")  # PyTorch's, on CUDA and on CPUs
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(s in str(error) for s in signs)):
        _say(f"error: out of memory: {str(error).partition('. ')[0]}. {_MEMORY}", error)
        return 1
    if isinstance(error, OSError):
        _say(f"error: {error.strerror or error}: {error.filename or 'no file is named'}.", error)
        return 1
    return None


_MEMORY = (
    "Use a smaller chunk_size, keep [] (in a deep model checkpoint_every 4), set device_budget with host_budget or "
    "offload_dir, or lower context; optimizer.fp32_master false saves memory of bfloat16 models."
)


def _raised_here(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(PACKAGE)


def _say(text: str, error: BaseException | None) -> None:
    alarm = sys.modules.get("trunkline.distributed.failure")
    joined = alarm is not None and alarm.in_job()
    if not (alarm.is_mine() if joined and alarm else os.environ.get("LOCAL_RANK", "0") == "0"):
        return  # another process of the run says it
    notes = getattr(error, "__notes__", [])
    print(" ".join([text, *notes]), file=sys.stderr)
