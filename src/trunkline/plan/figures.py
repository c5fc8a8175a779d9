"""What a hardware profile says: which figures, in which units, and where each comes from.

A profile is a TOML table of figures. A figure is an inline table, `{ value = 312e12, source = "data sheet",
date = "2020-11" }`, or samples, `{ points = [[4096, 4096, 4096, 228e12]], source = "…", date = "…" }`. This module
knows the schema and checks it, so that whatever reads a profile later may rely on it. A profile with a `base` takes
over what it does not say itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DTYPES = ("bf16", "fp16", "fp32", "fp64")
DIRECTIONS = ("forward", "backward")
MEMORY_KINDS = ("copy", "pointwise", "transcendental", "reduction")
LANES = ("fetch", "stash", "comm")
COLLECTIVES = ("intra", "inter")  # within a node, between nodes

_PLACEHOLDERS = {
    "{dtype}": "|".join(DTYPES),
    "{direction}": "|".join(DIRECTIONS),
    "{lane}": "|".join(LANES),
    "{head_dim}": "[1-9][0-9]*",
    "{kernel}": "(?!default$)[A-Za-z0-9_-]+",
}
_DATE = re.compile(r"[0-9]{4}(-[0-9]{2}){0,2}")


class NoFigures(ValueError):  # noqa: N818 - it is raised to users as the ValueError that it is
    """A profile knows nothing of what is asked."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """A figure, or several alike: `path` with placeholders, and the unit of its value or of its samples' columns."""

    path: str
    unit: str
    columns: tuple[str, ...] = ()
    needed: bool = True

    def leads_through(self, keys: Sequence[str]) -> bool:
        """Whether these keys lead to such a figure, or to a table of such figures."""
        parts = self.path.split(".")
        return len(keys) <= len(parts) and all(
            re.fullmatch(_PLACEHOLDERS.get(part, re.escape(part)), key) for part, key in zip(parts, keys, strict=False)
        )

    def fits(self, keys: Sequence[str]) -> bool:
        """Whether these keys lead to such a figure."""
        return len(keys) == self.path.count(".") + 1 and self.leads_through(keys)


_LINK = tuple(
    _Rule(f"link.{name}", unit)
    for name, unit in (
        ("to_device", "bytes/s"),
        ("to_host", "bytes/s"),
        ("both_to_device", "bytes/s"),
        ("both_to_host", "bytes/s"),
        ("devices_per_uplink", "devices"),
    )
)
_RULES = (
    _Rule("memory_bytes", "bytes"),
    _Rule("devices_per_node", "devices"),
    _Rule("host_bytes", "bytes", needed=False),
    _Rule("host_bandwidth", "bytes/s"),
    *_LINK,
    *(_Rule(f"disk.{name}", "bytes/s") for name in ("read", "write", "both_read", "both_write")),
    *(
        _Rule(f"{scope}.{name}", unit, needed=False)
        for scope in COLLECTIVES
        for name, unit in (("bandwidth", "bytes/s"), ("latency", "seconds"))
    ),
    _Rule("kernel_seconds", "seconds"),
    _Rule("host_seconds", "seconds"),
    _Rule("interference.{lane}", "share", needed=False),
    _Rule("peak.{dtype}", "FLOP/s"),
    _Rule("matmul.{dtype}", "FLOP/s", ("m", "n", "k", "rate")),
    _Rule("attention.{kernel}.{direction}.{dtype}.{head_dim}", "FLOP/s", ("queries", "keys", "causal", "rate")),
    *(_Rule(f"memory.{kind}", "bytes/s", ("bytes", "rate")) for kind in MEMORY_KINDS),
)
_PLAIN = {"title": str, "device_type": str, "hypothetical": bool, "base": str, "attention.default": str}
_WHOLE = ("bytes", "devices")


def figure(value: float, source: str, date: str) -> dict[str, Any]:
    """A figure as a profile holds it.

    Args:
        value: in bytes, bytes/s, FLOP/s, seconds, devices, or a share.
        source: who measured or published it; what is estimated says so here.
        date: `"2026"`, `"2026-11"` or `"2026-11-30"`.
    """
    return {"value": value, "source": source, "date": date}


def points(rows: Sequence[Sequence[float]], source: str, date: str) -> dict[str, Any]:
    """Samples as a profile holds them.

    Args:
        rows: of `matmul`: m, n, k, FLOP/s. Of `attention`: queries, keys, 1 if causal or 0, FLOP/s. Of `memory`: bytes
            that the operation reads and writes, bytes/s.
        source: see `figure`.
        date: see `figure`.
    """
    return {"points": [list(row) for row in rows], "source": source, "date": date}


