"""Hardware profiles: `Hardware`, a machine that a plan is for, and where profiles come from.

A profile is data: `profiles.toml` beside this module has common accelerators, `trunkline tune` writes `this-machine`,
and `load` takes any file of the same form. A dtype without figures is refused, unless another stands in for it
(`Hardware.matmul_rate` says which).
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import Field

from trunkline.offload.lanes.sim_clock import QueueSpeeds
from trunkline.offload.lanes.simulated import DISK, LINK
from trunkline.plan.hardware.interpolation import rate_of_head_dim
from trunkline.plan.hardware.profile_schema import (
    Direction,
    MemoryKind,
    NoFigures,
    ProfileFigures,
    check_figures,
    entries_of,
    is_figure,
    merge_figures,
)

THIS_MACHINE = "this-machine"

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
# Part of PyTorch's name of a device, and its profile. The first match counts.
_DEVICES = {
    "A100-SXM4-40GB": "a100-40g", "A100-SXM4-80GB": "a100-80g", "H100 PCIe": "h100-pcie", "GH200": "gh200",
    "H100": "h100-sxm", "H200": "h200", "B200": "b200", "L40S": "l40s", "RTX 4090": "rtx-4090",
    "RTX 5090": "rtx-5090", "MI300X": "mi300x",
}  # fmt: skip
_T = TypeVar("_T")


class Hardware(ProfileFigures):
    """A kind of machine: sizes, speeds, and rates of compute. `ProfileFigures` lists its other attributes.

    FLOPs are counted so: a matrix product of (m, k) and (k, n) is 2mnk. Attention of one query head is 4 · head_dim for
    each pair of a query and a key that it sees, forward, and 10 · head_dim backward (five products); a causal square of
    n tokens has n(n + 1)/2 pairs. Papers that count backward as 2.5 times forward fit as they are.

    Attributes:
        name: of the profile.
        attention_kernel: name of the kernel whose attention figures count.
        figures: the whole profile as nested tables, which `to_toml` writes.
    """

    name: str
    attention_kernel: str
    figures: dict[str, Any] = Field(repr=False)

    @classmethod
    def from_figures(
        cls,
        figures: Mapping[str, Any],
        *,
        name: str = "profile",
        attention: str | None = None,
        where: str | None = None,
    ) -> Hardware:
        """Return a machine from tables of figures, such as a measurement makes with `figure` and `points`.

        Args:
            figures: as in a profile file; with a `base`, only the figures that differ from it.
            name: of the profile.
            attention: name of the kernel whose attention figures count; None takes the profile's default.
            where: text that errors begin with; None is the name.

        Raises:
            ValueError: a figure is missing, unknown or malformed, the base is unknown, or there are no figures of this
                attention kernel.
        """
        where = where or f"hardware profile {name!r}"
        whole = _with_base(figures, where)
        checked = check_figures(whole, where)
        kernel = checked.attention.default if attention is None else attention
        if kernel not in checked.attention.kernels:
            raise ValueError(f"attention={attention!r}: {where} has figures of {', '.join(checked.attention.kernels)}.")
        return cls.model_construct(**dict(checked), name=name, attention_kernel=kernel, figures=whole)

    def peak_rate(self, dtype: torch.dtype) -> float:
        """Return the peak dense FLOP/s of one device; fp32 is PyTorch's default, without TF32.

        The peak is the data sheet's; `trunkline tune` writes its fastest matrix product instead. fp16 counts as bf16
        where it has no figure of its own.

        Raises:
            ValueError: the profile has no figure for the dtype.
        """
        return self._of(dtype, "peak", self.peak)

    def matmul_rate(self, dtype: torch.dtype, m: int, n: int, k: int) -> float:
        """Return one device's FLOP/s (2mnk) for a product of (m, k) and (k, n).

        Samples are weighted by their nearness in the logarithms of m, n and k. Where fp16 has no samples of its own it
        counts as bf16. Where fp32 has none on a GPU it counts as bf16, in proportion to the peaks.

        Raises:
            ValueError: the profile has no figures for the dtype.
        """
        samples, factor = self._stand_in(dtype, "matmul", self.matmul)
        return factor * samples.rate(m, n, k)

    def attention_rate(
        self, direction: Direction, dtype: torch.dtype, head_dim: int, queries: int, keys: int, *, causal: bool
    ) -> float:
        """Return one device's FLOP/s of the attention kernel, counted as the class says.

        Dtypes without samples are replaced as in `matmul_rate`.

        Samples are weighted by their nearness in the logarithms of queries and keys. For a head dim without samples
        the time of a pair is interpolated linearly between head dims with samples (on GPUs after padding to a multiple
        of 32); below all of them the time stays, above all of them the rate.

        Args:
            direction: forward or backward.
            dtype: of queries, keys and values.
            head_dim: of queries and keys.
            queries: query rows of each head in one call.
            keys: keys of each head in that call.
            causal: the call masks (the lower triangle, or a trapezium aligned to the last key); otherwise all pairs.

        Raises:
            ValueError: the profile has no figures for the dtype.
        """
        tables = getattr(self.attention.kernels[self.attention_kernel], direction)
        dims, factor = self._stand_in(dtype, f"attention.{direction}", tables)
        rates = {dim: samples.rate(queries, keys, causal) for dim, samples in dims.items()}
        return factor * rate_of_head_dim(head_dim, rates, padded=self.device_type == "cuda")

    def memory_rate(self, kind: MemoryKind, nbytes: int) -> float:
        """Return one device's bytes/s, read and written together, of an operation that device memory bounds.

        Args:
            kind: `copy`; `pointwise`, which is arithmetic element by element; `transcendental`, which is the same with
                functions such as exponentials; or `reduction`.
            nbytes: bytes that the operation reads and writes together.
        """
        return self.memory[kind].rate(nbytes)

    def sources(self) -> list[tuple[str, str, str]]:
        """Return every figure's dotted name, source and date, in alphabetical order."""
        return sorted(
            (name, entry["source"], entry["date"]) for name, entry in entries_of(self.figures) if is_figure(entry)
        )

    def _stand_in(self, dtype: torch.dtype, table: str, tables: Mapping[Any, _T]) -> tuple[_T, float]:
        """Return the samples that count for a dtype, and the factor on their rates."""
        if dtype == torch.float32 and "fp32" not in tables and self.device_type == "cuda" and "bf16" in tables:
            return tables["bf16"], self.peak_rate(dtype) / self.peak_rate(torch.bfloat16)
        return self._of(dtype, table, tables), 1.0

    def _of(self, dtype: torch.dtype, table: str, tables: Mapping[Any, _T]) -> _T:
        name = _DTYPES.get(dtype)
        if name == "fp16" and name not in tables:
            name = "bf16"
        if name in tables:
            return tables[name]
        raise NoFigures(
            f"hardware profile {self.name!r} has no figures of {table} for {dtype}, only for {', '.join(tables)}: "
            "choose such a dtype, or a profile that has them."
        )


