"""Evaluation on the way: the model that is being trained, on the same ranks, between two of its steps.

It costs the time of its forwards and leaves no trace in what follows: mode and random state are put back, the clock and
the meters of steps do not count it, and the losses of later steps are those of a run without it, bit for bit. Memory is
that of a forward sweep, so it fits where a step of the same length does. Replicas all evaluate the same.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn

from trunkline.api import stats, streamed_forward
from trunkline.data import find_files, read_documents
from trunkline.data.tokenizers import Encoder
from trunkline.evaluate import (
    EvaluateProgress,
    Evaluation,
    StreamedContinuer,
    StreamedScorer,
    TextHaystack,
    check_lengths,
    evaluate,
    length_text,
    token_documents,
)
from trunkline.hf import probe
from trunkline.train.part_timer import PartTimer
from trunkline.train.recipe import Recipe
from trunkline.train.settings import RecipeError


@dataclass(frozen=True)
class EvaluationRecord:
    """What an evaluation found, in short. The fields are the keys of a line of `evaluations.jsonl`.

    Attributes:
        step: Step after which it was, counted from 1.
        seconds: That it took.
        loss: Mean over all tokens of the held-out files, in nats a token; None where there are none.
        perplexity: Exponential of the loss; None also where that is beyond all numbers.
        loss_tokens: Tokens that the mean is over.
        scores: Share of answers retrieved, of each way (`forced`, `generated`) and task, by length.
        effective_length: Of each way; None where the shortest length is below the threshold.
    """

    step: int
    seconds: float
    loss: float | None
    perplexity: float | None
    loss_tokens: int
    scores: dict[str, dict[str, dict[int, float]]]
    effective_length: dict[str, int | None]

    @classmethod
    def of(cls, found: Evaluation, *, step: int, seconds: float) -> EvaluationRecord:
        """Sum an evaluation up."""
        mean = found.mean_loss
        return cls(
            step=step,
            seconds=seconds,
            loss=None if mean is None else mean.loss,
            perplexity=mean.perplexity if mean is not None and math.isfinite(mean.perplexity) else None,
            loss_tokens=0 if mean is None else mean.num_tokens,
            scores={way: found.task_scores(way) for way in found.ways},
            effective_length={way: found.effective_length(way) for way in found.ways},
        )

    def to_json(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps(asdict(self), allow_nan=False)


def evaluation_text(record: EvaluationRecord) -> str:
    """Return what a person reads of an evaluation: a loss, of each task the mean over lengths, the effective length."""
    parts = []
    if record.loss is not None:
        parts.append(f"loss {record.loss:.4f}")
        parts += [] if record.perplexity is None else [f"perplexity {record.perplexity:,.3f}"]
    for way, tasks in record.scores.items():
        shares = [f"{task} {sum(by_length.values()) / len(by_length):.1%}" for task, by_length in tasks.items()]
        parts.append(f"{'generated: ' if way == 'generated' else ''}{'  '.join(shares)}")
        lengths = sorted({length for by_length in tasks.values() for length in by_length})
        if len(lengths) > 1:  # of a single one the share says it
            reached = record.effective_length[way]
            parts.append(f"effective {f'below {length_text(lengths[0])}' if reached is None else length_text(reached)}")
    return "  ".join(parts)


class Evaluator:
    """Evaluates a streamed model as a recipe says. What is wrong with that is found when it is made.

    Args:
        recipe: `evaluate.every` is set.
        encoder: Its tokenizer.
        trained_on: Files of `data.files`.
        tell: Told of what a person should know.

    Raises:
        ValueError: A length is too short for a task, or a file is not there.
    """

    def __init__(
        self, recipe: Recipe, encoder: Encoder, trained_on: Sequence[Path], tell: Callable[[str], None]
    ) -> None:
        section = recipe.evaluate
        self._recipe, self._tokenizer = recipe, encoder.tokenizer
        self.settings = recipe.evaluate_settings
        self._haystack = TextHaystack.read(section.haystack, setting="evaluate.haystack") if section.haystack else None
        files = find_files(section.files, setting="evaluate.files") if section.files else []
        seen = sorted(str(path) for path in set(files) & set(trained_on))
        if seen:
            tell(f"note: evaluate.files: {len(seen)} of {len(files)} are in data.files, too, such as '{seen[0]}': the "
                 "loss of what was trained on says little")  # fmt: skip
        documents = read_documents(files, text_field=recipe.data.text_field, setting="evaluate.files")
        self.documents = token_documents(documents, encoder, most_tokens=recipe.context)
        if files and not self.documents:
            raise RecipeError("evaluate.files: the files hold no text. Name files that do, or leave them out.")
        try:
            check_lengths(self.settings, self._tokenizer, self._haystack)
        except ValueError as error:
            raise RecipeError(f"evaluate.{error}") from None
        self._longest = max([*self.settings.lengths, *(len(document.ids) for document in self.documents)])
        if self._longest > recipe.context:
            tell(f"note: evaluate.lengths: {length_text(self._longest)} is longer than context; whether that fits is "
                 "not rehearsed")  # fmt: skip

    def check(self, model: nn.Module) -> None:
        """Refuse lengths for which a model has no positions.

        Args:
            model: The model, streamed.

        Raises:
            RecipeError: With the mend.
        """
        try:
            probe.check_length(streamed_forward(model, "evaluate").decoder, self._longest - 1)
        except ValueError as error:
            raise RecipeError(f"evaluate.lengths: {error} Set them to context or less.") from None

    def is_due(self, step: int) -> bool:
        """Return whether there is an evaluation after a step, counted from 1: every so often, and after the last."""
        every = self._recipe.evaluate.every
        return every is not None and (step % every == 0 or step == self._recipe.steps)

    def run(
        self, model: nn.Module, step: int, clock: PartTimer, progress: Callable[[EvaluateProgress], None] | None = None
    ) -> tuple[EvaluationRecord, Evaluation]:
        """Evaluate; all ranks call this.

        Args:
            model: The model, streamed.
            step: Step that is over, counted from 1.
            clock: Of the steps; what the engine told it meanwhile is dropped.
            progress: Told where the evaluation is.

        Returns:
            What was found, in short and whole.
        """
        begin = time.perf_counter()
        continuer = StreamedContinuer(model) if self._recipe.evaluate.generated else None
        found = evaluate(StreamedScorer(model), self._tokenizer, self.settings, continuer=continuer,
                         haystack=self._haystack, documents=self.documents, progress=progress)  # fmt: skip
        clock.drop()
        stats(model)  # what was held and moved since belongs to no step
        return EvaluationRecord.of(found, step=step, seconds=time.perf_counter() - begin), found
