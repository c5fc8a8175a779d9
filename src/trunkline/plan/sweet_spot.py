"""The sweet spot of chunks: from which size on attention takes longer than the moves that it hides.

Where keys and values do not fit on the device, attention of a chunk of queries meets one chunk of keys and values after
another, and while it is busy with one the next is fetched. Attention grows with the square of the chunk, moves with its
length: below some size compute waits, above it the moves cost nothing (FPDT, arXiv 2408.16978). All seconds are those
that a rehearsal would give the same work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trunkline.attention.meta_kernel import Attended
from trunkline.offload.lanes.sim_clock import SimClock
from trunkline.offload.lanes.simulated import DISK, LINK
from trunkline.plan.cost_model import CostModel
from trunkline.plan.hardware import Hardware
from trunkline.plan.rates import Direction
from trunkline.plan.speeds import speeds_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZES = tuple(1_024 * 2**i for i in range(9))  # tokens of a chunk: 1K to 256K
DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")

_SUM_BYTES = 4  # an element of the sums of dk and dv, which are fp32


@dataclass(frozen=True, slots=True)
class Shape:
    """Attention of a model's layer, as one device has it.

    Attributes:
        name: of the model, for people.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: of both.
        dtype: of keys and values.
    """

    name: str = "Llama-3-8B"
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    def elements(self, tokens: int) -> int:
        """Of the keys and the values of so many tokens."""
        return 2 * self.kv_heads * self.head_dim * tokens


@dataclass(frozen=True, slots=True)
class Pair:
    """One chunk of queries against one chunk of keys and values, over sizes of chunks.

    Attributes:
        direction: forward or backward.
        sizes: tokens of a chunk, rising.
        attention: seconds that compute takes, at each size.
        moves: seconds that what it needs takes to come, and what it made to leave; at each size.
    """

    direction: Direction
    sizes: tuple[int, ...]
    attention: tuple[float, ...]
    moves: tuple[float, ...]

    @property
    def crossing(self) -> float:
        """Tokens of the smallest chunk from which on attention hides the moves.

        Between two sizes a straight line of logarithms. It is 0 where even the smallest chunk hides them, infinity
        where the largest does not.
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


def bytes_of(direction: Direction, shape: Shape, tokens: int) -> tuple[int, int]:
    """Bytes that a chunk of keys and values moves for each chunk of queries: those fetched, and those written back.

    Forward fetches k and v. Backward fetches k, v and the fp32 sums of dk and dv, and writes the sums back.
    """
    given, sums = shape.elements(tokens) * shape.dtype.itemsize, shape.elements(tokens) * _SUM_BYTES
    return (given, 0) if direction == "forward" else (given + sums, sums)


def attention_seconds(direction: Direction, shape: Shape, hardware: Hardware, tokens: int) -> float:
    """Seconds of attention of a chunk of queries against another chunk, which it sees all of.

    Raises:
        ValueError: the profile has no figures of attention in the dtype.
    """
    dtype = shape.dtype
    if hardware.device_type == "cpu" and not hardware.has_attention(dtype):
        dtype = torch.float32  # what half dtypes are computed in where the processor lacks instructions for them
    call = Attended(
        direction, "flash", dtype, 1, shape.heads, shape.kv_heads, tokens, tokens, shape.head_dim, shape.head_dim, False
    )
    return CostModel(hardware).attention_cost(call).seconds


def move_seconds(direction: Direction, shape: Shape, hardware: Hardware, tokens: int, devices: int = 1) -> float:
    """Seconds until a chunk of keys and values is there, and the sums of the one before are written.

    Over the link to host memory, or from and to the disk where host memory is the device. Both ways at once share what
    the link can carry.

    Args:
        direction: of attention.
        shape: of the layer.
        hardware: the machine.
        tokens: of a chunk.
        devices: of a node that do the same at the same time.
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
    hardware: Hardware, shape: Shape | None = None, *, sizes: Sequence[int] = SIZES, devices: int = 1
) -> dict[str, Pair]:
    """Attention and its moves over sizes of chunks, forward and backward.

    Args:
        hardware: the machine.
        shape: of a model's layer on one device; None is Llama-3-8B's, whole.
        sizes: tokens of chunks, rising.
        devices: see `move_seconds`.

    Raises:
        ValueError: the profile has no figures of attention in the dtype.
    """
    shape = shape or Shape()
    return {
        direction: Pair(
            direction,
            tuple(sizes),
            tuple(attention_seconds(direction, shape, hardware, tokens) for tokens in sizes),
            tuple(move_seconds(direction, shape, hardware, tokens, devices) for tokens in sizes),
        )
        for direction in DIRECTIONS
    }


def in_words(pair: Pair) -> str:
    """From which size of chunks on a pair's moves are hidden."""
    crossing = pair.crossing
    if crossing == 0:
        return f"hidden at every size from {_tokens(pair.sizes[0])} tokens"
    if crossing == math.inf:
        return f"not hidden up to {_tokens(pair.sizes[-1])} tokens"
    return f"hidden from {_tokens(crossing)} tokens"


def route(hardware: Hardware) -> str:
    """Where keys and values come from on a machine."""
    return "disk" if hardware.link is None else "host memory"


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(
    pairs: dict[str, Pair], hardware: Hardware, path: Path, shape: Shape | None = None, *, devices: int = 1
) -> None:
    """Draw attention and its moves, forward beside backward, as a PNG.

    Args:
        pairs: what `sweet_spot` gave.
        hardware: the machine they are of.
        path: of the picture.
        shape: the one they are of; None is Llama-3-8B's.
        devices: that were meant.

    Raises:
        ValueError: matplotlib is not installed.
    """
    if not can_draw():
        raise ValueError("the picture needs matplotlib, which is not installed: pip install 'trunkline[report]'.")
    # Without pyplot there is no global state, and no window system is looked for.
    from matplotlib.figure import Figure

    shape = shape or Shape()
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


def _draw_pair(axes: Axes, pair: Pair, source: str) -> None:
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
        axes.plot(crossing, _between(pair, crossing), marker="o", markersize=9, color="#1b1f24", fillstyle="none")
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


def _between(pair: Pair, tokens: float) -> float:
    """Seconds of attention at a size between two that are known."""
    right = next(i for i, size in enumerate(pair.sizes) if size >= tokens)
    low, high = pair.sizes[right - 1 : right + 1]
    share = math.log(tokens / low) / math.log(high / low)
    return float(pair.attention[right - 1] ** (1 - share) * pair.attention[right] ** share)


def _tokens(count: float) -> str:
    """Tokens as people say them: 900, 2.4K, 16K."""
    if count < 1_000:
        return f"{count:.0f}"
    thousands = count / 1_024
    return f"{round(thousands, 1):g}K" if thousands < 10 else f"{thousands:.0f}K"
