"""Schema of a hardware profile: its figures, their units, and the source and date of each.

A profile is a TOML table of figures. A figure is an inline table with one value, `{ value = 312e12, source = "data
sheet", date = "2020-11" }`, or with samples, `{ points = [[4096, 4096, 4096, 228e12]], source = "…", date = "…" }`.
Pydantic checks it and keeps the number, or an interpolation of the samples; source and date stay in the raw tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    Strict,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from trunkline.plan.hardware.interpolation import AttentionSamples, RateCurve, RateSamples

Dtype: TypeAlias = Literal["bf16", "fp16", "fp32", "fp64"]
Direction: TypeAlias = Literal["forward", "backward"]
MemoryKind: TypeAlias = Literal["copy", "pointwise", "transcendental", "reduction"]

_DATE = re.compile(r"[0-9]{4}(-[0-9]{2}){0,2}")
_Positive: TypeAlias = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
_Size: TypeAlias = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False, multiple_of=1)]


class NoFigures(ValueError):  # noqa: N818 - it is raised to users as the ValueError that it is
    """Error: a profile has no figures for the requested dtype, or for collectives."""


def _content(entry: Any, key: str, form: str) -> Any:
    """Return `entry[key]` of a figure after checking its keys, source and date; errors show the valid `form`."""
    if not isinstance(entry, Mapping) or set(entry) != {key, "source", "date"}:
        raise ValueError(f"give {form} and no other keys, not {entry!r}")
    if not isinstance(entry["source"], str) or not entry["source"].strip():
        raise ValueError(f"source must say where the figure comes from, not {entry['source']!r}")
    if not isinstance(entry["date"], str) or not _DATE.fullmatch(entry["date"]):
        raise ValueError(f'date must be text like "2026", "2026-11" or "2026-11-30", not {entry["date"]!r}')
    return entry[key]


class _ValueReader:
    """Validator of a figure with one value."""

    def __init__(self, unit: str, amount: str = "a positive number") -> None:
        self.form = f'{{ value = {unit}, source = "…", date = "2026-11" }}'
        self._wanted = f"{amount} ({unit})"

    def __call__(self, entry: Any, check: ValidatorFunctionWrapHandler) -> Any:
        value = _content(entry, "value", self.form)
        try:
            return check(None if isinstance(value, bool | str) else value)  # pydantic would take True for 1
        except ValidationError:
            raise ValueError(f"value must be {self._wanted}, not {value!r}") from None


class _PointsReader:
    """Validator of a figure with samples: each point has the sizes, then the rate."""

    def __init__(self, build: type[RateSamples | AttentionSamples], unit: str, *columns: str) -> None:
        self.form = f'{{ points = [[{", ".join(columns)}, rate], …], source = "…", date = "2026-11" }}'
        self._build = build
        kinds = [Literal[0, 1] if column == "causal" else _Size for column in columns]
        rows: Any = Annotated[list.__class_getitem__(tuple.__class_getitem__((*kinds, _Positive))), Field(min_length=1)]
        self._rows: TypeAdapter[Any] = TypeAdapter(rows)
        self._wanted = f"[{', '.join(columns)}, rate], whole sizes and a rate in {unit}"

    def __call__(self, entry: Any) -> RateSamples | AttentionSamples:
        rows = _content(entry, "points", self.form)
        try:
            self._rows.validate_python(rows)
        except ValidationError as error:
            place = error.errors()[0]["loc"]
            wrong = rows[place[0]] if place else rows
            raise ValueError(f"points must be a list of {self._wanted}; not {wrong!r}") from None
        return self._build(rows)


_WHOLE = "a positive whole number"
Bytes: TypeAlias = Annotated[int, Field(gt=0), WrapValidator(_ValueReader("bytes", _WHOLE))]
Devices: TypeAlias = Annotated[int, Field(gt=0), WrapValidator(_ValueReader("devices", _WHOLE))]
BytesPerSecond: TypeAlias = Annotated[_Positive, WrapValidator(_ValueReader("bytes/s"))]
FlopsPerSecond: TypeAlias = Annotated[_Positive, WrapValidator(_ValueReader("FLOP/s"))]
Seconds: TypeAlias = Annotated[_Positive, WrapValidator(_ValueReader("seconds"))]
Share: TypeAlias = Annotated[
    float, Field(ge=0, lt=1), WrapValidator(_ValueReader("share", "a number of at least 0 and below 1"))
]
MatmulPoints: TypeAlias = Annotated[RateSamples, PlainValidator(_PointsReader(RateSamples, "FLOP/s", "m", "n", "k"))]
_MEMORY = _PointsReader(RateCurve, "bytes/s", "bytes")
MemoryPoints: TypeAlias = Annotated[RateCurve, PlainValidator(_MEMORY)]
AttentionPoints: TypeAlias = Annotated[
    AttentionSamples, PlainValidator(_PointsReader(AttentionSamples, "FLOP/s", "queries", "keys", "causal"))
]
_HeadDims: TypeAlias = dict[Annotated[int, Field(gt=0)], AttentionPoints]
_AttentionTables: TypeAlias = Annotated[dict[Dtype, _HeadDims], Field(min_length=1)]


class _ProfileTable(BaseModel):
    """A table of a profile: all of its keys are known, and those without a default are there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, table: Any) -> Any:
        if not isinstance(table, Mapping):
            return table
        for name, field in cls.model_fields.items():
            if name not in table and field.is_required():
                forms = [m.func.form for m in field.metadata if hasattr(getattr(m, "func", None), "form")]
                raise _key_error(f"{name} is missing: give {[*forms, field.description or 'a table of figures'][0]}")
        for name in table:
            if name not in cls.model_fields and cls.model_config["extra"] == "forbid":
                known = ", ".join(sorted(cls.model_fields))
                raise _key_error(f"{name} is not a figure of a profile; leave it out, or give one of {known}")
        return table


def _key_error(text: str) -> PydanticCustomError:
    return PydanticCustomError("profile_key", "{text}", {"text": text})


class LinkFigures(_ProfileTable):
    """Link between host memory and a device, bytes/s: one direction at a time, and each while both are busy."""

    to_device: BytesPerSecond
    to_host: BytesPerSecond
    both_to_device: BytesPerSecond
    both_to_host: BytesPerSecond
    devices_per_uplink: Devices


class DiskFigures(_ProfileTable):
    """Scratch disks of a node, bytes/s: one direction at a time, and each while both are busy."""

    read: BytesPerSecond
    write: BytesPerSecond
    both_read: BytesPerSecond
    both_write: BytesPerSecond


class CollectiveFigures(_ProfileTable):
    """Collectives over some ranks.

    Attributes:
        bandwidth: bus bandwidth of a device, bytes/s: the bytes that a ring would send, over the time.
        latency: seconds of the smallest collective.
    """

    bandwidth: BytesPerSecond
    latency: Seconds


class AttentionFigures(_ProfileTable):
    """FLOP/s of one attention kernel, by direction, dtype and head dim."""

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
    """All figures of a profile; `docs/plan.md` explains each."""

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
        tables: the profile, its base merged in.
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
    """Yield every entry that is no table, with its dotted name."""
    for key, entry in table.items():
        if _is_table(entry):
            yield from entries_of(entry, f"{path}{key}.")
        else:
            yield f"{path}{key}", entry


def merge_figures(base: Mapping[str, Any], own: Mapping[str, Any], base_name: str) -> dict[str, Any]:
    """Return a profile over its base; a figure taken over from the base says so in its source."""
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
