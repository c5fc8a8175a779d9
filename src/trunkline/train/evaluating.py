"""Evaluation between two training steps, of the same streamed model on the same ranks.

It does not change later losses by a bit: mode and random state are restored, and the clock and the statistics of steps
leave it out. Memory is that of a forward sweep, so it fits where a step of the same length does; generated answers also
hold the keys and values of all layers. Replicas all evaluate the same samples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from trunkline.train.load_recipe import RecipeError
from trunkline.train.part_timer import PartTimer
from trunkline.train.recipe import Recipe


@dataclass(frozen=True)
class EvaluationRecord:
    """Summary of an evaluation; its fields are the keys of a line of `evaluations.jsonl`.

    Attributes:
        step: step before the evaluation, counted from 1.
        seconds: duration of the evaluation.
        loss: mean over all predicted tokens of the held-out files, in nats a token; None without files.
        perplexity: exponential of the loss; None without files and where it overflows.
        loss_tokens: predicted tokens of the held-out files.
        scores: share of answers retrieved by way (`forced`, `generated`), task and length.
        effective_length: effective length by way; None where the shortest length is below the threshold.
    """

    step: int
    seconds: float
    loss: float | None
    perplexity: float | None
    loss_tokens: int
    scores: dict[str, dict[str, dict[int, float]]]
    effective_length: dict[str, int | None]

    @classmethod
    def of(cls, evaluation: Evaluation, *, step: int, seconds: float) -> EvaluationRecord:
        """Summarize an evaluation."""
        mean = evaluation.mean_loss
        return cls(
            step=step,
            seconds=seconds,
            loss=None if mean is None else mean.loss,
            perplexity=mean.perplexity if mean is not None and math.isfinite(mean.perplexity) else None,
            loss_tokens=0 if mean is None else mean.num_tokens,
            scores={way: evaluation.task_scores(way) for way in evaluation.ways},
            effective_length={way: evaluation.effective_length(way) for way in evaluation.ways},
        )


def evaluation_text(record: EvaluationRecord) -> str:
    """Return an evaluation as one line: loss, mean score of each task over lengths, effective length."""
    parts = []
    if record.loss is not None:
        parts.append(f"loss {record.loss:.4f}")
        parts += [] if record.perplexity is None else [f"perplexity {record.perplexity:,.3f}"]
    for way, tasks in record.scores.items():
        shares = [f"{task} {sum(by_length.values()) / len(by_length):.1%}" for task, by_length in tasks.items()]
        parts.append(f"{'generated: ' if way == 'generated' else ''}{'  '.join(shares)}")
        lengths = sorted({length for by_length in tasks.values() for length in by_length})
        if len(lengths) > 1:
            reached = record.effective_length[way]
            parts.append(f"effective {f'below {length_text(lengths[0])}' if reached is None else length_text(reached)}")
    return "  ".join(parts)


class Evaluator:
    """Evaluation of a streamed model by a recipe; the constructor checks its settings and files.

    Args:
        recipe: a recipe with `evaluate.every`.
        encoder: tokenizer of the recipe.
        trained_on: files of `data.files`; a note tells of held-out files among them.
        tell: called with notes for the user.

    Raises:
        ValueError: a length is too short for a task, the tokenizer cannot write a task, or a file cannot be read or
            holds no text.
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
            tell(
                f"note: evaluate.files: {len(seen)} of {len(files)} are in data.files, too, such as '{seen[0]}': the "
                "loss of training data says little"
            )
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
            tell(
                f"note: evaluate.lengths: {length_text(self._longest)} is longer than context; its memory is not "
                "estimated"
            )

    def check(self, model: nn.Module) -> None:
        """Refuse lengths beyond the positions of a model.

        Args:
            model: the streamed model.

        Raises:
            RecipeError: a length has more tokens than the model has positions.
        """
        try:
            probe.check_length(streamed_forward(model, "evaluate").decoder, self._longest - 1)
        except ValueError as error:
            raise RecipeError(f"evaluate.lengths: {error} Set them to context or less.") from None

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation follows a step, counted from 1; one follows the last step, too."""
        every = self._recipe.evaluate.every
        return every is not None and (step % every == 0 or step == self._recipe.steps)

    def run(
        self, model: nn.Module, step: int, clock: PartTimer, progress: Callable[[EvaluateProgress], None] | None = None
    ) -> tuple[EvaluationRecord, Evaluation]:
        """Evaluate the model, and reset its `trunkline.stats`; all ranks call this.

        Args:
            model: the streamed model.
            step: step before the evaluation, counted from 1.
            clock: clock of the steps; it drops the time of the evaluation.
            progress: called with the position of the evaluation, before each sample and at the end.

        Returns:
            Summary of the evaluation, and the evaluation.
        """
        begin = time.perf_counter()
        continuer = StreamedContinuer(model) if self._recipe.evaluate.generated else None
        evaluation = evaluate(
            StreamedScorer(model), self._tokenizer, self.settings, continuer=continuer, haystack=self._haystack,
            documents=self.documents, progress=progress,
        )  # fmt: skip
        clock.drop()
        stats(model)  # reading resets them, so that the next step does not count the evaluation's traffic
        return EvaluationRecord.of(evaluation, step=step, seconds=time.perf_counter() - begin), evaluation
