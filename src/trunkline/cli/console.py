"""Lines of text on a console."""

from __future__ import annotations

from rich.console import Console


def say(console: Console, *lines: str, style: str = "", wrap: bool = False) -> None:
    """Print lines exactly as they are: nothing in them is markup, and numbers are not coloured.

    Args:
        console: console to print on.
        lines: lines of text.
        style: style of all of them.
        wrap: break lines at the width of the console; programs read the output that is not broken.
    """
    for line in lines:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=not wrap)
