"""The harness's own command line, with streamed models registered: importing the package has done that."""

from lm_eval.__main__ import cli_evaluate

cli_evaluate()
