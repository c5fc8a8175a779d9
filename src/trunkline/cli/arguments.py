"""Reads what follows `trunkline train`: one recipe and any number of `--dotted.key value`.

The settings are not options of the command line library: they are the recipe's schema, so there is one list of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def split_arguments(arguments: Sequence[str]) -> tuple[Path, list[tuple[str, str]]]:
    """Split arguments into the recipe and the overrides, in any order.

    Args:
        arguments: Words; `--key value`, `--key=value`, and `--key` alone for true.

    Returns:
        The recipe's path, and dotted names with their values as typed.

    Raises:
        ValueError: There is no recipe, or more than one.
    """
    recipes: list[str] = []
    overrides: list[tuple[str, str]] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            recipes.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else "true"
        overrides.append((name.replace("-", "_"), value))
    if len(recipes) != 1:
        given = f"got {len(recipes)}: {', '.join(recipes)}" if recipes else "got none"
        raise ValueError(
            f"train takes one recipe ({given}). Write: trunkline train recipe.yaml --steps 10 "
            "(quote a value that has spaces or wildcards)."
        )
    return Path(recipes[0]), overrides
