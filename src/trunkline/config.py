"""What a user sets, and what a user is told while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from trunkline.attention import kernels
from trunkline.tiers.account import parse_bytes

KEEPABLE = ("attention", "kv")
STRATEGIES = ("auto", "resident", "head_groups", "streamed")


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a step is: the chunk whose work is issued next.

    Attributes:
        part: `embed`, `forward`, `head` or `backward`.
        layer: the decoder layer, counted from 0; -1 in `embed` and `head`, and in `backward` for the embedding's turn.
        num_layers: decoder layers of the model.
        chunk: the chunk, counted from 0 (in `head`: the tile).
        num_chunks: how many there are.
    """

    part: Literal["embed", "forward", "head", "backward"]
    layer: int
    num_layers: int
    chunk: int
    num_chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Settings of `trunkline.stream`.

    Attributes:
        chunk_size: tokens of the *global* sequence in a chunk; any positive number. `auto` is 4,096 on a CPU and
            16,384 on an accelerator.
        keep: what stays between forward and backward, out of `attention` (output and log-sum-exp of every layer, so
            that backward never computes attention again) and `kv` (keys and values, so that backward needs no pass to
            compute them again). Empty: least memory.
        head_bytes: most bytes that logits, and what is computed from them, take at once; the head runs in tiles. `auto`
            is 64 MiB, but room for 1,024 tokens at least on an accelerator, where reading the unembedding for each tile
            would otherwise take longer than computing with it.
        kernel: attention kernel, `auto` or one of `cpu_flash`, `cuda_flash`, `math`.
        strategy: how attention goes where not all fits: `resident` (keys, values and their gradients of a layer stay on
            the device), `head_groups` (those of a few heads at a time do), `streamed` (chunk by chunk), or `auto`: the
            first of these that the device_budget has room for.
        inputs_every: only the input of every N-th layer stays; those between are computed again before their backward.
        device_budget: most bytes that these stores may take on the device, with what is on its way; None is no limit.
            Numbers of bytes may have units: "24GiB" (1024-based), "24GB" (1000-based).
        host_budget: most bytes in host memory, for what the device has no room for; None is none. On a CPU both
            budgets speak of the same memory, and add up.
        disk: folder for a scratch file, for what the host has no room for; None is none.
        disk_budget: most bytes in that file; None is what is free on its disk.
        prefetch: tensors of one store on the device at a time, the one in use and those on their way: 1 turns double
            buffering off. Where it is more than 1, decoded tokens have up to 8 if the device_budget has room for them.
        compile: compile the layers with torch.compile, all but their attention, which is a kernel's anyway. Layers
            that are alike are compiled once, and chunks of other lengths once more.
        progress: called with a `Progress` before each chunk's work is issued; it does not call the model. None calls
            nobody.
    """

    chunk_size: int | Literal["auto"] = "auto"
    keep: frozenset[str] = frozenset({"attention"})
    head_bytes: int | str = "auto"
    kernel: str = "auto"
    strategy: Literal["auto", "resident", "head_groups", "streamed"] = "auto"
    inputs_every: int = 1
    device_budget: int | str | None = None
    host_budget: int | str | None = None
    disk: str | Path | None = None
    disk_budget: int | str | None = None
    prefetch: int = 2
    compile: bool = False
    progress: Callable[[Progress], None] | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ValueError: a setting is out of range; the text names it and what it takes.
        """
        size = self.chunk_size
        if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"chunk_size={size!r}: give a positive whole number of tokens, or 'auto'.")
        if self.head_bytes != "auto" and not self.head_limit:
            raise ValueError(f"head_bytes={self.head_bytes!r}: give a positive number of bytes, or 'auto'.")
        object.__setattr__(self, "keep", keepable(self.keep))
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy={self.strategy!r}: choose one of {', '.join(STRATEGIES)}.")
        if self.strategy in ("head_groups", "streamed") and self.device_budget is None:
            raise ValueError(f"strategy={self.strategy!r} has no effect without a device_budget: set one.")
        for name in ("inputs_every", "prefetch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: give a positive whole number.")
        for name in ("device_budget", "host_budget", "disk_budget"):
            object.__setattr__(self, name, parse_bytes(name, getattr(self, name)))
        if self.disk is not None and self.device_budget is None and self.host_budget is None:
            raise ValueError(
                "disk has no effect without a device_budget, beyond which chunks leave the device: set one."
            )
        if self.disk_budget is not None and self.disk is None:
            raise ValueError("disk_budget has no effect without disk: set disk to a folder for the scratch file.")
        if self.disk is not None and (not isinstance(self.disk, str | Path) or not str(self.disk)):
            raise ValueError(f"disk={self.disk!r}: give the path of a folder.")
        if self.disk is not None and not Path(self.disk).is_dir():
            raise ValueError(f"disk={str(self.disk)!r} is not a folder: make it, or give another.")
        if self.kernel not in kernels.NAMES:
            raise ValueError(f"kernel={self.kernel!r}: choose one of {', '.join(kernels.NAMES)}.")
        if not isinstance(self.compile, bool):
            raise ValueError(f"compile={self.compile!r}: give True or False.")
        if self.progress is not None and not callable(self.progress):
            raise ValueError(f"progress={self.progress!r}: give a function that takes a Progress.")

    @property
    def decisive(self) -> tuple[object, ...]:
        """All settings that ranks which work together must have alike."""
        own = ("keep", "disk", "progress")
        fields = [f.name for f in dataclasses.fields(self) if f.name not in own]
        return (sorted(self.keep), self.disk is None, *(getattr(self, name) for name in fields))

    @property
    def head_limit(self) -> int | None:
        """Most bytes that a tile of the head takes; None for what is best on the device."""
        return None if self.head_bytes == "auto" else parse_bytes("head_bytes", self.head_bytes)

    @property
    def budgets(self) -> tuple[int | None, int | None, int | None]:
        """Bytes of device, host and disk."""
        device, host, disk = (
            parse_bytes(name, getattr(self, name)) for name in ("device_budget", "host_budget", "disk_budget")
        )
        return device, host, disk

    def on(self, device: torch.device) -> StreamConfig:
        """These settings as they turn out on a device, for tensors that are elsewhere."""
        kernel = "cpu_flash" if self.kernel == "auto" and device.type == "cpu" else self.kernel
        return dataclasses.replace(self, chunk_size=self.chunk_tokens(device), kernel=kernel)

    def chunk_tokens(self, device: torch.device) -> int:
        """Tokens in a chunk on this device."""
        if self.chunk_size == "auto":
            return 4_096 if device.type == "cpu" else 16_384
        return self.chunk_size


def keepable(keep: Iterable[str] | str) -> frozenset[str]:
    """The set that `keep` names.

    Raises:
        ValueError: it names something else.
    """
    if not isinstance(keep, Iterable):
        raise ValueError(f"keep={keep!r}: give names out of {list(KEEPABLE)}, () for none.")
    names = frozenset((keep,) if isinstance(keep, str) else keep)
    unknown = sorted(str(name) for name in names if name not in KEEPABLE)
    if unknown:
        raise ValueError(f"keep={sorted(map(str, names))}: {unknown[0]!r} is unknown; choose out of {list(KEEPABLE)}.")
    return names
