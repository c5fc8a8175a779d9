"""`trunkline evaluate`: long-context tasks and perplexity of a model, as tables, files, or JSON."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import trunkline
from trunkline.cli.console import say
from trunkline.cli.generate import peak_bytes
from trunkline.cli.options import Device, Dtype, ModelFolder, command
from trunkline.config import StreamConfig
from trunkline.units import format_bytes


@command(
    without=("keep", "checkpoint_every"), epilog="Tasks, scores, and the files that are written: docs/evaluate.md."
)
def evaluate(
    model: ModelFolder,
    config: StreamConfig,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="TASK,…", help="Tasks out of docs/evaluate.md, or none; default: all that fit."),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="4K,16K,…", help="Tokens of samples; default: 4K, 8K, … 128K, as far as the model goes."),
    ] = None,
    depths: Annotated[int, typer.Option(min=1, help="Depths of answers in each haystack; more cost no time.")] = 11,
    samples: Annotated[int, typer.Option(min=1, help="Haystacks of each task and length.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of names, numbers and texts.")] = 0,
    threshold: Annotated[float, typer.Option(help="Least score of an effective length.")] = 0.85,
    generated: Annotated[
        bool, typer.Option("--generated", help="Generate answers, too, not only score the right ones; takes longer.")
    ] = False,
    haystack: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="File with text around needles; may be repeated.")
    ] = None,
    perplexity: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="File whose perplexity by position is measured; may be repeated."),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder to write: tables, JSON, CSV, heat maps.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier evaluation there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print results.json instead of tables.")] = False,
) -> None:
    """Measure how far a model uses its context: long-context tasks, perplexity by position."""
    from transformers.utils import logging as transformers_logging

    from trunkline import evaluate as evaluation
    from trunkline.cli.evaluate_progress import EvaluationDisplay
    from trunkline.cli.evaluate_settings import check_length, choose_settings, positions_of
    from trunkline.data import Document, find_files, read_documents
    from trunkline.evaluate import TextHaystack, check_folder
    from trunkline.generation.loading import load_model

    _check(tasks, {"--lengths": lengths, "--generated": generated, "--haystack": haystack}, perplexity)
    if overwrite and output is None:
        raise ValueError("--overwrite has no effect without --output: give the folder, too.")
    if output is not None:
        check_folder(output, overwrite=overwrite)
    console = Console(stderr=True)
    transformers_logging.disable_progress_bar()  # loading is short, and the bar of the evaluation follows
    texts = TextHaystack.read(haystack, setting="--haystack") if haystack else None
    files = find_files(perplexity, setting="--perplexity") if perplexity else []
    loaded, encoder = load_model(model, dtype=dtype, device=device)
    settings, notes = choose_settings(
        loaded, encoder.tokenizer, tasks=tasks, lengths=lengths, depths=depths, samples=samples, seed=seed,
        threshold=threshold, haystack=texts,
    )  # fmt: skip
    here = f"{Path.cwd()}{os.sep}"  # tables have little room for names
    read = (Document(d.name.removeprefix(here), d.text) for d in read_documents(files, setting="--perplexity"))
    documents = evaluation.token_documents(read, encoder)
    if files and not documents:
        raise ValueError("--perplexity: the files hold no text. Give files that do.")
    longest = max([1, *settings.lengths, *(len(document.ids) for document in documents)])
    positions = positions_of(loaded)
    if positions is not None and longest > positions:
        notes.append(f"note: up to {longest:,} tokens are more than the {positions:,} positions of this model")
    say(console, *notes, style="dim")
    sample_tokens = (1 + generated) * len(settings.tasks) * settings.samples * sum(settings.lengths)
    display = EvaluationDisplay(console, sample_tokens + sum(len(document.ids) for document in documents))
    trunkline.stream(loaded, config, progress=display.sweep)
    check_length(loaded, longest)
    begin = time.perf_counter()
    with display:
        continuer = evaluation.StreamedContinuer(loaded, _stop_ids(loaded, encoder.tokenizer)) if generated else None
        result = evaluation.evaluate(
            evaluation.StreamedScorer(loaded), encoder.tokenizer, settings, continuer=continuer, haystack=texts,
            documents=documents, progress=display,
        )  # fmt: skip
    seconds = time.perf_counter() - begin
    if as_json:
        print(result.to_json(), end="")
    elif sys.stdout.isatty():
        for table in evaluation.tables_of(result):
            Console().print(table)
    else:
        print(evaluation.table_text(result), end="")
    peaks = ", ".join(f"{tier} {format_bytes(n)}" for tier, n in trunkline.stats(loaded).peaks.items() if n)
    say(
        console,
        f"{display.done_tokens:,} tokens in {seconds:,.1f} s, {display.done_tokens / seconds:,.0f} tokens/s; "
        f"peak of activations: {peaks or 'nothing'}; of the process: {format_bytes(peak_bytes(loaded.device))}",
        style="dim",
    )
    if output is not None:
        written = evaluation.write_folder(result, output, overwrite=overwrite)
        say(console, *written.notes, f"wrote {output}/: {', '.join(written.files)}", style="dim")


def _check(tasks: str | None, of_tasks: dict[str, Any], perplexity: list[str] | None) -> None:
    """Refuse a job of several processes, and options that contradict `--tasks none`."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "trunkline evaluate is one process: start it without torchrun. docs/evaluate.md says how to evaluate over "
            "several in a program of your own; trunkline train does it with evaluate.every."
        )
    if tasks == "none":
        for option, value in of_tasks.items():
            if value:
                raise ValueError(f"{option} has no effect with --tasks none: leave one of them out.")
        if not perplexity:
            raise ValueError("--tasks none leaves nothing to do: name tasks, or give files with --perplexity.")


def _stop_ids(model: Any, tokenizer: Any) -> set[int]:
    """Return the ids that end a text: the model's and the tokenizer's."""
    eos = model.generation_config.eos_token_id
    return {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
