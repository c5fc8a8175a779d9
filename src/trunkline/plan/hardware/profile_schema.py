"""Schema of a hardware profile: its figures, their units, and the source and date of each.

A profile is a TOML table of figures. A figure is an inline table with one value, `{ value = 312e12, source = "data
sheet", date = "2020-11" }`, or with samples, `{ points = [[4096, 4096, 4096, 228e12]], source = "…", date = "…" }`.
Pydantic checks it and keeps the number, or an interpolation of the samples; source and date stay in the raw tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, Strict, TypeAdapter, ValidationError, model_validator
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from trunkline.plan.hardware.interpolation import AttentionSamples, RateCurve, RateSamples

Dtype: TypeAlias = Literal["bf16", "fp16", "fp32", "fp64"]
Direction: TypeAlias = Literal["forward", "backward"]
MemoryKind: TypeAlias = Literal["copy", "pointwise", "transcendental", "reduction"]

_DATE = re.compile(r"[0-9]{4}(-[0-9]{2}){0,2}")
_Positive: TypeAlias = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
_Size: TypeAlias = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False, multiple_of=1)]
_Share: TypeAlias = Annotated[float, Strict(), Field(ge=0, lt=1)]


class NoFigures(ValueError):  # noqa: N818 - it is raised to users as the ValueError that it is
    """Error: a profile has no figures for the requested dtype, or for collectives."""


class _FigureReader:
    """Reader of a figure: checks its keys, source, date and content, and returns what the profile keeps of it.

    Args:
        key: `value` or `points`, which has the content.
        content: the content, as errors show it.
        refusal: beginning of the error for other content.
        kind: type of the content.
        build: makes what is kept of the content.
    """

    def __init__(self, key: str, content: str, refusal: str, kind: Any, build: Callable[[Any], Any]) -> None:
        self.form = f'{{ {key} = {content}, source = "…", date = "2026-11" }}'
        self._key, self._refusal, self._kind, self._build = key, refusal, TypeAdapter[Any](kind), build

    def __get_pydantic_core_schema__(self, _kept: Any, _handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._read)

    def _read(self, entry: Any) -> Any:
        if not isinstance(entry, Mapping) or set(entry) != {self._key, "source", "date"}:
            raise ValueError(f"give {self.form} and no other keys, not {entry!r}")
        if not isinstance(entry["source"], str) or not entry["source"].strip():
            raise ValueError(f"source must say where the figure comes from, not {entry['source']!r}")
        if not isinstance(entry["date"], str) or not _DATE.fullmatch(entry["date"]):
            raise ValueError(f'date must be text like "2026", "2026-11" or "2026-11-30", not {entry["date"]!r}')
        content = entry[self._key]
        try:
            self._kind.validate_python(content)
        except ValidationError as error:
            place = error.errors()[0]["loc"]  # the row of a point that is wrong; empty for a value
            raise ValueError(f"{self._refusal}{content[place[0]] if place else content!r}") from None
        return self._build(content)


def _value(unit: str, kind: Any = _Positive, amount: str = "a positive number", build: Any = float) -> _FigureReader:
    return _FigureReader("value", unit, f"value must be {amount} ({unit}), not ", kind, build)


def _whole(unit: str) -> _FigureReader:
    return _value(unit, _Size, "a positive whole number", int)


def _points(build: Callable[[Any], Any], unit: str, *columns: str) -> _FigureReader:
    """Return the reader of samples: each point has the sizes in `columns`, then the rate."""
    point = f"[{', '.join(columns)}, rate]"
    kinds = [Literal[0, 1] if column == "causal" else _Size for column in columns]
    rows: Any = Annotated[list.__class_getitem__(tuple.__class_getitem__((*kinds, _Positive))), Field(min_length=1)]
    refusal = f"points must be a list of {point}, whole sizes and a rate in {unit}; not "
    return _FigureReader("points", f"[{point}, …]", refusal, rows, build)


_MEMORY = _points(RateCurve, "bytes/s", "bytes")
Bytes: TypeAlias = Annotated[int, _whole("bytes")]
Devices: TypeAlias = Annotated[int, _whole("devices")]
BytesPerSecond: TypeAlias = Annotated[float, _value("bytes/s")]
FlopsPerSecond: TypeAlias = Annotated[float, _value("FLOP/s")]
Seconds: TypeAlias = Annotated[float, _value("seconds")]
Share: TypeAlias = Annotated[float, _value("share", _Share, "a number of at least 0 and below 1")]
MatmulPoints: TypeAlias = Annotated[RateSamples, _points(RateSamples, "FLOP/s", "m", "n", "k")]
MemoryPoints: TypeAlias = Annotated[RateCurve, _MEMORY]
AttentionPoints: TypeAlias = Annotated[
    AttentionSamples, _points(AttentionSamples, "FLOP/s", "queries", "keys", "causal")
]
_HeadDims: TypeAlias = dict[Annotated[int, Field(gt=0)], AttentionPoints]
_AttentionTables: TypeAlias = Annotated[dict[Dtype, _HeadDims], Field(min_length=1)]


class _ProfileTable(BaseModel):
    """Table of a profile: refuses a missing key without a default, and an unknown key unless `extra` allows it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, table: Any) -> Any:
        if not isinstance(table, Mapping):
            return table
        for name, field in cls.model_fields.items():
            if name not in table and field.is_required():
                forms = [m.form for m in field.metadata if isinstance(m, _FigureReader)]
                raise _key_error(f"{name} is missing: give {[*forms, field.description or 'a table of figures'][0]}")
        for name in table:
            if name not in cls.model_fields and cls.model_config["extra"] == "forbid":
                known = ", ".join(sorted(cls.model_fields))
                raise _key_error(f"{name} is not a figure of a profile; leave it out, or give one of {known}")
        return table


