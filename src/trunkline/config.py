"""Settings of `trunkline.stream`: each is declared once, here.

`StreamConfig` is the declaration: each field has a name, a type, a default, and a `Setting` (group, unit, help). The
recipe's schema, the command line's help and the table in docs/settings.md are made from it. `StreamSettings` has the
same names and types for editors, which complete keyword arguments from a TypedDict; a test compares the two.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_args, get_type_hints

from trunkline.units import parse_bytes, parse_tokens

if TYPE_CHECKING:
    import torch  # for types only: `trunkline --help` reads the declaration and does not wait for torch

KEEPABLE = ("attention", "kv")

ChunkSize = int | str  # "auto", or tokens, also as "16K"
AttnKernel = Literal["auto", "cpu_flash", "cuda_flash", "math"]
AttnStrategy = Literal["auto", "resident", "head_groups", "streamed"]
Bytes = int | str  # "24GiB" is 1024-based, "24GB" 1000-based
Group = Literal["streaming", "memory", "ranks"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Position of a step: the chunk whose work is issued next.

    Attributes:
        part: `embed`, `forward`, `head` or `backward`.
        layer: decoder layer, counted from 0; -1 in `embed` and `head`, and in `backward` for the embedding.
        num_layers: decoder layers of the model.
        chunk: chunk, counted from 0; in `head` of a loss the tile. In `backward` chunks descend, and the last one is
            also reported while activations are recomputed.
        num_chunks: number of chunks, or of tiles; over ranks those of this rank.
    """

    part: Literal["embed", "forward", "head", "backward"]
    layer: int
    num_layers: int
    chunk: int
    num_chunks: int


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """Declaration of a setting, beside its name, type and default.

    Attributes:
        group: `streaming` (how a step runs), `memory` (where tensors rest) or `ranks` (who shares the work).
        help: one sentence for users, without a full stop.
        unit: `tokens`, `bytes`, `layers`, …; empty where it has none.
        in_recipe: whether a recipe and the command line have it, too; a function or a mesh cannot be written there.
    """

    group: Group
    help: str
    unit: str = ""
    in_recipe: bool = True


@dataclass(frozen=True, slots=True)
class Declared:
    """A declared setting with its name, type and default; see `declared_settings`."""

    name: str
    type: Any
    default: Any
    setting: Setting


