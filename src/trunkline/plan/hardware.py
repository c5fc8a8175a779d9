"""Hardware profiles: what the machine that a plan is for can hold, move and compute.

A profile is data, not code: `hardware.toml` beside this module has those of common accelerators, every figure with its
source and date, and `load` takes any file of the same form. What is not known is refused, never guessed.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch

from trunkline.plan import own
from trunkline.plan.figures import LANES, NoFigures, check, figure, is_figure, leaves, merge, points, to_toml
from trunkline.plan.rates import Direction, MemoryKind, Rates

__all__ = [
    "Collective",
    "Disk",
    "Hardware",
    "Link",
    "NoFigures",
    "figure",
    "load",
    "names",
    "parse",
    "points",
    "to_toml",
]


@dataclass(frozen=True, slots=True)
class Link:
    """Between host memory and a device, in bytes/s: one direction at a time, and each while both are busy.

    Attributes:
        devices_per_uplink: devices that share it.
    """

    to_device: float
    to_host: float
    both_to_device: float
    both_to_host: float
    devices_per_uplink: int


@dataclass(frozen=True, slots=True)
class Disk:
    """The scratch disks of a node, in bytes/s: one direction at a time, and each while both are busy."""

    read: float
    write: float
    both_read: float
    both_write: float


@dataclass(frozen=True, slots=True)
class Collective:
    """Collectives over some ranks.

    Attributes:
        bandwidth: bus bandwidth in bytes/s a device: what a device would send if it sent every byte that a ring sends.
        latency: seconds that the smallest one takes.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True, eq=False)
class Hardware:
    """A kind of machine.

    FLOPs are counted so: a matrix product of (m, k) and (k, n) is 2mnk. Attention of one query head is 4 · head_dim
    for each pair of a query and a key that it sees, forward, and 10 · head_dim backward (five products); a causal
    square of n tokens has n(n + 1)/2 pairs. Papers that count backward as 2.5 times forward fit as they are.

    Attributes:
        name: what it was loaded by.
        title: for people.
        hypothetical: nobody sells it; some figures ask "what if".
        memory_bytes: of a device.
        host_bytes: of a node; None where no usual size exists.
        host_bandwidth: of a node's memory, bytes/s.
        link: None where host memory is the device.
        intra: collectives within a node; None where nobody measured them.
        inter: between nodes, where every device sends over its own share of the network; None likewise.
        kernel_seconds: the least time of a kernel on the device.
        host_seconds: what the host takes to issue one operator from eager PyTorch.
        interference: of each lane ("fetch", "stash", "comm"), the share of compute's speed that is lost while it is
            busy; 0 where nothing is known.
        attention: the kernel whose attention figures count.
        figures: the whole profile, as `to_toml` takes it.
    """

    name: str
    title: str
    device_type: Literal["cuda", "cpu"]
    hypothetical: bool
    memory_bytes: int
    devices_per_node: int
    host_bytes: int | None
    host_bandwidth: float
    link: Link | None
    disk: Disk
    intra: Collective | None
    inter: Collective | None
    kernel_seconds: float
    host_seconds: float
    interference: Mapping[str, float]
    attention: str
    figures: Mapping[str, Any] = field(repr=False)
    _rates: Rates = field(repr=False)

    @classmethod
    def from_figures(
        cls,
        figures: Mapping[str, Any],
        *,
        name: str = "profile",
        attention: str | None = None,
        where: str | None = None,
    ) -> Hardware:
        """A profile from tables of figures, such as a measurement makes with `figure` and `points`.

        Args:
            figures: as in a profile file; with a `base` only what differs from it.
            name: what to call it.
            attention: the kernel whose attention figures count; None takes the profile's default.
            where: what errors begin with; None is the name.

        Raises:
            ValueError: a figure is missing, unknown or malformed, the base is unknown, or there are no figures of this
                attention kernel.
        """
        where = where or f"hardware profile {name!r}"
        whole = _with_base(figures, where)
        check(whole, where)
        kernels = [key for key in whole["attention"] if key != "default"]
        kernel = attention if attention is not None else whole["attention"]["default"]
        if kernel not in kernels:
            raise ValueError(f"attention={attention!r}: {where} has figures of {', '.join(kernels)}.")
        values = _values(whole)
        return cls(
            name=name,
            title=whole["title"],
            device_type=whole["device_type"],
            hypothetical=whole.get("hypothetical", False),
            memory_bytes=int(values["memory_bytes"]),
            devices_per_node=int(values["devices_per_node"]),
            host_bytes=int(values["host_bytes"]) if "host_bytes" in values else None,
            host_bandwidth=values["host_bandwidth"],
            link=_link(values["link"]) if "link" in values else None,
            disk=Disk(**values["disk"]),
            intra=Collective(**values["intra"]) if values.get("intra") else None,
            inter=Collective(**values["inter"]) if values.get("inter") else None,
            kernel_seconds=values["kernel_seconds"],
            host_seconds=values["host_seconds"],
            interference={lane: values.get("interference", {}).get(lane, 0.0) for lane in LANES},
            attention=kernel,
            figures=whole,
            _rates=Rates(name, whole, kernel),
        )

    def peak(self, dtype: torch.dtype) -> float:
        """Dense FLOP/s that the data sheet promises; fp32 is what PyTorch does by default, without TF32.

        Raises:
            ValueError: the profile has no figure for the dtype.
        """
        return self._rates.peak(dtype)

    def matmul_rate(self, dtype: torch.dtype, m: int, n: int, k: int) -> float:
        """FLOP/s (2mnk) that a product of (m, k) and (k, n) reaches.

        Samples are weighted by their nearness in the logarithms of m, n and k. fp16 counts as bf16 where it has no
        samples of its own, and fp32 on a GPU as bf16 in proportion to the peaks.

        Raises:
            ValueError: the profile has no figures for the dtype.
        """
        return self._rates.matmul(dtype, m, n, k)

    def attention_rate(
        self, direction: Direction, dtype: torch.dtype, head_dim: int, queries: int, keys: int, *, causal: bool
    ) -> float:
        """FLOP/s that an attention kernel reaches; `Hardware` says how they are counted, `matmul_rate` which dtypes.

        Samples are weighted by their nearness in the logarithms of queries and keys. For a head dim without samples
        the time of a pair is taken to be linear between those that have some (on GPUs after padding to a multiple of
        32); below all of them the time stays, above all of them the rate.

        Args:
            direction: forward or backward.
            dtype: of queries, keys and values.
            head_dim: of queries and keys.
            queries: rows of one call.
            keys: of the same call.
            causal: the call masks (the lower triangle, or a trapezium aligned to the last key); otherwise all pairs.

        Raises:
            ValueError: the profile has no figures for the dtype.
        """
        return self._rates.attention(direction, dtype, head_dim, queries, keys, causal)

    def has_attention(self, dtype: torch.dtype) -> bool:
        """Whether `attention_rate` knows a dtype."""
        return self._rates.has_attention(dtype)

    def memory_rate(self, kind: MemoryKind, nbytes: int) -> float:
        """Bytes/s, read and written together, of an operation that device memory bounds.

        Args:
            kind: a copy, arithmetic element by element, the same with exponentials or logarithms, or a reduction.
            nbytes: that the operation reads and writes.
        """
        return self._rates.memory(kind, nbytes)

    def sources(self) -> list[tuple[str, str, str]]:
        """Every figure by its dotted name, in alphabetical order, with its source and date."""
        return sorted(
            (".".join(keys), entry["source"], entry["date"]) for keys, entry in leaves(self.figures) if is_figure(entry)
        )


