"""Evaluation of a model: all tasks, lengths and samples, then the perplexity of documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trunkline.evaluate.evaluation import Evaluation
from trunkline.evaluate.evaluation_settings import EvaluateSettings
from trunkline.evaluate.haystack import Haystack
from trunkline.evaluate.needle_samples import Sample, SampleMaker
from trunkline.evaluate.outcomes import Outcome, score_forced, score_generated
from trunkline.evaluate.perplexity import PerplexityMeter, TokenDocument
from trunkline.evaluate.piece_tokenizer import PieceTokenizer
from trunkline.evaluate.prose import prose
from trunkline.evaluate.scorers import Continuer, Scorer


@dataclass(frozen=True)
class EvaluateProgress:
    """Position of an evaluation.

    Attributes:
        done: samples and documents that are done; a sample counts once for each way.
        total: all samples and documents.
        what: name of the next task or document; empty at the end.
        length: tokens of the next sample or document; 0 at the end.
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

    Inputs of the model and their order depend on the arguments alone, so ranks that share a model can all call this.

    Args:
        scorer: the model, for teacher-forced answers and for perplexity; None for neither.
        tokenizer: the model's Hugging Face tokenizer.
        settings: tasks, lengths, depths and samples.
        continuer: the model, for generated answers; None for none.
        haystack: text around needles; None for made-up prose.
        documents: documents whose perplexity is measured; they need the scorer.
        progress: called before each forward of the scorer and each call of the continuer, and at the end.

    Returns:
        The outcomes of all answers, and the perplexities.

    Raises:
        ValueError: there is no model, or no scorer for the documents; a length is too short for a task (all are checked
            before the first forward); the tokenizer cannot write a task; or the model gives results of a wrong shape.
    """
    if scorer is None and (continuer is None or documents):
        raise ValueError(
            "scorer: documents need one, and without documents either a scorer or a continuer. Give the model as a "
            "scorer."
        )
    check_lengths(settings, tokenizer, haystack)
    pieces = PieceTokenizer(tokenizer)
    maker = SampleMaker(pieces, haystack or prose, settings.depths, settings.seed)
    num_ways = (scorer is not None) + (continuer is not None)
    total = num_ways * settings.samples * len(settings.tasks) * len(settings.lengths) + len(documents)
    done = 0

    def tell(what: str, length: int) -> None:
        if progress is not None:
            progress(EvaluateProgress(done, total, what, length))

    outcomes: list[Outcome] = []
    for task in settings.resolved_tasks:
        for length in sorted(settings.lengths):
            for first in range(0, settings.samples, settings.batch_size):
                last = min(first + settings.batch_size, settings.samples)
                samples = [maker.make(task, length, index) for index in range(first, last)]
                if scorer is not None:
                    tell(task.name, length)
                    outcomes += score_forced(samples, scorer(torch.stack([sample.ids for sample in samples])))
                    done += len(samples)
                if continuer is not None:
                    for sample in samples:
                        tell(task.name, length)
                        outcomes += score_generated(sample, _generated(continuer, sample, pieces))
                        done += 1
    meter = PerplexityMeter(settings.bin_width)
    if scorer is not None:
        for document in documents:
            tell(document.name, len(document.ids))
            meter.add(document.name, scorer(document.ids[None]).log_probs[0])
            done += 1
    tell("", 0)
    return Evaluation(settings, tuple(outcomes), tuple(meter.by_position()), tuple(meter.by_document()))


def check_lengths(settings: EvaluateSettings, tokenizer: Any, haystack: Haystack | None = None) -> None:
    """Refuse lengths that are too short for a task, before hours go into the others.

    Args:
        settings: settings of the evaluation.
        tokenizer: the model's tokenizer.
        haystack: haystack of the evaluation.

    Raises:
        ValueError: a length is too short, or the tokenizer cannot write a task.
    """
    maker = SampleMaker(PieceTokenizer(tokenizer), haystack or prose, settings.depths, settings.seed)
    for task in settings.resolved_tasks:
        for length in settings.lengths:
            least = max(maker.least_length(task, length, index) for index in range(settings.samples))
            if length < least:
                raise ValueError(
                    f"lengths: {length:,} tokens are too short for task '{task.name}', which takes at least {least:,} "
                    f"with this tokenizer and {len(settings.depths)} depths. Set longer lengths or fewer depths, or "
                    "leave the task out."
                )


def _generated(continuer: Continuer, sample: Sample, pieces: PieceTokenizer) -> list[str]:
    rows = continuer(sample.prefix, sample.continuations, sample.max_new_tokens)
    if len(rows) != len(sample.questions):
        raise ValueError(
            f"continuer: {len(rows)} results for {len(sample.questions)} continuations. Return one for each, in order."
        )
    return [pieces.decode(ids) for ids in rows]
