"""Text of other libraries' errors, shortened for messages."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type where it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