def _key_error(text: str) -> PydanticCustomError:
    return PydanticCustomError("profile_key", "{text}", {"text": text})


class LinkFigures(_ProfileTable):
    """Link between host memory and one device.

    Attributes:
        to_device: bytes/s from host memory to the device, while the other direction is idle.
        to_host: bytes/s from the device to host memory, while the other direction is idle.
        both_to_device: bytes/s to the device while both directions are busy.
        both_to_host: bytes/s to host memory while both directions are busy.
        devices_per_uplink: devices that share these speeds.
    """

    to_device: BytesPerSecond
    to_host: BytesPerSecond
    both_to_device: BytesPerSecond
    both_to_host: BytesPerSecond
    devices_per_uplink: Devices


class DiskFigures(_ProfileTable):
    """Bytes/s of all scratch disks of a node together: one direction at a time, and each while both are busy."""

    read: BytesPerSecond
    write: BytesPerSecond
    both_read: BytesPerSecond
    both_write: BytesPerSecond


class CollectiveFigures(_ProfileTable):
    """Collectives over some ranks.

    Attributes:
        bandwidth: bus bandwidth of a device, bytes/s: the bytes that each rank of a ring would send, over the time.
        latency: seconds of the smallest collective.
    """

    bandwidth: BytesPerSecond
    latency: Seconds


class AttentionFigures(_ProfileTable):
    """FLOP/s of one attention kernel on one device, by direction, dtype and head dim."""

    forward: _AttentionTables
    backward: _AttentionTables