def speeds_of(hardware: Hardware | None, devices: int) -> QueueSpeeds:
    """Return the speeds of one device for the simulated clock.

    They are its share of the node's links, host memory and disks, how much busy lanes slow compute down, and the
    host's time of an operator.

    Args:
        hardware: the machine; None for one on which nothing takes time.
        devices: devices that work at the same time, over all nodes; those of one node share its uplinks, host memory
            and disks.
    """
    if hardware is None:
        return QueueSpeeds()
    here = min(devices, hardware.devices_per_node)
    disk, link = hardware.disk, hardware.link
    alone = {DISK["fetch"]: disk.read / here, DISK["stash"]: disk.write / here}
    both = {DISK["fetch"]: disk.both_read / here, DISK["stash"]: disk.both_write / here}
    if link is not None:
        uplink, memory = min(here, link.devices_per_uplink), hardware.host_bandwidth / here
        alone |= {
            LINK["fetch"]: min(link.to_device / uplink, memory),
            LINK["stash"]: min(link.to_host / uplink, memory),
        }
        # Host memory serves both directions of all devices at once.
        share = min(1.0, memory / (link.both_to_device + link.both_to_host)) / uplink
        both |= {LINK["fetch"]: link.both_to_device * share, LINK["stash"]: link.both_to_host * share}
    pairs: dict[str, tuple[str, float]] = {}
    interference: Mapping[Any, float] = hardware.interference
    slowdown = {"comm": interference.get("comm", 0.0)}
    for queues in (DISK,) if link is None else (LINK, DISK):
        for lane, other in (("fetch", "stash"), ("stash", "fetch")):
            pairs[queues[lane]] = queues[other], both[queues[lane]]
            slowdown[queues[lane]] = interference.get(lane, 0.0)
    return QueueSpeeds(
        alone=alone,
        pairs=pairs,
        slowdown=slowdown,
        host_seconds=hardware.host_seconds,
        synchronous=hardware.device_type == "cpu",
    )


