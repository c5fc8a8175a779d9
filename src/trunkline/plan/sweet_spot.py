"""Sweet spot of chunks: the size from which on attention takes longer than the moves that it hides.

Where keys and values do not fit on the device, attention of a chunk of queries takes one chunk of keys and values after
another, and the next is fetched meanwhile. Attention grows with the square of the chunk, moves with its length: below
some size compute waits, above it the moves cost nothing (FPDT, arXiv 2408.16978). All seconds are those of an estimate
of the same work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from trunkline.attention.meta_kernel import KernelCall
from trunkline.offload.lanes.sim_clock import SimClock
from trunkline.offload.lanes.simulated import DISK, LINK
from trunkline.plan.cost_model import CostModel
from trunkline.plan.hardware import Hardware, NoFigures, speeds_of
from trunkline.plan.hardware.profile_schema import Direction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZES = tuple(1_024 * 2**i for i in range(9))  # tokens of a chunk: 1K to 256K
DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")

_SUM_BYTES = 4  # an element of the sums of dk and dv, which are fp32


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention of a model's layer, as one device has it.

    Attributes:
        name: of the model, for people.
        heads: query heads on the device.
        kv_heads: key/value heads on the device.
        head_dim: of queries, keys and values.
        dtype: of keys and values.
    """

    name: str = "Llama-3-8B"
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16


LLAMA_3_8B = AttentionShape()


@dataclass(frozen=True, slots=True)
class ChunkPair:
    """Seconds of one chunk of queries against one chunk of keys and values, over chunk sizes.

    Attributes:
        direction: forward or backward.
        sizes: tokens of a chunk, rising.
        attention: seconds of compute, at each size.
        moves: seconds of its moves (see `move_seconds`), at each size.
    """

    direction: Direction
    sizes: tuple[int, ...]
    attention: tuple[float, ...]
    moves: tuple[float, ...]

    @property
    def crossing(self) -> float:
        """Sweet spot: tokens of the smallest chunk from which on attention hides the moves.

        It is 0 if all of `sizes` hide them, and infinity if the largest does not. Between two sizes it is interpolated
        in logarithms.
        """
        gaps = [math.log(work / move) for work, move in zip(self.attention, self.moves, strict=True)]
        short = [i for i, gap in enumerate(gaps) if gap < 0]
        if not short:
            return 0.0
        last = short[-1]
        if last == len(gaps) - 1:
            return math.inf
        share = gaps[last] / (gaps[last] - gaps[last + 1])
        low, high = self.sizes[last : last + 2]
        return float(low * (high / low) ** share)


def bytes_of(direction: Direction, shape: AttentionShape, tokens: int) -> tuple[int, int]:
    """Return the bytes that one device moves for a pair of chunks in one layer: (fetched, written back).

    Forward fetches k and v. Backward fetches k, v and the fp32 sums of dk and dv, and writes the sums back.
    """
    elements = 2 * shape.kv_heads * shape.head_dim * tokens
    kv, sums = elements * shape.dtype.itemsize, elements * _SUM_BYTES
    return (kv, 0) if direction == "forward" else (kv + sums, sums)


def attention_seconds(direction: Direction, shape: AttentionShape, hardware: Hardware, tokens: int) -> float:
    """Return the seconds of attention of a chunk of queries against an earlier chunk, without a mask.

    They are those of one layer on one device. A CPU profile without figures of the dtype gives those of fp32.

    Raises:
        ValueError: the profile has no figures of attention in the dtype.
    """
    call = KernelCall(
        direction, "flash", shape.dtype, batch=1, heads=shape.heads, kv_heads=shape.kv_heads, queries=tokens,
        keys=tokens, head_dim=shape.head_dim, value_dim=shape.head_dim, causal=False,
    )  # fmt: skip
    costs = CostModel(hardware)
    try:
        return costs.attention_cost(call).seconds
    except NoFigures:
        if hardware.device_type != "cpu":
            raise
        # Half dtypes are computed in fp32 where the processor lacks instructions for them.
        return costs.attention_cost(replace(call, dtype=torch.float32)).seconds


def move_seconds(
    direction: Direction, shape: AttentionShape, hardware: Hardware, tokens: int, devices: int = 1
) -> float:
    """Return the seconds of the moves that attention of a pair of chunks should hide.

    Forward fetches one chunk of keys and values. Backward also fetches its gradient sums, and meanwhile writes back
    those of another chunk. Moves go over the link to host memory, or to the disk where host memory is the device. Both
    directions run at the same time and share the link.

    Args:
        direction: of attention.
        shape: attention of one layer on one device.
        hardware: the machine.
        tokens: tokens of a chunk.
        devices: devices of a node that do the same at the same time.
    """
    queues = DISK if hardware.link is None else LINK
    clock = SimClock(speeds_of(hardware, devices))
    fetched, written = bytes_of(direction, shape, tokens)
    jobs = [clock.submit(queues["fetch"], fetched)]
    if written:
        jobs.append(clock.submit(queues["stash"], written))
    for job in jobs:
        clock.wait(job)
    return clock.compute


