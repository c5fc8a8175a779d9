"""`evaluate`: runs tasks x lengths x samples on a model, and perplexity on documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trunkline.evaluate.models import Continuer, Scorer
from trunkline.evaluate.perplexity import PerplexityMeter, TokenDocument
from trunkline.evaluate.results import Evaluation
from trunkline.evaluate.scoring import Outcome, score_forced, score_generated
from trunkline.evaluate.settings import EvaluateSettings
from trunkline.evaluate.tasks import Haystack, Pieces, Prose, Sample, Task, least_length, make_sample


@dataclass(frozen=True)
class EvaluateProgress:
    """Where an evaluation is.

    Attributes:
        done: samples and documents that are through, a sample once for each way.
        total: all of them.
        what: name of the task, or of the document, that comes next; empty at the end.
        length: its tokens; 0 at the end.
    """

    done: int
    total: int
    what: str
    length: int


def evaluate(
    scorer: Scorer | None,
    tokenizer: Any,
    settings: EvaluateSettings,
    *,
    continuer: Continuer | None = None,
    haystack: Haystack | None = None,
    documents: Sequence[TokenDocument] = (),
    progress: Callable[[EvaluateProgress], None] | None = None,
) -> Evaluation:
    """Evaluate how a model uses its context.

    The order of work, and all that the model is given, depends on the arguments alone: ranks that share a model can all
    call this.

    Args:
        scorer: the model, for answers that are teacher-forced and for perplexity; None to do without.
        tokenizer: the model's, any of Hugging Face's.
        settings: what to ask.
        continuer: the model, for answers that it generates; None to do without.
        haystack: where text around needles comes from; made up by default.
        documents: to measure the perplexity of; needs the scorer.
        progress: called before each forward, and at the end.

    Returns:
        Outcomes and scores.

    Raises:
        ValueError: there is no model, a length is too short for a task (the text says the least one; all are looked at
            before the first forward), or the tokenizer cannot write a task.
    """
    if scorer is None and (continuer is None or documents):
        raise ValueError(
            "scorer: documents need one, and without documents either a scorer or a continuer. Give the model as a "
            "scorer."
        )
    pieces, hay = Pieces(tokenizer), haystack if haystack is not None else Prose()
    _check_lengths(settings, pieces, hay)
    num_ways = (scorer is not None) + (continuer is not None)
    total = num_ways * settings.samples * len(settings.tasks) * len(settings.lengths) + len(documents)
    report = _Report(progress, total)
    outcomes: list[Outcome] = []
    for task in settings.resolved_tasks:
        for length in sorted(settings.lengths):
            for samples in _batches(task, length, settings, pieces, hay):
                if scorer is not None:
                    report.before(task.name, length)
                    outcomes += score_forced(samples, scorer(torch.stack([sample.ids for sample in samples])))
                    report.done += len(samples)
                if continuer is not None:
                    for sample in samples:
                        report.before(task.name, length)
                        outcomes += _generate(continuer, sample, pieces)
                        report.done += 1
    meter = PerplexityMeter(settings.bin_width)
    if scorer is not None:
        for document in documents:
            report.before(document.name, len(document.ids))
            meter.add(scorer(document.ids[None]), [[document.name]])
            report.done += 1
    report.before("", 0)
    return Evaluation(settings, tuple(outcomes), tuple(meter.by_position()), tuple(meter.by_document()))


def check_lengths(settings: EvaluateSettings, tokenizer: Any, haystack: Haystack | None = None) -> None:
    """Refuse lengths that are too short for a task, as `evaluate` does, long before there is something to evaluate.

    Args:
        settings: what will be asked.
        tokenizer: the model's.
        haystack: as for `evaluate`.

    Raises:
        ValueError: a length is too short, or the tokenizer cannot write a task.
    """
    _check_lengths(settings, Pieces(tokenizer), haystack if haystack is not None else Prose())


class _Report:
    def __init__(self, progress: Callable[[EvaluateProgress], None] | None, total: int) -> None:
        self._progress, self._total, self.done = progress, total, 0

    def before(self, what: str, length: int) -> None:
        if self._progress is not None:
            self._progress(EvaluateProgress(self.done, self._total, what, length))


def _check_lengths(settings: EvaluateSettings, pieces: Pieces, haystack: Haystack) -> None:
    """Refuse lengths that are too short before hours have gone into the others."""
    for task in settings.resolved_tasks:
        for length in settings.lengths:
            least = max(
                least_length(
                    task, pieces, haystack, length=length, index=index, depths=settings.depths, seed=settings.seed
                )
                for index in range(settings.samples)
            )
            if length < least:
                raise ValueError(
                    f"lengths: {length:,} tokens are too short for task '{task.name}', which takes at least {least:,} "
                    f"with this tokenizer and {len(settings.depths)} depths. Set longer lengths or fewer depths, or "
                    "leave the task out."
                )


def _batches(
    task: Task, length: int, settings: EvaluateSettings, pieces: Pieces, haystack: Haystack
) -> Iterator[list[Sample]]:
    for first in range(0, settings.samples, settings.batch_size):
        yield [
            make_sample(task, pieces, haystack, length=length, index=index, depths=settings.depths, seed=settings.seed)
            for index in range(first, min(first + settings.batch_size, settings.samples))
        ]


def _generate(continuer: Continuer, sample: Sample, pieces: Pieces) -> list[Outcome]:
    found = continuer(sample.prefix, sample.continuations, sample.max_new_tokens)
    if len(found) != len(sample.questions):
        raise ValueError(
            f"continuer: {len(found)} results for {len(sample.questions)} continuations. Return one for each, in order."
        )
    return score_generated(sample, [pieces.decode(ids) for ids in found])
