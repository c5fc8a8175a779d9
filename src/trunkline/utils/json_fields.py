"""Values of a JSON file that others wrote, each checked where it is read, so that a message can name its place."""

from __future__ import annotations

import json
import math
from typing import Any


def parse(text: str) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        text: of the file.

    Raises:
        ValueError: it is no JSON, or no object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is no JSON ({error}).") from error
    return mapping(value, "the file")


def member(record: dict[str, Any], name: str, where: str = "") -> Any:
    """Return what stands under a name that must be there."""
    if name not in record:
        raise ValueError(f"{where}{name} is missing.")
    return record[name]


def mapping(value: Any, what: str) -> dict[str, Any]:
    """Return a JSON object; null is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {shown(value)}, and must be an object.")
    return value


def items(value: Any, what: str, length: int | None = None) -> list[Any]:
    """Return a list, of `length` items where that is given."""
    if not isinstance(value, list | tuple) or (length is not None and len(value) != length):
        wanted = "a list" if length is None else f"a list of {length}"
        raise ValueError(f"{what} is {shown(value)}, and must be {wanted}.")
    return list(value)


def text(value: Any, what: str) -> str:
    """Return text."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is {shown(value)}, and must be text.")
    return value


def number(value: Any, what: str) -> float:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{what} is {shown(value)}, and must be a finite number.")
    return float(value)


def amount(value: Any, what: str) -> float:
    """Return a finite number that is not negative."""
    found = number(value, what)
    if found < 0:
        raise ValueError(f"{what} is {shown(value)}, and must not be negative.")
    return found


def whole(value: Any, what: str) -> int:
    """Return a whole number that is not negative; 3.0 is one."""
    found = amount(value, what)
    if found != int(found):
        raise ValueError(f"{what} is {shown(value)}, and must be a whole number.")
    return int(value)


def shown(value: Any) -> str:
    """Return a value for a message, shortened."""
    written = repr(value)
    return written if len(written) <= 60 else written[:57] + "..."
