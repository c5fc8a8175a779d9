"""Long-context tasks in the style of RULER, for any tokenizer, the same everywhere for a seed, exact to the token."""

from trunkline.evaluate.tasks.common import CommonWords
from trunkline.evaluate.tasks.haystack import Haystack, Prose, Repeated, Texts
from trunkline.evaluate.tasks.needles import MultiKey, MultiQuery, MultiValue, Needle, Passkey
from trunkline.evaluate.tasks.pieces import Pieces
from trunkline.evaluate.tasks.plan import Task, least_length, make_sample
from trunkline.evaluate.tasks.sample import Answer, Question, Sample
from trunkline.evaluate.tasks.variables import VariableTracking

TASKS: dict[str, Task] = {
    task.name: task
    for task in (Needle(), Passkey(), MultiKey(), MultiQuery(), MultiValue(), VariableTracking(), CommonWords())
}

__all__ = [
    "TASKS",
    "Answer",
    "CommonWords",
    "Haystack",
    "MultiKey",
    "MultiQuery",
    "MultiValue",
    "Needle",
    "Passkey",
    "Pieces",
    "Prose",
    "Question",
    "Repeated",
    "Sample",
    "Task",
    "Texts",
    "VariableTracking",
    "least_length",
    "make_sample",
]
