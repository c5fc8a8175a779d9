"""`trunkline evaluate`: long-context tasks and perplexity of a model, as a table, files, or JSON."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils import logging as transformers_logging

import trunkline
from trunkline.api import streamed_forward
from trunkline.cli.evaluating import make_watch
from trunkline.cli.generate import peak_bytes
from trunkline.config import StreamConfig
from trunkline.data import Document, find_files, read_documents
from trunkline.data.tokenizers import Encoder
from trunkline.evaluate import (
    EvaluateSettings,
    Evaluation,
    StreamedContinuer,
    StreamedScorer,
    TokenDocument,
    check_lengths,
    evaluate,
    even_depths,
    parse_length,
    table_text,
    tables_of,
    token_documents,
    write_folder,
)
from trunkline.evaluate.settings import DEFAULT_THRESHOLD
from trunkline.evaluate.table import length_text
from trunkline.evaluate.tasks import TASKS, Texts
from trunkline.evaluate.write import check_folder
from trunkline.generation.loading import load_model
from trunkline.hf import probe
from trunkline.units import in_units

# Those of RULER (Hsieh et al., COLM 2024), so that effective lengths are steps that others report, too.
_LENGTHS = tuple(2**power for power in range(12, 18))
_UNLIMITED = _LENGTHS[:4]  # of a model that does not say how long its texts may be


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for.

    Attributes:
        model: folder.
        tasks: names with commas between them, `none`, or None for all that fit.
        lengths: tokens of samples with commas between them; None for RULER's up to what the model is made for.
        depths: how many.
        samples: of each task and length.
        seed: of names, numbers and texts.
        threshold: of the effective length.
        generated: have the model also answer in its own words.
        haystack: files that the text around needles comes from.
        perplexity: files whose perplexity is measured.
        dtype: of the model; see `load_model`.
        device: the same.
        output: folder to write.
        overwrite: replace an earlier evaluation there.
        as_json: print results.json instead of tables.
        stream: settings of `trunkline.stream`.
    """

    model: Path
    tasks: str | None = None
    lengths: str | None = None
    depths: int = 11
    samples: int = 5
    seed: int = 0
    threshold: float = DEFAULT_THRESHOLD
    generated: bool = False
    haystack: Sequence[str] = ()
    perplexity: Sequence[str] = ()
    dtype: str = "auto"
    device: str = "auto"
    output: Path | None = None
    overwrite: bool = False
    as_json: bool = False
    stream: dict[str, Any] = field(default_factory=dict)


def run_evaluate(asked: Asked) -> None:
    """Evaluate, print the tables on standard output, and all else on standard error.

    Raises:
        ValueError: an argument is wrong; the text names it and the mend.
    """
    console = Console(stderr=True)
    transformers_logging.disable_progress_bar()  # weights are loaded in a moment, and the bar that follows is ours
    _check(asked)
    haystack = Texts.read(list(asked.haystack), setting="--haystack") if asked.haystack else None
    files = find_files(list(asked.perplexity), setting="--perplexity") if asked.perplexity else []
    model, encoder = load_model(asked.model, dtype=asked.dtype, device=asked.device)
    notes: list[str] = []
    settings = _settings(asked, model, encoder, haystack, notes)
    documents = token_documents(_named(read_documents(files, setting="--perplexity")), encoder)
    if files and not documents:
        raise ValueError("--perplexity: the files hold no text. Give files that do.")
    for note in notes + _beyond(settings, documents, model):
        _tell(console, note)
    total = (1 + asked.generated) * len(settings.tasks) * settings.samples * sum(settings.lengths)
    watch = make_watch(console, total + sum(len(document.ids) for document in documents))
    trunkline.stream(model, **asked.stream, progress=watch.sweep)
    _check_positions(model, settings, documents)
    begin = time.perf_counter()
    with watch:
        continuer = StreamedContinuer(model, _stops(model, encoder)) if asked.generated else None
        found = evaluate(StreamedScorer(model), encoder.tokenizer, settings, continuer=continuer, haystack=haystack,
                         documents=documents, progress=watch)  # fmt: skip
    seconds = time.perf_counter() - begin
    _show(found, as_json=asked.as_json)
    peaks = ", ".join(f"{tier} {in_units(n)}" for tier, n in trunkline.stats(model).peaks.items() if n)
    _tell(console, f"{watch.done_tokens:,} tokens in {seconds:,.1f} s, {watch.done_tokens / seconds:,.0f} tokens/s; "
                   f"peak of what the engine holds: {peaks or 'nothing'}; of the process "
                   f"{in_units(peak_bytes(model.device))}")  # fmt: skip
    if asked.output is not None:
        written = write_folder(found, asked.output, overwrite=asked.overwrite)
        for line in (*written.notes, f"wrote {asked.output}/: {', '.join(written.files)}"):
            _tell(console, line)


