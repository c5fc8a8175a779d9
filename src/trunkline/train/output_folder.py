"""Output folder of a run: complete, or absent.

A run works in a sibling folder of its own, `<output>.partial-<pid>`, where `metrics.jsonl` can be followed. At the end
the model is saved there and the folder is renamed into place. A run that stops before its first step leaves nothing;
one that stops later leaves its metrics, and says where.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from trunkline.evaluate import Evaluation, write_evaluation
from trunkline.report.timeline import Timeline
from trunkline.train.recipe import Recipe
from trunkline.train.settings import RecipeError, dump_recipe
from trunkline.train.step_metrics import JsonLine, MetricsFile, StepMetrics
from trunkline.utils.atomic_dir import replace_dir

MODEL, RECIPE, METRICS, TIMELINE, LOGS = "model", "recipe.yaml", "metrics.jsonl", "timeline.json", "logs"
PLAN = "plan.json"
EVALUATIONS, EVALUATION = "evaluations.jsonl", "evaluation"


class OutputFolder:
    """Output of one run, as a context manager.

    Args:
        recipe: recipe of the run, with `output` and `overwrite`; it is written beside the model.

    Raises:
        RecipeError: the folder exists and may not be replaced, or its parent cannot be written.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.path = Path(recipe.output).expanduser().absolute()
        self.partial = self.path.with_name(f"{self.path.name}.partial-{os.getpid()}")
        self.num_steps = 0
        self._made_parents: list[Path] = []
        self._evaluations: MetricsFile | None = None
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
        self._metrics = MetricsFile(self.partial / METRICS)
        if self.recipe.evaluate.every is not None:
            self._evaluations = MetricsFile(self.partial / EVALUATIONS)
        return self

    def write(self, metrics: StepMetrics) -> None:
        """Append one step to `metrics.jsonl`."""
        self._metrics.write(metrics)
        self.num_steps += 1

    def write_evaluation(self, record: JsonLine, evaluation: Evaluation) -> list[str]:
        """Append a line to `evaluations.jsonl`, and replace the results in `evaluation/`.

        Returns:
            Notes on files that were left out, with the fix.
        """
        assert self._evaluations is not None
        self._evaluations.write(record)
        return write_evaluation(evaluation, self.partial / EVALUATION).notes

    def write_plan(self, plan: str) -> None:
        """Write `plan.json`, the estimate of a step."""
        (self.partial / PLAN).write_text(plan, encoding="utf-8")

    def write_timeline(self, timeline: Timeline) -> None:
        """Write `timeline.json`."""
        (self.partial / TIMELINE).write_text(timeline.to_json(), encoding="utf-8")

    def finish(self, model: nn.Module, tokenizer: Any, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save model, tokenizer and resolved recipe, and put the folder in place.

        Args:
            model: a Hugging Face model.
            tokenizer: its tokenizer.
            state_dict: all its parameters, if it is sharded over processes.
        """
        self._close()
        model.save_pretrained(self.partial / MODEL, state_dict=state_dict)  # type: ignore[operator]
        tokenizer.save_pretrained(self.partial / MODEL)
        (self.partial / RECIPE).write_text(
            dump_recipe(self.recipe.model_copy(update={"overwrite": False})), encoding="utf-8"
        )
        # Checked again: hours have passed since the start.
        check_output(self.path, overwrite=self.recipe.overwrite)
        replace_dir(self.partial, self.path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()
        if error is not None and self.partial.exists():
            if self.num_steps == 0:
                shutil.rmtree(self.partial)
                for parent in self._made_parents:
                    # Another program may have put something there meanwhile.
                    with contextlib.suppress(OSError):
                        parent.rmdir()
            else:
                error.add_note(f"The metrics of the {self.num_steps} steps so far are in '{self.partial / METRICS}'.")

    def _close(self) -> None:
        self._metrics.close()
        if self._evaluations is not None:
            self._evaluations.close()


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