def is_figure(entry: Any) -> bool:
    """Whether an entry of a profile is a figure, not a table of figures."""
    return isinstance(entry, Mapping) and ("value" in entry or "points" in entry)


def leaves(table: Mapping[str, Any], keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every entry that is not a table, with the keys that lead to it."""
    for key, entry in table.items():
        if isinstance(entry, Mapping) and not is_figure(entry):
            yield from leaves(entry, (*keys, key))
        else:
            yield (*keys, key), entry


def merge(base: Mapping[str, Any], own: Mapping[str, Any], base_name: str) -> dict[str, Any]:
    """A profile over its base: what it says itself counts, the rest is taken over and says so in its source."""
    merged: dict[str, Any] = {}
    for key in [*base, *(key for key in own if key not in base)]:
        if key not in own:
            merged[key] = _taken_over(base[key], base_name)
        elif _is_table(own[key]) and _is_table(base.get(key)):
            merged[key] = merge(base[key], own[key], base_name)
        else:
            merged[key] = own[key]
    return merged


def _is_table(entry: Any) -> bool:
    return isinstance(entry, Mapping) and not is_figure(entry)


def _taken_over(entry: Any, base_name: str) -> Any:
    if is_figure(entry):
        return {**entry, "source": f"as {base_name}: {entry.get('source')}"}
    if isinstance(entry, Mapping):
        return {key: _taken_over(inner, base_name) for key, inner in entry.items()}
    return entry


def check(figures: Mapping[str, Any], where: str) -> None:
    """Refuse a profile that does not say what it must, or says what nobody knows.

    Args:
        figures: the profile, its base merged in.
        where: the file or name that errors begin with.

    Raises:
        ValueError: the key, what it is and what it should be.
    """
    for keys, entry in leaves(figures):
        _check_entry(keys, entry, where)
    device_type = figures.get("device_type")
    if device_type not in ("cuda", "cpu"):
        raise ValueError(f'{where}: device_type must be "cuda" or "cpu", not {device_type!r}.')
    if not figures.get("title"):
        raise ValueError(f"{where}: title is missing: name the hardware for people, as text.")
    if device_type == "cpu" and "link" in figures:
        raise ValueError(f'{where}: link must be left out where device_type is "cpu": host memory is the device\'s.')
    given = [keys for keys, _ in leaves(figures)]
    for rule in _RULES:
        if device_type == "cpu" and rule in _LINK:
            continue
        if rule.needed and not any(rule.fits(keys) for keys in given):
            raise ValueError(f"{where}: {rule.path} is missing: give {_form(rule)}.")
    for scope in COLLECTIVES:
        lacking = [name for name in ("bandwidth", "latency") if name not in figures.get(scope, {})]
        if len(lacking) == 1:
            raise ValueError(
                f"{where}: {scope}.{lacking[0]} is missing: give it, too, or leave {scope} out where nothing is known "
                "of such collectives."
            )
    _check_attention(figures["attention"], where)


def _check_entry(keys: tuple[str, ...], entry: Any, where: str) -> None:
    name = ".".join(keys)
    if name in _PLAIN:
        if not isinstance(entry, _PLAIN[name]):
            wanted = "text" if _PLAIN[name] is str else "true or false"
            raise ValueError(f"{where}: {name} must be {wanted}, not {entry!r}.")
        return
    rule = next((r for r in _RULES if r.fits(keys)), None)
    if rule is None:
        raise ValueError(f"{where}: {name} is not a figure of a profile; {_expected(keys)}.")
    if not is_figure(entry):
        raise ValueError(f"{where}: {name} must be {_form(rule)}, not {entry!r}.")
    _check_figure(entry, rule, f"{where}: {name}")


def _expected(keys: tuple[str, ...]) -> str:
    """What may stand where these keys first lead nowhere."""
    depth = next(
        n for n in range(len(keys) + 1) if n == len(keys) or not any(r.leads_through(keys[: n + 1]) for r in _RULES)
    )
    parts = {r.path.split(".")[depth] for r in _RULES if r.leads_through(keys[:depth]) and r.path.count(".") >= depth}
    parts |= set() if depth else {name for name in _PLAIN if "." not in name}
    words = {"{head_dim}": "head dims", "{kernel}": "names of attention kernels"}
    known = sorted(words.get(part) or _PLACEHOLDERS.get(part, part).replace("|", ", ") for part in parts)
    return f"below {'.'.join(keys[:depth]) or 'the top'} there may be {', '.join(known)}"


def _check_figure(entry: Mapping[str, Any], rule: _Rule, place: str) -> None:
    wanted = {"points" if rule.columns else "value", "source", "date"}
    if set(entry) != wanted:
        raise ValueError(f"{place} must be {_form(rule)}, with no other keys; it has {', '.join(sorted(entry))}.")
    if not isinstance(entry["source"], str) or not entry["source"].strip():
        raise ValueError(f"{place}: source must say where the figure comes from, not {entry['source']!r}.")
    if not isinstance(entry["date"], str) or not _DATE.fullmatch(entry["date"]):
        raise ValueError(f'{place}: date must be text like "2026", "2026-11" or "2026-11-30", not {entry["date"]!r}.')
    if not rule.columns:
        if not _in_unit(entry["value"], rule.unit):
            raise ValueError(f"{place}: value must be {_amount(rule.unit)}, not {entry['value']!r}.")
        return
    rows = entry["points"]
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{place}: points must be a list of [{', '.join(rule.columns)}], not {rows!r}.")
    for row in rows:
        fits = isinstance(row, list) and len(row) == len(rule.columns)
        if not fits or not all(
            value in (0, 1) if column == "causal" else _in_unit(value, rule.unit if column == "rate" else "bytes")
            for column, value in zip(rule.columns, row, strict=True)
        ):
            raise ValueError(
                f"{place}: a point must be [{', '.join(rule.columns)}], whole sizes and a rate in {rule.unit}"
                f"{', causal 1 or 0' if 'causal' in rule.columns else ''}; not {row!r}."
            )


def _in_unit(value: Any, unit: str) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    if unit == "share":
        return 0 <= value < 1
    return value > 0 and (unit not in _WHOLE or float(value).is_integer())


def _amount(unit: str) -> str:
    if unit == "share":
        return "a share of at least 0 and below 1"
    return f"a positive {'whole ' if unit in _WHOLE else ''}number ({unit})"


def _form(rule: _Rule) -> str:
    what = f"points = [[{', '.join(rule.columns)}], …]" if rule.columns else f"value = {rule.unit}"
    return f'{{ {what}, source = "…", date = "2026-11" }}'


def _check_attention(attention: Mapping[str, Any], where: str) -> None:
    kernels = [key for key in attention if key != "default"]
    default = attention.get("default")
    if default not in kernels:
        raise ValueError(f"{where}: attention.default must be one of {', '.join(kernels)}, not {default!r}.")
    for kernel in kernels:
        for direction in DIRECTIONS:
            if not attention[kernel].get(direction):
                raise ValueError(f"{where}: attention.{kernel}.{direction} is missing: give it for one dtype at least.")
        for keys, entry in leaves(attention[kernel], ("attention", kernel)):
            if {bool(row[2]) for row in entry["points"]} != {False, True}:
                raise ValueError(
                    f"{where}: {'.'.join(keys)}: give at least one causal and one other point (third column 1 and 0)."
                )


def to_toml(figures: Mapping[str, Any]) -> str:
    """A profile as the text of a TOML file, which `trunkline.plan.hardware.parse` reads back as it was.

    Args:
        figures: nested tables with `figure` and `points` at their ends.
    """
    lines: list[str] = []
    _write(figures, "", lines)
    return "\n".join(lines).strip() + "\n"


def _write(table: Mapping[str, Any], name: str, lines: list[str]) -> None:
    entries = {key: entry for key, entry in table.items() if not _is_table(entry)}
    if name and entries:
        lines.extend(("", f"[{name}]"))
    lines.extend(f"{_key(key)} = {_literal(entry)}" for key, entry in entries.items())
    for key, entry in table.items():
        if _is_table(entry):
            _write(entry, f"{name}.{_key(key)}" if name else _key(key), lines)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def _literal(entry: Any) -> str:
    if isinstance(entry, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_literal(inner)}" for key, inner in entry.items()) + " }"
    if isinstance(entry, list | tuple):
        return "[" + ", ".join(_literal(inner) for inner in entry) + "]"
    if isinstance(entry, bool):
        return "true" if entry else "false"
    return json.dumps(entry, ensure_ascii=False) if isinstance(entry, str) else repr(entry)
