"""What a user sets, and what a user is told while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from trunkline.attention import kernels

KEEPABLE = ("attention", "kv")


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
        progress: called with a `Progress` before each chunk's work is issued; None calls nobody.
    """

    chunk_size: int | Literal["auto"] = "auto"
    keep: frozenset[str] = frozenset({"attention"})
    head_bytes: int | Literal["auto"] = "auto"
    kernel: str = "auto"
    progress: Callable[[Progress], None] | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ValueError: a setting is out of range; the text names it and what it takes.
        """
        size = self.chunk_size
        if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"chunk_size={size!r}: give a positive whole number of tokens, or 'auto'.")
        if self.head_bytes != "auto" and (not isinstance(self.head_bytes, int) or self.head_bytes < 1):
            raise ValueError(f"head_bytes={self.head_bytes!r}: give a positive number of bytes, or 'auto'.")
        object.__setattr__(self, "keep", _keep(self.keep))
        if self.kernel not in kernels.NAMES:
            raise ValueError(f"kernel={self.kernel!r}: choose one of {', '.join(kernels.NAMES)}.")

    def chunk_tokens(self, device: torch.device) -> int:
        """Tokens in a chunk on this device."""
        if self.chunk_size == "auto":
            return 4_096 if device.type == "cpu" else 16_384
        return self.chunk_size


def _keep(keep: Iterable[str] | str) -> frozenset[str]:
    names = frozenset((keep,) if isinstance(keep, str) else keep)
    unknown = sorted(str(name) for name in names if name not in KEEPABLE)
    if unknown:
        raise ValueError(f"keep={sorted(map(str, names))}: {unknown[0]!r} is unknown; choose out of {list(KEEPABLE)}.")
    return names
