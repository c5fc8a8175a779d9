"""The entry point: runs a command, and turns errors into messages and exit codes.

Exit codes: 0 success; 1 the run failed, or `doctor` or `plan` found that training would; 2 a wrong argument, setting
or file, explained in one paragraph; 130 interrupted.

`trunkline --help` answers at once: the files of commands import torch and transformers only inside the functions that
need them.
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from trunkline.cli import doctor, evaluate, generate, plan, report, train, tune
from trunkline.cli.options import app

# typer brings a copy of click, or takes the installed one, by version. This is the base of its usage errors.
_USAGE_ERROR: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
_PACKAGE = Path(__file__).resolve().parent.parent
_FAILED_RUNS = (
    ("trunkline.train.trainer", "TrainingDivergedError"),
    ("trunkline.offload.storage", "TierError"),
    ("trunkline.distributed.failure", "RankError"),
)
_OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")  # PyTorch's words, on CUDA and CPUs
_LESS_MEMORY = (
    "Use a smaller chunk_size, keep [] (in a deep model checkpoint_every 4), set device_budget with host_budget or "
    "offload_dir, or lower context; optimizer.fp32_master false saves memory of bfloat16 models."
)

_order = [module.__name__.rpartition(".")[2] for module in (train, evaluate, generate, plan, tune, doctor, report)]
app.registered_commands.sort(key=lambda command: _order.index(command.name or ""))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trunkline {version('trunkline')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train Hugging Face language models on very long contexts."""


def main() -> None:
    """Run the command line and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: words after the program's name.

    Raises:
        Exception: a bug: neither a mistake of the user nor an expected failure. It keeps its traceback.
    """
    try:
        work = app(arguments, standalone_mode=False)
        return (work() or 0) if callable(work) else 0
    except KeyboardInterrupt as error:
        _say(f"Interrupted; {'no model' if arguments[:1] == ['train'] else 'nothing'} was written.", error)
        return 130
    except Exception as error:
        code = _explain(error)
        if code is None:
            raise
        return code


def _explain(error: Exception) -> int | None:
    """Print the explanation of an error and return its exit code; None for a bug."""
    if isinstance(error, _USAGE_ERROR):
        error.show()
        return int(error.exit_code)
    # A ValueError raised by a file of this package is written for the user. One raised below it is a bug.
    if isinstance(error, ValueError) and _is_raised_here(error):
        _say(f"error: {error}", error)
        return 2
    # A module that was not imported has raised nothing.
    failed = [getattr(sys.modules.get(module), name, None) for module, name in _FAILED_RUNS]
    if any(kind is not None and isinstance(error, kind) for kind in failed):
        _say(f"error: {error}", error)
    elif isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    ):
        _say(f"error: out of memory: {str(error).partition('. ')[0]}. {_LESS_MEMORY}", error)
    elif isinstance(error, OSError):
        _say(f"error: {error.strerror or error}: {error.filename or 'no file is named'}.", error)
    else:
        return None
    return 1


def _is_raised_here(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(_PACKAGE)


def _say(text: str, error: BaseException) -> None:
    """Print a line and the error's notes on standard error, in one process of the job only."""
    failure = sys.modules.get("trunkline.distributed.failure")
    in_job = failure is not None and failure.in_job()
    if failure.failed_first() if in_job and failure else os.environ.get("LOCAL_RANK", "0") == "0":
        print(" ".join([text, *getattr(error, "__notes__", [])]), file=sys.stderr)
