"""Does a model use its context: long-context tasks, perplexity by position, effective length.

A model comes in as a `Scorer` (what it would have predicted) and, to let it answer in its own words, a `Continuer`.
"""

from trunkline.evaluate.models import Continuer, Scorer, TokenScores
from trunkline.evaluate.perplexity import (
    DocumentLoss,
    MeanLoss,
    PerplexityMeter,
    PositionLoss,
    TokenDocument,
    token_documents,
)
from trunkline.evaluate.results import Cell, Evaluation, effective_length
from trunkline.evaluate.run import EvaluateProgress, check_lengths, evaluate
from trunkline.evaluate.scoring import Outcome
from trunkline.evaluate.settings import EvaluateSettings, even_depths, parse_length
from trunkline.evaluate.streamed import StreamedContinuer, StreamedScorer
from trunkline.evaluate.table import table_text, tables_of
from trunkline.evaluate.write import WrittenEvaluation, write_evaluation, write_folder

__all__ = [
    "Cell",
    "Continuer",
    "DocumentLoss",
    "EvaluateProgress",
    "EvaluateSettings",
    "Evaluation",
    "MeanLoss",
    "Outcome",
    "PerplexityMeter",
    "PositionLoss",
    "Scorer",
    "StreamedContinuer",
    "StreamedScorer",
    "TokenDocument",
    "TokenScores",
    "WrittenEvaluation",
    "check_lengths",
    "effective_length",
    "evaluate",
    "even_depths",
    "parse_length",
    "table_text",
    "tables_of",
    "token_documents",
    "write_evaluation",
    "write_folder",
]