def _check(asked: Asked) -> None:
    """What is wrong before a model is loaded."""
    StreamConfig(**asked.stream)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "trunkline evaluate is one process: start it without torchrun. docs/evaluate.md says how a program of "
            "yours evaluates over several, and trunkline train does with evaluate.every."
        )
    for option, count in (("--depths", asked.depths), ("--samples", asked.samples)):
        if count < 1:
            raise ValueError(f"{option} {count}: give 1 or more.")
    if asked.overwrite and asked.output is None:
        raise ValueError("--overwrite has no effect without --output: give the folder, too.")
    if asked.output is not None:
        check_folder(asked.output, overwrite=asked.overwrite)
    if asked.tasks == "none":
        for option, given in (("--lengths", asked.lengths), ("--generated", asked.generated),
                              ("--haystack", asked.haystack)):  # fmt: skip
            if given:
                raise ValueError(f"{option} has no effect with --tasks none: leave one of them out.")
        if not asked.perplexity:
            raise ValueError("--tasks none leaves nothing to do: name tasks, or give files with --perplexity.")


def _settings(asked: Asked, model: Any, encoder: Encoder, haystack: Texts | None, notes: list[str]) -> EvaluateSettings:
    """Settings of the evaluation; what was chosen goes to the notes."""
    if asked.tasks == "none":
        return EvaluateSettings((), (), samples=asked.samples, seed=asked.seed)
    lengths = _lengths(asked, model, notes)
    names = tuple(TASKS) if asked.tasks is None else tuple(name.strip() for name in asked.tasks.split(","))
    depths = even_depths(asked.depths)

    def settings(tasks: tuple[str, ...]) -> EvaluateSettings:
        return EvaluateSettings(lengths, tasks, depths, asked.samples, asked.seed, asked.threshold)

    try:
        if asked.tasks is None:
            names, left_out = _fitting(names, settings, encoder, haystack)
            if left_out:
                little = f"{length_text(min(lengths))}, or {asked.depths} depths, are too little"
                notes.append(f"tasks left out, since {little} for them: {', '.join(left_out)}")
        found = settings(names)
        check_lengths(found, encoder.tokenizer, haystack)
    except ValueError as error:
        names_a_setting = str(error).partition(":")[0] in EvaluateSettings.__dataclass_fields__
        raise ValueError(f"--{error}" if names_a_setting else str(error)) from None
    return found


def _fitting(
    names: tuple[str, ...], settings: Any, encoder: Encoder, haystack: Texts | None
) -> tuple[tuple[str, ...], list[str]]:
    """Which tasks lengths and depths are enough for, and which not."""
    left_out, last = [], None
    for name in names:
        only = settings((name,))
        try:
            check_lengths(only, encoder.tokenizer, haystack)
        except ValueError as error:
            if not str(error).startswith(("lengths:", "depths:")):
                raise
            left_out.append(name)
            last = error
    if last is not None and len(left_out) == len(names):
        raise last
    return tuple(name for name in names if name not in left_out), left_out


def _lengths(asked: Asked, model: Any, notes: list[str]) -> tuple[int, ...]:
    if asked.lengths is not None:
        try:
            return tuple(parse_length(part) for part in asked.lengths.split(","))
        except ValueError as error:
            raise ValueError(f"--lengths {asked.lengths}: {error}, with commas between several.") from None
    made_for = _positions(model)
    if made_for is None:
        lengths, why = _UNLIMITED, "the model does not say what it is made for"
    else:
        lengths = tuple(length for length in _LENGTHS if length <= made_for) or (made_for,)
        why = f"the model is made for {made_for:,} tokens"
    notes.append(f"lengths: {', '.join(map(length_text, lengths))} ({why}; --lengths sets others)")
    return lengths


def _positions(model: Any) -> int | None:
    positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return positions


def _beyond(settings: EvaluateSettings, documents: Sequence[TokenDocument], model: Any) -> list[str]:
    """Say where a model is asked for more than it was made for: a low score is no wonder there."""
    made_for, longest = _positions(model), _longest(settings, documents)
    if made_for is None or longest <= made_for:
        return []
    return [f"note: up to {longest:,} tokens are more than the {made_for:,} positions this model is made for"]


def _check_positions(model: Any, settings: EvaluateSettings, documents: Sequence[TokenDocument]) -> None:
    longest = _longest(settings, documents)
    try:
        probe.check_length(streamed_forward(model, "evaluate").decoder, longest - 1)
    except ValueError as error:
        raise ValueError(
            f"--lengths, --perplexity: {longest:,} tokens cannot be evaluated. {error} Give shorter lengths or files."
        ) from None


def _named(documents: Iterable[Document]) -> Iterator[Document]:
    """With names as a person would write them here: tables have little room."""
    here = f"{Path.cwd()}{os.sep}"
    return (Document(document.name.removeprefix(here), document.text) for document in documents)


def _longest(settings: EvaluateSettings, documents: Sequence[TokenDocument]) -> int:
    return max([1, *settings.lengths, *(len(document.ids) for document in documents)])


def _stops(model: Any, encoder: Encoder) -> set[int]:
    """Tokens that end a text: the model's own, and the tokenizer's."""
    own = model.generation_config.eos_token_id
    found = set(own if isinstance(own, list) else [own]) | {encoder.tokenizer.eos_token_id}
    return found - {None}


def _show(found: Evaluation, *, as_json: bool) -> None:
    if as_json:
        print(found.to_json(), end="")
    elif sys.stdout.isatty():
        console = Console()
        for table in tables_of(found):
            console.print(table)
    else:
        print(table_text(found), end="")


def _tell(console: Console, line: str) -> None:
    console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