def sweet_spot(
    hardware: Hardware, shape: AttentionShape = LLAMA_3_8B, *, sizes: Sequence[int] = SIZES, devices: int = 1
) -> dict[str, ChunkPair]:
    """Return the seconds of attention and of its moves over chunk sizes; `ChunkPair.crossing` is the sweet spot.

    Args:
        hardware: the machine.
        shape: attention of one layer on one device.
        sizes: tokens of chunks, rising.
        devices: see `move_seconds`.

    Returns:
        A pair under each of `forward` and `backward`.

    Raises:
        ValueError: the profile has no figures of attention in the dtype.
    """
    return {
        direction: ChunkPair(
            direction,
            tuple(sizes),
            tuple(attention_seconds(direction, shape, hardware, tokens) for tokens in sizes),
            tuple(move_seconds(direction, shape, hardware, tokens, devices) for tokens in sizes),
        )
        for direction in DIRECTIONS
    }


def in_words(pair: ChunkPair) -> str:
    """Return text that says from which chunk size on a pair's moves are hidden."""
    crossing = pair.crossing
    if crossing == 0:
        return f"hidden at every size from {_tokens(pair.sizes[0])} tokens"
    if crossing == math.inf:
        return f"not hidden up to {_tokens(pair.sizes[-1])} tokens"
    return f"hidden from {_tokens(crossing)} tokens"


def route(hardware: Hardware) -> str:
    """Return the source of keys and values on a machine: `disk` where host memory is the device, else `host memory`."""
    return "disk" if hardware.link is None else "host memory"


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(
    pairs: dict[str, ChunkPair], hardware: Hardware, path: Path, shape: AttentionShape = LLAMA_3_8B, *, devices: int = 1
) -> None:
    """Draw attention and its moves, forward beside backward, as a PNG.

    Args:
        pairs: from `sweet_spot`.
        hardware: the machine of the pairs.
        path: PNG file to write.
        shape: as given to `sweet_spot`; the title names it.
        devices: as given to `sweet_spot`; the title names it.

    Raises:
        ValueError: matplotlib is not installed.
    """
    if not can_draw():
        raise ValueError("the picture needs matplotlib, which is not installed: pip install 'trunkline[report]'.")
    # Without pyplot there is no global state, and no window system is looked for.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    dtype = str(shape.dtype).removeprefix("torch.")
    at_once = f"; {devices} devices of a node at once" if devices > 1 else ""
    figure.suptitle(
        f"{hardware.title}\n{shape.name}: {shape.heads} query and {shape.kv_heads} key/value heads of "
        f"{shape.head_dim}, {dtype}{at_once}",
        fontsize=11,
    )
    for axes, pair in zip(figure.subplots(1, 2, sharey=True), pairs.values(), strict=True):
        _draw_pair(axes, pair, route(hardware))
    # The program's version would make files differ that show the same.
    figure.savefig(path, metadata={"Software": None})


_MOVES = {
    "forward": "k and v from {route}",
    "backward": "k, v, fp32 dk and dv from {route}; dk and dv back",
}


def _draw_pair(axes: Axes, pair: ChunkPair, source: str) -> None:
    from matplotlib.ticker import EngFormatter

    below_a_second = EngFormatter("s")
    axes.loglog(pair.sizes, pair.attention, color="#0072b2", marker="o", markersize=4, label="attention of two chunks")
    axes.loglog(pair.sizes, pair.moves, color="#d98a00", marker="s", markersize=4, linestyle="--",
                label=_MOVES[pair.direction].format(route=source))  # fmt: skip
    low, high = pair.sizes[0] / 1.1, pair.sizes[-1] * 1.1
    crossing = pair.crossing
    if crossing > 0:
        axes.axvspan(low, min(crossing, high), color="#c64f00", alpha=0.08, linewidth=0)
    if 0 < crossing < math.inf:
        axes.axvline(crossing, color="#1b1f24", linewidth=0.8, linestyle=":")
        seconds = np.exp(np.interp(math.log(crossing), np.log(pair.sizes), np.log(pair.attention)))
        axes.plot(crossing, seconds, marker="o", markersize=9, color="#1b1f24", fillstyle="none")
    axes.set_title(f"{pair.direction}: moves {in_words(pair)}", fontsize=10)
    axes.set_xlim(low, high)
    axes.set_xticks(pair.sizes, [_tokens(size) for size in pair.sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f} s" if value >= 1 else below_a_second(value))
    axes.tick_params(labelleft=True)
    axes.set_xlabel("tokens of a chunk" + (" (shaded: compute waits)" if crossing > 0 else ""))
    axes.set_ylabel("time")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dfe2e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, loc="lower right", facecolor="white", edgecolor="none", framealpha=1)


def _tokens(count: float) -> str:
    """Return tokens for people, K for 1,024: 900, 2.4K, 16K."""
    if count < 1_000:
        return f"{count:.0f}"
    thousands = count / 1_024
    return f"{round(thousands, 1):g}K" if thousands < 10 else f"{thousands:.0f}K"