def this_machine_path() -> Path:
    """Return the file of this machine's own profile: in the user's config folder (XDG), whether it exists or not."""
    config = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not config.is_absolute():  # the specification has relative ones ignored
        config = Path.home() / ".config"
    return config / "trunkline" / f"{THIS_MACHINE}.toml"


def names() -> list[str]:
    """Return the names of the bundled profiles, and `this-machine` where `trunkline tune` has measured it."""
    return [*_bundled(), *([THIS_MACHINE] if this_machine_path().is_file() else [])]


def load(name_or_path: str, *, attention: str | None = None) -> Hardware:
    """Return a profile by name, or from a `.toml` file such as `trunkline tune` writes.

    Args:
        name_or_path: one of `names()`, or a path that ends in `.toml`; `trunkline tune` wrote `this-machine`.
        attention: name of the kernel whose attention figures count, such as `"fa3"`; None takes the profile's default.

    Raises:
        ValueError: there is no such profile or file, the file is malformed (the text names file, key, form), or there
            are no figures of this attention kernel.
    """
    where = f"hardware={name_or_path!r}"
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        return Hardware.from_figures(_read(path, where), name=path.stem, attention=attention, where=name_or_path)
    figures = _named(name_or_path, where)
    file = str(this_machine_path()) if name_or_path == THIS_MACHINE else None
    return Hardware.from_figures(figures, name=name_or_path, attention=attention, where=file)


def parse(text: str, *, name: str = "profile", attention: str | None = None, where: str | None = None) -> Hardware:
    """Return a profile from the text of a TOML file; `to_toml` is the inverse.

    Args:
        text: one profile, its figures at the top level.
        name: of the profile.
        attention: see `load`.
        where: text that errors begin with; None is the name.

    Raises:
        ValueError: see `load`.
    """
    return Hardware.from_figures(_tables(text, where or name), name=name, attention=attention, where=where)


def profile_of(device: torch.device) -> Hardware | None:
    """Return the profile of a device of this machine; None if there is none, since a guess would be worse.

    The profile that `trunkline tune` wrote counts first, if it is for this device type (cuda or cpu). Otherwise a CUDA
    device has a bundled one by its name, and a CPU has none.

    Raises:
        ValueError: the file that `trunkline tune` wrote is malformed.
    """
    if this_machine_path().exists():
        measured = load(THIS_MACHINE)
        if measured.device_type == device.type:
            return measured
    if device.type != "cuda":
        return None
    device_name = torch.cuda.get_device_name(device)
    return next((load(name) for part, name in _DEVICES.items() if part in device_name), None)


def _tables(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(
            f"{where}: not TOML: {error}. Fix the file, or write it again with `trunkline tune`."
        ) from None


def _read(path: Path, where: str) -> dict[str, Any]:
    try:
        return _tables(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ValueError(f"{where}: cannot be read ({error.strerror}).") from None


@cache
def _bundled() -> dict[str, dict[str, Any]]:
    text = resources.files("trunkline.plan.hardware").joinpath("profiles.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _named(name: str, where: str) -> dict[str, Any]:
    """Return the figures of a profile by name, without those of its base."""
    path, known = this_machine_path(), _bundled()
    if name == THIS_MACHINE:
        if not path.is_file():
            raise ValueError(
                f"{where}: this machine has not been measured yet ({path} does not exist): run `trunkline tune` first."
            )
        return _read(path, where)
    if name in known:
        return known[name]
    matcher = difflib.SequenceMatcher(b=name.lower())

    def likeness(other: str) -> tuple[int, float]:
        matcher.set_seq1(other)
        return matcher.find_longest_match().size, matcher.ratio()

    raise ValueError(
        f"{where}: no such profile; there are {', '.join(sorted(known, key=likeness, reverse=True))}, or the path of a "
        f".toml file of your own (docs/plan.md says how to write one), or {THIS_MACHINE}: `trunkline tune` measures it."
    )


def _with_base(figures: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return all figures of a profile: its own, those of its base, and of the base's base."""
    own = dict(figures)
    base = own.pop("base", None)
    if base is None:
        return own
    if not isinstance(base, str):
        raise ValueError(f"{where}: base must be text, not {base!r}.")
    inherited = _with_base(_named(base, f"{where}: base={base!r}"), where)
    return {**merge_figures(inherited, own, base), "title": own.get("title", f"{inherited.get('title')}, changed")}
