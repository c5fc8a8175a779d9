"""Streamed models in EleutherAI's lm-evaluation-harness, where they are called `trunkline`.

Importing this package registers them. The harness looks for models nowhere else, so on the command line
`python -m trunkline.evaluate.harness` takes the place of `lm_eval`.
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

from trunkline.evaluate.harness.lm import StreamedLM

__all__ = ["StreamedLM"]
