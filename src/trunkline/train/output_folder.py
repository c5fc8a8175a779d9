"""Output folder of a run: complete, or absent.

A run works in a sibling folder of its own, `<output>.partial-<pid>`, where `metrics.jsonl` can be followed. At the end
the model is saved there and the folder is renamed into place. A run that fails before the end of its first step leaves
nothing; one that fails later leaves its metrics, and says where.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from trunkline.evaluate import Evaluation, write_evaluation
from trunkline.train.evaluating import EvaluationRecord
from trunkline.train.load_recipe import RecipeError, dump_recipe
from trunkline.train.recipe import Recipe
from trunkline.train.step_metrics import StepMetrics
from trunkline.utils.atomic_dir import replace_dir

MODEL, RECIPE, METRICS, TIMELINE, LOGS = "model", "recipe.yaml", "metrics.jsonl", "timeline.json", "logs"
PLAN = "plan.json"
EVALUATIONS, EVALUATION = "evaluations.jsonl", "evaluation"


class OutputFolder:
    """Output of one run, as a context manager; over ranks only rank 0 has one.

    Args:
        recipe: recipe of the run, with `output` and `overwrite`; it is written beside the model.

    Raises:
        RecipeError: the folder exists and may not be replaced; or, when the context is entered, it cannot be made.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.path = Path(recipe.output).expanduser().absolute()
        self.partial = self.path.with_name(f"{self.path.name}.partial-{os.getpid()}")
        self.num_steps = 0
        self._made_parents: list[Path] = []
        check_output(self.path, overwrite=recipe.overwrite)

    def __enter__(self) -> Self:
        parents = [parent for parent in self.path.parents if not parent.exists()]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.partial.mkdir()
        except OSError as error:
            raise RecipeError(
                f"output: the folder '{self.path}' cannot be made ({error.strerror}). Set output to a place you can "
                "write."
            ) from error
        self._made_parents = parents
        (self.partial / METRICS).touch()
        if self.recipe.evaluate.every is not None:
            (self.partial / EVALUATIONS).touch()
        return self

    def write(self, metrics: StepMetrics) -> None:
        """Append one step to `metrics.jsonl`."""
        self._append(METRICS, metrics)
        self.num_steps += 1

    def write_evaluation(self, record: EvaluationRecord, evaluation: Evaluation) -> list[str]:
        """Append a line to `evaluations.jsonl`, and write the results to `evaluation/` over earlier ones.

        Returns:
            Notes on files that were left out, with the fix.
        """
        self._append(EVALUATIONS, record)
        return write_evaluation(evaluation, self.partial / EVALUATION).notes

    def write_text(self, name: str, text: str) -> None:
        """Write or replace a file of the folder, such as `plan.json`."""
        (self.partial / name).write_text(text, encoding="utf-8")

    def finish(self, model: nn.Module, tokenizer: Any, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save model, tokenizer and resolved recipe, and put the folder in place.

        The recipe is saved with `overwrite: false`. An earlier run in the place is deleted if `overwrite` allows it.

        Args:
            model: a Hugging Face model.
            tokenizer: its tokenizer.
            state_dict: all its parameters, if it is sharded over processes; None for the model's own.

        Raises:
            RecipeError: another run has taken the place meanwhile.
        """
        model.save_pretrained(self.partial / MODEL, state_dict=state_dict)  # type: ignore[operator]
        tokenizer.save_pretrained(self.partial / MODEL)
        self.write_text(RECIPE, dump_recipe(self.recipe.model_copy(update={"overwrite": False})))
        # Checked again: hours have passed since the start.
        check_output(self.path, overwrite=self.recipe.overwrite)
        replace_dir(self.partial, self.path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self.partial.exists():
            if self.num_steps == 0:
                shutil.rmtree(self.partial)
                for parent in self._made_parents:
                    # Another program may have put something there meanwhile.
                    with contextlib.suppress(OSError):
                        parent.rmdir()
            else:
                error.add_note(f"The metrics of the {self.num_steps} steps so far are in '{self.partial / METRICS}'.")

    def _append(self, name: str, record: StepMetrics | EvaluationRecord) -> None:
        with (self.partial / name).open("a", encoding="utf-8") as file:  # closed at once: a run can be followed
            file.write(json_line(record))


def json_line(record: StepMetrics | EvaluationRecord) -> str:
    """Return a record as one line of JSON, with the line's end.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    return json.dumps(asdict(record), allow_nan=False) + "\n"


def check_output(path: Path, *, overwrite: bool) -> None:
    """Refuse a folder that exists, unless it is empty, or is an earlier run's and may be replaced.

    Args:
        path: output folder.
        overwrite: whether an earlier run may be replaced.

    Raises:
        RecipeError: the folder may not be used; the text has the fix.
    """
    if not path.exists():
        return
    if not path.is_dir():
        raise RecipeError(f"output: '{path}' is a file. Set output to the name of a folder.")
    if not any(path.iterdir()):
        return
    if not overwrite:
        raise RecipeError(
            f"output: the folder '{path}' exists. Set output to another folder, or --overwrite true to replace it."
        )
    if not all((path / name).exists() for name in (MODEL, RECIPE, METRICS)):
        raise RecipeError(
            f"output: '{path}' holds something other than an earlier run, and overwrite replaces only those. "
            "Set output to another folder."
        )
