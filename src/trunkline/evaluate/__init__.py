"""Evaluation of long context: needle tasks, perplexity by position, effective length.

A model is given as a `Scorer` (predictions of given tokens) and, for answers that it generates, a `Continuer`.
"""

from trunkline.evaluate.evaluation import Evaluation, ScoreCell, effective_length
from trunkline.evaluate.evaluation_files import WrittenEvaluation, check_folder, write_evaluation, write_folder
from trunkline.evaluate.evaluation_loop import EvaluateProgress, check_lengths, evaluate
from trunkline.evaluate.evaluation_settings import EvaluateSettings, even_depths, length_text
from trunkline.evaluate.haystack import TextHaystack
from trunkline.evaluate.needles import TASKS, NeedleTask, PasskeyTask, VariableTask
from trunkline.evaluate.outcomes import Outcome
from trunkline.evaluate.perplexity import (
    DocumentLoss,
    MeanLoss,
    PerplexityMeter,
    PositionLoss,
    TokenDocument,
    token_documents,
)
from trunkline.evaluate.score_tables import table_text, tables_of
from trunkline.evaluate.scorers import Continuer, Scorer, StreamedContinuer, StreamedScorer, TokenScores

__all__ = [
    "TASKS",
    "Continuer",
    "DocumentLoss",
    "EvaluateProgress",
    "EvaluateSettings",
    "Evaluation",
    "MeanLoss",
    "NeedleTask",
    "Outcome",
    "PasskeyTask",
    "PerplexityMeter",
    "PositionLoss",
    "ScoreCell",
    "Scorer",
    "StreamedContinuer",
    "StreamedScorer",
    "TextHaystack",
    "TokenDocument",
    "TokenScores",
    "VariableTask",
    "WrittenEvaluation",
    "check_folder",
    "check_lengths",
    "effective_length",
    "evaluate",
    "even_depths",
    "length_text",
    "table_text",
    "tables_of",
    "token_documents",
    "write_evaluation",
    "write_folder",
]
