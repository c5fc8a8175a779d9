"""The harness's own command line, with streamed models registered by the import of this package."""

from lm_eval.__main__ import cli_evaluate

cli_evaluate()
