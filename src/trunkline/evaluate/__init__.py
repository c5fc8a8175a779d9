"""Does a model use its context: long-context tasks, perplexity by position, effective length.

A model comes in as a `Scorer` (what it would have predicted) and, to let it answer in its own words, a `Continuer`.
"""

from trunkline.evaluate.models import Continuer, Scorer, TokenScores
from trunkline.evaluate.perplexity import DocumentLoss, PerplexityMeter, PositionLoss, TokenDocument
from trunkline.evaluate.results import Cell, Evaluation, effective_length
from trunkline.evaluate.run import EvaluateProgress, evaluate
from trunkline.evaluate.scoring import Outcome
from trunkline.evaluate.settings import EvaluateSettings
from trunkline.evaluate.table import table_text, tables_of
from trunkline.evaluate.write import WrittenEvaluation, write_evaluation

__all__ = [
    "Cell",
    "Continuer",
    "DocumentLoss",
    "EvaluateProgress",
    "EvaluateSettings",
    "Evaluation",
    "Outcome",
    "PerplexityMeter",
    "PositionLoss",
    "Scorer",
    "TokenDocument",
    "TokenScores",
    "WrittenEvaluation",
    "effective_length",
    "evaluate",
    "table_text",
    "tables_of",
    "write_evaluation",
]
