"""Voice of the docstrings: none opens with a word that begins a riddle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPENINGS = {"What", "Whatever", "Whether", "Those", "Have", "Of", "How", "Where", "Which"}


def riddles(text: str) -> Iterator[str]:
    """Yield the first lines of docstrings that open with one of these words."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first, *_ = (ast.get_docstring(node) or "-").splitlines()
            if first.split()[0] in OPENINGS:
                yield first


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "examples"])
def test_docstrings_open_with_a_verb_or_a_noun(folder: str) -> None:
    assert not {path.name: found for path in (ROOT / folder).rglob("*.py") if (found := [*riddles(path.read_text())])}


def test_a_riddle_is_found() -> None:
    assert [*riddles('def f():\n    """Have it done."""')] == ["Have it done."]
