"""Where an axis has its ticks."""

from __future__ import annotations

import math

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def byte_unit(nbytes: float) -> tuple[float, str]:
    """Return the 1024-based unit that suits a number of bytes: its bytes and its name."""
    power = min(len(_BYTE_UNITS) - 1, max(0, math.floor(math.log(max(nbytes, 1), 1024) + 1e-9)))
    return 1024.0**power, _BYTE_UNITS[power]


def spacing(span: float, count: int) -> float:
    """Return the distance of ticks, 1, 2 or 5 times a power of ten, that gives about `count` of them over `span`."""
    rough = span / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))


def ticks(low: float, high: float, count: int) -> list[tuple[float, str]]:
    """Return about `count` ticks between two values, with their labels.

    Args:
        low: of the axis.
        high: of the axis, above `low`.
        count: about how many.
    """
    step = spacing(high - low, count)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(i * step, f"{i * step:,.{digits}f}") for i in range(first, last + 1)]


def whole_ticks(low: float, high: float, count: int) -> list[tuple[float, str]]:
    """Return ticks of whole numbers."""
    return [(at, f"{at:,.0f}") for at, _ in ticks(low, high, count) if at == round(at)] or [(low, f"{low:,.0f}")]


def byte_ticks(high: float, count: int) -> list[tuple[float, str]]:
    """Return ticks from 0 to `high` bytes in the 1024-based unit that suits them."""
    unit, name = byte_unit(high)
    return [(at * unit, f"{label} {name}") for at, label in ticks(0.0, high / unit, count)]


def round_up(high: float, count: int) -> float:
    """Return the end of an axis that shows `high` and a little above."""
    step = spacing(high, count)
    return step * math.ceil(high * 1.02 / step - 1e-9)