class AttentionKernels(_ProfileTable):
    """Attention kernels by name, and the one that counts unless another is asked for."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, AttentionFigures]
    default: str = Field(description="the name of an attention kernel, as text")

    @property
    def kernels(self) -> dict[str, AttentionFigures]:
        """Figures by the name of the kernel."""
        return self.__pydantic_extra__

    @model_validator(mode="after")
    def _check_default(self) -> AttentionKernels:
        if self.default not in self.kernels:
            raise _key_error(f"default must be one of {', '.join(self.kernels)}, not {self.default!r}")
        return self


class ProfileFigures(_ProfileTable):
    """All figures of a profile; `docs/plan.md` explains each.

    Attributes:
        title: name of the hardware for people.
        device_type: `cuda` (also for ROCm) or `cpu`.
        hypothetical: nobody sells such a machine.
        memory_bytes: memory of one device.
        devices_per_node: devices of a node.
        host_bytes: host memory of a node; None if it must be given with each plan.
        host_bandwidth: bytes/s of a node's host memory, read and written together.
        link: link between host memory and a device; None for a CPU.
        disk: scratch disks of a node.
        intra: collectives within a node; None if unknown.
        inter: collectives between nodes; None if unknown.
        kernel_seconds: least seconds of an operator on the device.
        host_seconds: seconds in which the host issues one operator.
        interference: share of compute's speed that is lost while a lane is busy, by lane; 0 without an entry.
        peak: peak dense FLOP/s of one device by dtype; fp32 without TF32.
        matmul: FLOP/s of matrix products on one device by dtype, over m, n and k.
        attention: FLOP/s of the attention kernels.
        memory: bytes/s of one device's operators that memory bounds, by kind, over the bytes read and written.
    """

    title: str = Field(min_length=1, description="a name of the hardware for people, as text")
    device_type: Literal["cuda", "cpu"] = Field(description='"cuda" or "cpu"')
    hypothetical: Annotated[bool, Strict()] = False
    memory_bytes: Bytes
    devices_per_node: Devices
    host_bytes: Bytes | None = None
    host_bandwidth: BytesPerSecond
    link: LinkFigures | None = None
    disk: DiskFigures
    intra: CollectiveFigures | None = None
    inter: CollectiveFigures | None = None
    kernel_seconds: Seconds
    host_seconds: Seconds
    interference: dict[Literal["fetch", "stash", "comm"], Share] = {}
    peak: dict[Dtype, FlopsPerSecond] = Field(min_length=1)
    matmul: dict[Dtype, MatmulPoints] = Field(min_length=1, repr=False)
    attention: AttentionKernels = Field(repr=False)
    memory: dict[MemoryKind, MemoryPoints] = Field(repr=False)

    @model_validator(mode="after")
    def _check_whole(self) -> ProfileFigures:
        for kind in get_args(MemoryKind):
            if kind not in self.memory:
                raise _key_error(f"memory.{kind} is missing: give {_MEMORY.form}")
        if self.device_type == "cpu" and self.link is not None:
            raise _key_error('link must be left out where device_type is "cpu": host memory is the device\'s')
        if self.device_type == "cuda" and self.link is None:
            raise _key_error('link is missing: give the speeds between host memory and device, or device_type = "cpu"')
        return self


def check_figures(tables: Mapping[str, Any], where: str) -> ProfileFigures:
    """Check the tables of a profile and read their numbers.

    Args:
        tables: the profile as TOML has it, its base merged in.
        where: the file or name that errors begin with.

    Raises:
        ValueError: a figure is missing, unknown or malformed; the text names `where`, the key, and the right form.
    """
    try:
        return ProfileFigures.model_validate(tables)
    except ValidationError as error:
        raise ValueError(f"{where}: {_explain(error.errors()[0])}.") from None


def _explain(error: ErrorDetails) -> str:
    name = ".".join(str(key) for key in error["loc"] if key != "[key]")
    if error["type"] == "profile_key":
        return f"{name}.{error['msg']}" if name else error["msg"]
    if error["type"] == "value_error":
        return f"{name}: {error['ctx']['error']}"
    return f"{name}: {error['msg'][0].lower()}{error['msg'][1:]}, not {error['input']!r}"


def figure(value: float, source: str, date: str) -> dict[str, Any]:
    """Return a figure as a profile holds it.

    Args:
        value: in bytes, bytes/s, FLOP/s, seconds, devices, or a share.
        source: who measured or published it; an estimate says so here.
        date: `"2026"`, `"2026-11"` or `"2026-11-30"`.
    """
    return {"value": value, "source": source, "date": date}


def points(rows: Sequence[Sequence[float]], source: str, date: str) -> dict[str, Any]:
    """Return samples as a profile holds them.

    Args:
        rows: `matmul` has m, n, k, FLOP/s; `attention` has queries, keys, 1 if causal or 0, FLOP/s; `memory` has the
            bytes that the operation reads and writes, then bytes/s.
        source: see `figure`.
        date: see `figure`.
    """
    return {"points": [list(row) for row in rows], "source": source, "date": date}


def is_figure(entry: Any) -> bool:
    """Return whether an entry of a profile is a figure, not a table of figures."""
    return isinstance(entry, Mapping) and ("value" in entry or "points" in entry)


def _is_table(entry: Any) -> bool:
    return isinstance(entry, Mapping) and not is_figure(entry)


def entries_of(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every entry that is no table; names begin with `path`."""
    for key, entry in table.items():
        if _is_table(entry):
            yield from entries_of(entry, f"{path}{key}.")
        else:
            yield f"{path}{key}", entry


def merge_figures(base: Mapping[str, Any], own: Mapping[str, Any], base_name: str) -> dict[str, Any]:
    """Return the base's entries, replaced by the profile's own; the source of an inherited figure names the base."""
    merged = {**base, **own}
    for key, inherited in base.items():
        if _is_table(inherited) and _is_table(own.get(key, {})):
            merged[key] = merge_figures(inherited, own.get(key, {}), base_name)
        elif is_figure(inherited) and key not in own:
            merged[key] = {**inherited, "source": f"as {base_name}: {inherited.get('source')}"}
    return merged


def to_toml(figures: Mapping[str, Any]) -> str:
    """Return a profile as the text of a TOML file, one figure a line; `parse` reads it back.

    Args:
        figures: nested tables with `figure` and `points` at their ends.
    """
    return "\n".join(_lines(figures, "")).strip() + "\n"


# tomli-w and tomlkit give each figure a table of its own, four lines for one number.
def _lines(table: Mapping[str, Any], name: str) -> Iterator[str]:
    entries = {key: entry for key, entry in table.items() if not _is_table(entry)}
    if name and entries:
        yield from ("", f"[{name}]")
    yield from (f"{_key(key)} = {_literal(entry)}" for key, entry in entries.items())
    for key in (key for key in table if key not in entries):
        yield from _lines(table[key], f"{name}.{_key(key)}" if name else _key(key))


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def _literal(entry: Any) -> str:
    if isinstance(entry, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_literal(inner)}" for key, inner in entry.items()) + " }"
    if isinstance(entry, list | tuple):
        return "[" + ", ".join(_literal(inner) for inner in entry) + "]"
    return repr(entry) if isinstance(entry, float) else json.dumps(entry, ensure_ascii=False)
