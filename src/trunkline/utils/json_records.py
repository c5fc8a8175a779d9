"""Records read from JSON, with errors that name the field in one sentence."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A finite number."""
Amount = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0)]
"""A finite number that is not negative."""
Count = Annotated[int, Field(ge=0)]
"""A whole number that is not negative; 3.0 is one."""

RecordT = TypeVar("RecordT")


def read_json(record: type[RecordT], text: str) -> RecordT:
    """Read a record from JSON text.

    Args:
        record: a pydantic model or dataclass.
        text: JSON of one object.

    Raises:
        ValueError: the text is no JSON or no such record. The message names the first field that is wrong.
    """
    try:
        return TypeAdapter(record).validate_json(text)
    except ValidationError as error:
        raise ValueError(describe_error(error)) from error


def describe_error(error: ValidationError) -> str:
    """Return one sentence on the first field that pydantic refused: its place, its value, the reason."""
    first = error.errors()[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"] if part != "[key]")
    place = place.removeprefix(".")
    message = first["msg"].removeprefix("Value error, ").removesuffix(".")
    if first["type"] == "missing":
        return f"{place} is missing."
    if first["type"] == "json_invalid":
        return f"this is no JSON ({message.removeprefix('Invalid JSON: ')})."
    if not place and first["type"] == "value_error":  # a record's own check, which says all
        return f"{message}."
    value = repr(first["input"])
    shown = value if len(value) <= 60 else value[:57] + "..."
    return f"{place or 'the file'} is {shown}: {message[0].lower()}{message[1:]}."
