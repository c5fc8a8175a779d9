"""Streamed models in EleutherAI's lm-evaluation-harness, under the name `trunkline`.

Importing this package registers the model class. The harness finds no models elsewhere, so on the command line
`python -m trunkline.evaluate.harness` replaces `lm_eval`.
"""

try:
    import lm_eval as _lm_eval  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "lm_eval":
        raise
    raise ModuleNotFoundError(
        "trunkline.evaluate.harness needs EleutherAI's lm-evaluation-harness: pip install 'trunkline[lm-eval]'",
        name="lm_eval",
    ) from error

from trunkline.evaluate.harness.streamed_lm import StreamedLM

__all__ = ["StreamedLM"]