class StreamSettings(TypedDict, total=False):
    """Keyword arguments of `trunkline.stream`; `StreamConfig` explains each."""

    chunk_size: ChunkSize
    keep: Collection[str]
    checkpoint_every: int
    attn_kernel: AttnKernel
    attn_strategy: AttnStrategy
    logits_budget: Bytes
    compile: bool
    progress: ProgressCallback | None
    device_budget: Bytes | None
    host_budget: Bytes | None
    offload_dir: str | Path | None
    disk_budget: Bytes | None
    prefetch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Settings of `trunkline.stream`; docs/settings.md has them as a table.

    A `chunk_size` such as "16K" becomes a number of tokens; device, host and disk budgets become bytes.

    Raises:
        ValueError: a setting is out of range, or has no effect beside the others; the text names it and the fix.
    """

    chunk_size: Annotated[
        ChunkSize,
        Setting(
            "streaming",
            "tokens of the whole sequence that go through a layer at a time, such as 16K; auto is 4,096 on a CPU and "
            "16,384 on an accelerator",
            "tokens",
        ),
    ] = "auto"
    keep: Annotated[
        Collection[str],
        Setting(
            "streaming",
            "activations kept between forward and backward: attention (backward does not compute attention again), kv "
            "(nor project keys and values again), both, or none (`[]`), which takes the least memory",
        ),
    ] = ("attention",)
    checkpoint_every: Annotated[
        int,
        Setting(
            "streaming", "keep the input of every N-th layer only, and recompute the inputs between them", "layers"
        ),
    ] = 1
    attn_kernel: Annotated[
        AttnKernel,
        Setting("streaming", "attention kernel: auto takes the fastest that supports the model on the device"),
    ] = "auto"
    attn_strategy: Annotated[
        AttnStrategy,
        Setting(
            "streaming",
            "attention where a layer does not fit in device_budget: keep keys, values and their gradients resident, "
            "go through groups of heads, or stream chunk by chunk; auto takes the first that fits",
        ),
    ] = "auto"
    logits_budget: Annotated[
        Bytes,
        Setting(
            "streaming",
            "most bytes of logits, and of tensors computed from them, at a time; auto is 64 MiB, on an accelerator at "
            "least 1,024 tokens",
            "bytes",
        ),
    ] = "auto"
    compile: Annotated[bool, Setting("streaming", "compile the layers with torch.compile, all but their attention")] = (
        False
    )
    progress: Annotated[
        ProgressCallback | None,
        Setting(
            "streaming", "function called with a Progress before the work of each chunk is issued", in_recipe=False
        ),
    ] = dataclasses.field(default=None, compare=False)
    device_budget: Annotated[
        Bytes | None,
        Setting(
            "memory",
            "most bytes of kept activations on the device, including moves in flight; the rest is offloaded; no limit "
            "by default",
            "bytes",
        ),
    ] = None
    host_budget: Annotated[
        Bytes | None,
        Setting(
            "memory",
            "most bytes offloaded to host memory; none by default; on a CPU it adds to device_budget, which is the "
            "same memory",
            "bytes",
        ),
    ] = None
    offload_dir: Annotated[
        str | Path | None,
        Setting("memory", "folder for a scratch file, for activations that do not fit in host memory; none by default"),
    ] = None
    disk_budget: Annotated[
        Bytes | None,
        Setting("memory", "most bytes in the scratch file; by default all that is free on its disk", "bytes"),
    ] = None
    prefetch: Annotated[
        int,
        Setting(
            "memory",
            "chunks of an offloaded tensor on the device at a time, in use or on the way (up to 8 in decoding, where "
            "they fit); 1 turns double buffering off",
            "chunks",
        ),
    ] = 2

    def __post_init__(self) -> None:
        """Check the settings, each alone and then together."""
        if self.chunk_size != "auto":
            try:
                object.__setattr__(self, "chunk_size", parse_tokens(self.chunk_size))
            except ValueError as error:
                raise ValueError(
                    f"chunk_size={self.chunk_size!r}: give a positive whole number of tokens, or 'auto'."
                ) from error
        if self.logits_budget != "auto" and not self.logits_bytes:
            raise ValueError(f"logits_budget={self.logits_budget!r}: give a positive number of bytes, or 'auto'.")
        object.__setattr__(self, "keep", keepable(self.keep))
        for name, choices in (("attn_kernel", get_args(AttnKernel)), ("attn_strategy", get_args(AttnStrategy))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(choices)}.")
        if self.attn_strategy in ("head_groups", "streamed") and self.device_budget is None:
            raise ValueError(f"attn_strategy={self.attn_strategy!r} has no effect without a device_budget: set one.")
        for name in ("checkpoint_every", "prefetch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: give a positive whole number.")
        for name in ("device_budget", "host_budget", "disk_budget"):
            object.__setattr__(self, name, parse_bytes(name, getattr(self, name)))
        if self.offload_dir is not None and self.device_budget is None and self.host_budget is None:
            raise ValueError(
                "offload_dir has no effect without a device_budget, beyond which chunks are offloaded: set one."
            )
        if self.disk_budget is not None and self.offload_dir is None:
            raise ValueError(
                "disk_budget has no effect without offload_dir: set offload_dir to a folder for the scratch file."
            )
        if self.offload_dir is not None and (not isinstance(self.offload_dir, str | Path) or not str(self.offload_dir)):
            raise ValueError(f"offload_dir={self.offload_dir!r}: give the path of a folder.")
        if self.offload_dir is not None and not Path(self.offload_dir).is_dir():
            raise ValueError(f"offload_dir={str(self.offload_dir)!r} is not a folder: create it, or give another.")
        if not isinstance(self.compile, bool):
            raise ValueError(f"compile={self.compile!r}: give True or False.")
        if self.progress is not None and not callable(self.progress):
            raise ValueError(f"progress={self.progress!r}: give a function that takes a Progress.")

    @property
    def decisive(self) -> tuple[object, ...]:
        """Settings that must be equal on all ranks: all but `progress`; of `offload_dir`, only whether it is set."""
        own = ("keep", "offload_dir", "progress")
        fields = [f.name for f in dataclasses.fields(self) if f.name not in own]
        return (sorted(self.keep), self.offload_dir is None, *(getattr(self, name) for name in fields))

    @property
    def logits_bytes(self) -> int | None:
        """Most bytes of a tile of the loss; None chooses by device."""
        return None if self.logits_budget == "auto" else parse_bytes("logits_budget", self.logits_budget)

    @property
    def budgets(self) -> tuple[int | None, int | None, int | None]:
        """Budgets of device, host and disk in bytes; None where none is set."""
        device, host, disk = (
            parse_bytes(name, getattr(self, name)) for name in ("device_budget", "host_budget", "disk_budget")
        )
        return device, host, disk

    def on(self, device: torch.device) -> StreamConfig:
        """Return these settings as a device would have them, for a simulation whose tensors are on `meta`.

        `chunk_size` is resolved; `attn_kernel` only for a CPU, since on `meta` `auto` stands for CUDA's kernel.
        """
        kernel = "cpu_flash" if self.attn_kernel == "auto" and device.type == "cpu" else self.attn_kernel
        return dataclasses.replace(self, chunk_size=self.chunk_tokens(device), attn_kernel=kernel)

    def chunk_tokens(self, device: torch.device) -> int:
        """Return the tokens of a chunk, on all ranks together, if the model is on `device`."""
        if isinstance(self.chunk_size, str):
            return 4_096 if device.type == "cpu" else 16_384
        return self.chunk_size


def resolve_config(config: StreamConfig | None, settings: StreamSettings | dict[str, Any]) -> StreamConfig:
    """Build a config from a `StreamConfig`, its fields as keywords, or both: keywords replace fields.

    Raises:
        ValueError: `config` is something else, or a name is no setting (the text has the nearest name), or a value is
            out of range.
    """
    if config is not None and not isinstance(config, StreamConfig):
        raise ValueError(f"config={config!r}: give a StreamConfig, or its fields as keyword arguments.")
    known = [field.name for field in dataclasses.fields(StreamConfig)]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"{name} is not a setting of stream(): {hint}Settings are {', '.join(known)}.")
    return StreamConfig(**settings) if config is None else dataclasses.replace(config, **settings)


def declared_settings() -> Iterator[Declared]:
    """Yield the settings of `StreamConfig` in the order of their declaration."""
    hints = get_type_hints(StreamConfig, include_extras=True)
    for field in dataclasses.fields(StreamConfig):
        kind, setting = get_args(hints[field.name])
        yield Declared(field.name, kind, field.default, setting)


def keepable(keep: Iterable[str] | str) -> frozenset[str]:
    """Check a value of `keep`, which may be one name, and return its names as a set.

    Raises:
        ValueError: it names something that cannot be kept.
    """
    if not isinstance(keep, Iterable):
        raise ValueError(f"keep={keep!r}: give names out of {list(KEEPABLE)}, () for none.")
    names = frozenset((keep,) if isinstance(keep, str) else keep)
    unknown = sorted(str(name) for name in names if name not in KEEPABLE)
    if unknown:
        raise ValueError(
            f"keep={sorted(map(str, names))}: {unknown[0]!r} is unknown; choose out of {list(KEEPABLE)}, "
            "or [] for none."
        )
    return names