def names() -> list[str]:
    """The profiles that come with Trunkline, and `this-machine` where `trunkline tune` has measured it."""
    return [*_bundled(), *([own.NAME] if own.path().is_file() else [])]


def load(name_or_path: str, *, attention: str | None = None) -> Hardware:
    """A profile by name, or from a `.toml` file such as `trunkline tune` writes.

    Args:
        name_or_path: one of `names()`, or a path that ends in `.toml`; `this-machine` is what `trunkline tune` wrote.
        attention: whose attention figures count, such as `"fa3"`; None takes what PyTorch uses as installed.

    Raises:
        ValueError: no such profile or file, the file is malformed (file, key and what it should be), or there are no
            figures of this attention kernel (with those that there are).
    """
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"hardware={name_or_path!r}: cannot be read ({error.strerror}).") from None
        return parse(text, name=path.stem, attention=attention, where=name_or_path)
    if name_or_path == own.NAME:
        figures = own.read(f"hardware={own.NAME!r}")
        return Hardware.from_figures(figures, name=own.NAME, attention=attention, where=str(own.path()))
    return _load_bundled(name_or_path, attention)


def parse(text: str, *, name: str = "profile", attention: str | None = None, where: str | None = None) -> Hardware:
    """A profile from the text of a TOML file; `to_toml` is the inverse.

    Args:
        text: one profile, its figures at the top level.
        name: what to call it.
        attention: see `load`.
        where: what errors begin with; None is the name.

    Raises:
        ValueError: see `load`.
    """
    try:
        figures = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where or name}: not TOML: {error}") from None
    return Hardware.from_figures(figures, name=name, attention=attention, where=where)


@cache
def _bundled() -> dict[str, dict[str, Any]]:
    text = resources.files("trunkline.plan").joinpath("hardware.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def _load_bundled(name: str, attention: str | None) -> Hardware:
    return Hardware.from_figures(_named(name, f"hardware={name!r}"), name=name, attention=attention)


def _named(name: str, where: str) -> dict[str, Any]:
    """The figures of a profile that has a name, without those of its base."""
    if name == own.NAME:
        return own.read(where)
    known = _bundled()
    if name in known:
        return known[name]
    nearest = sorted(known, key=lambda other: _likeness(name.lower(), other), reverse=True)
    raise ValueError(
        f"{where}: no such profile; there are {', '.join(nearest)}, or the path of a .toml file with figures of your "
        f"own (docs/plan.md says how to write one), or {own.NAME}, which `trunkline tune` measures."
    )


def _likeness(name: str, other: str) -> tuple[int, float]:
    """How near two names are: by the longest part that both have (`h100`), then as a whole."""
    matcher = difflib.SequenceMatcher(None, name, other)
    return matcher.find_longest_match().size, matcher.ratio()


def _with_base(figures: Mapping[str, Any], where: str) -> dict[str, Any]:
    """All figures of a profile: its own, and those of its base, and of the base's."""
    base = figures.get("base")
    if base is None:
        return dict(figures)
    if not isinstance(base, str):
        raise ValueError(f"{where}: base must be text, not {base!r}.")
    whole = _with_base(_named(base, f"{where}: base={base!r}"), where)
    title = whole.get("title")
    whole.pop("base", None)
    whole = merge(whole, {key: entry for key, entry in figures.items() if key != "base"}, base)
    if "title" not in figures:
        whole["title"] = f"{title}, changed"
    return whole


def _values(table: Mapping[str, Any]) -> dict[str, Any]:
    """The figures with a single value, as nested numbers."""
    return {
        key: float(entry["value"]) if "value" in entry else _values(entry)
        for key, entry in table.items()
        if isinstance(entry, Mapping) and "points" not in entry
    }


def _link(values: Mapping[str, float]) -> Link:
    rates = {key: value for key, value in values.items() if key != "devices_per_uplink"}
    return Link(**rates, devices_per_uplink=int(values["devices_per_uplink"]))
