"""The command line: `trunkline train recipe.yaml --dotted.key value`."""

from trunkline.cli.app import main

__all__ = ["main"]
