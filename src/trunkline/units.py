"""Numbers of bytes and of tokens with units, and the names of the memory tiers."""

from __future__ import annotations

import re
from typing import Literal

TierName = Literal["device", "host", "disk"]
OFFLOAD_TIERS: tuple[TierName, ...] = ("host", "disk")
TIERS: tuple[TierName, ...] = ("device", *OFFLOAD_TIERS)

_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGTP", 1)},
          **{f"{p}IB": 1024**i for i, p in enumerate("KMGTP", 1)}}  # fmt: skip

TOKEN_UNITS = {"": 1, "K": 1024, "M": 1024**2}


def parse_bytes(setting: str, value: int | str | None) -> int | None:
    """Parse a number of bytes, given as an integer or as "24GiB" (1024-based), "24GB" (1000-based).

    Args:
        setting: name of the setting, for the message.
        value: value of the setting, 0 or more; None stays None. A fraction, such as "1.5GiB", is rounded down to bytes.

    Raises:
        ValueError: the value is not a number of bytes.
    """
    if value is None:
        return None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match and match[2].upper() in _UNITS and ("." not in match[1] or _UNITS[match[2].upper()] > 1):
            return int(float(match[1]) * _UNITS[match[2].upper()])
    elif isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(f"{setting}={value!r}: give a number of bytes, or one with a unit, such as '24GiB' or '500MB'.")


def format_bytes(nbytes: int) -> str:
    """Return a number of bytes as text, in 1024-based units, rounded to a tenth of the unit."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if unit != "B" else f"{nbytes} B"


def parse_tokens(text: int | str) -> int:
    """Parse a number of tokens.

    Args:
        text: a number, or one followed by K (1,024) or M (1,048,576): "16K", "1.5M", "32_768".

    Raises:
        ValueError: it is not a whole number of tokens above 0.
    """
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise ValueError(f"{text!r} is not a number of tokens: write 4096, 4K or 1M")
    match = re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?)\s*([KM]?)", str(text).strip().upper())
    tokens = 0.0 if match is None else float(re.sub("[_,]", "", match[1])) * TOKEN_UNITS[match[2]]
    if tokens < 1 or tokens != int(tokens):
        raise ValueError(f"{text!r} is not a number of tokens: write 4096, 4K or 1M")
    return int(tokens)
