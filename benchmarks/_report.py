"""Table, targets and figure of `vs_checkpointing.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from _results import Cell, Ratio, Results, Row
from _variants import BASELINE, LABELS, OFFLOADED, PLAIN
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 2**20
TARGET_LENGTHS = (32_768, 65_536)
OVER_BARE_TARGET = 1.06
TIME_TARGETS = {"fp32": 0.80, "bf16": 0.95}
MEMORY_TARGETS = {"attention": 0.45, "none": 0.35}
_COLUMNS = ("tokens", "dtype", "variant", "runs", "seconds", "time / ckpt", "extra MiB", "memory / ckpt",
            "attention", "matmul", "step / bare", "outside stores MiB")  # fmt: skip


def ratio_text(ratio: Ratio | None) -> str:
    """Format a ratio with its interval."""
    if ratio is None:
        return ""
    interval = "" if ratio.low is None or ratio.high is None else f" [{ratio.low:.3f}, {ratio.high:.3f}]"
    return f"{ratio.mean:.3f}{interval}"


def _cells(row: Row) -> list[str]:
    def number(value: float | None, form: str, unit: float = 1) -> str:
        return "" if value is None else format(value / unit, form)

    return [
        f"{row.length:,}",
        row.dtype,
        LABELS[row.variant],
        str(row.runs),
        number(row.seconds, ".2f"),
        ratio_text(row.time),
        row.failed or number(row.extra_peak, ",.0f", _MIB),
        number(row.memory, ".3f"),
        number(row.attention_share, ".1%"),
        number(row.matmul_share, ".1%"),
        ratio_text(row.over_bare),
        number(row.outside_stores, ",.1f", _MIB),
    ]


def table(rows: Sequence[Row], caption: str = "") -> Table:
    """Return the table of all rows, with ratios to Hugging Face gradient checkpointing."""
    drawn = Table(caption=caption or None, caption_justify="left", header_style="bold")
    for name in _COLUMNS:
        drawn.add_column(name, justify="left" if name in ("dtype", "variant") else "right", no_wrap=True)
    before: tuple[int, str] | None = None
    for row in rows:
        if before not in (None, (row.length, row.dtype)):
            drawn.add_section()
        before = row.length, row.dtype
        drawn.add_row(*_cells(row), style="dim" if row.variant in (PLAIN, BASELINE) else "")
    return drawn


class Display:
    """Display of rows during a run.

    A terminal shows the finished cells, and redraws the current cell below them. Other outputs get one line per
    measurement and per row.

    Args:
        results: results to show.
    """

    def __init__(self, results: Results) -> None:
        self._results = results
        self.console = Console()
        if not self.console.is_terminal:
            self.console.width = max(self.console.width, 190)
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.update(Text(""), refresh=True)
            self._live.stop()
        self.console.print(table(self._results.rows()))
        found = checks(self._results.rows())
        if found:
            self.console.print(_verdict(found))

    def doing(self, cell: Cell, what: str) -> None:
        """Show the current measurement."""
        if self._live is not None:
            self._live.update(table(cell.rows(), f"{cell}: {what}"), refresh=True)

    def measured(self, cell: Cell, what: str) -> None:
        """Show a finished measurement."""
        if self._live is None:
            self.console.print(f"{cell}: {what}", highlight=False, soft_wrap=True)

    def finished(self, cell: Cell) -> None:
        """Print a finished cell."""
        if self._live is not None:
            self.console.print(table(cell.rows()))
            return
        for row in cell.rows():
            shown = (f"{name} {value}" for name, value in zip(_COLUMNS, _cells(row), strict=True) if value)
            self.console.print("  " + ", ".join(shown), highlight=False, soft_wrap=True)


# -- targets -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """Target of Trunkline, with its measured value."""

    what: str
    measured: float
    limit: float
    interval: str = ""


def checks(rows: Sequence[Row]) -> list[Check]:
    """Return the targets that have a measurement."""
    found: list[Check] = []
    for row in rows:
        if row.length not in TARGET_LENGTHS:
            continue
        at = f"{LABELS[row.variant]}, {row.dtype}, {row.length:,} tokens"
        runs = "1 round" if row.runs == 1 else f"{row.runs} rounds"
        if row.variant == "attention" and row.time is not None:
            # The target applies to the ratio of medians. The interval is that of the paired ratios.
            limit = TIME_TARGETS[row.dtype]
            found.append(Check(f"time / ckpt: {at}, {runs}", row.time.of_medians, limit, ratio_text(row.time)))
        if row.variant in MEMORY_TARGETS and row.memory is not None:
            found.append(Check(f"memory / ckpt: {at}", row.memory, MEMORY_TARGETS[row.variant]))
        if row.over_bare is not None:
            found.append(
                Check(f"step / bare: {at}, {runs}", row.over_bare.mean, OVER_BARE_TARGET, ratio_text(row.over_bare))
            )
    return found + _growth(rows)


def _growth(rows: Sequence[Row]) -> list[Check]:
    """Return the growth of memory outside the stores from 16,384 to 65,536 tokens."""
    found: list[Check] = []
    for row in rows:
        first = [x for x in rows if (x.variant, x.dtype, x.length) == (row.variant, row.dtype, 16_384)]
        if row.length == 65_536 and first and row.outside_stores and first[0].outside_stores:
            what = f"memory outside stores, 65,536 / 16,384 tokens: {LABELS[row.variant]}, {row.dtype}"
            found.append(Check(what, row.outside_stores / first[0].outside_stores, 1.05))
    return found


def _verdict(found: Sequence[Check]) -> RenderableType:
    drawn = Table(title="Targets", title_justify="left", header_style="bold")
    for name in ("figure", "measured", "paired [95%]", "at most", ""):
        drawn.add_column(name, no_wrap=True)
    for check in found:
        met = check.measured <= check.limit
        mark = Text("met", "green") if met else Text("missed", "red")
        drawn.add_row(check.what, f"{check.measured:.3f}", check.interval, f"{check.limit:.2f}", mark)
    return drawn


# -- figure ------------------------------------------------------------------------------------------------------------

# Okabe and Ito's colours, which colour-blind readers can distinguish. Markers differ as well.
_STYLE = {
    PLAIN: ("#8c8c8c", "s"),
    "none": ("#E69F00", "o"),
    "attention": ("#0072B2", "D"),
    "kv": ("#CC79A7", "v"),
    "attention+kv": ("#009E73", "^"),
    OFFLOADED: ("#D55E00", "P"),
}


def draw(rows: Sequence[Row], path: Path, subtitle: str) -> None:
    """Draw time and memory, relative to gradient checkpointing, over the length; one column per dtype."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    dtypes = [dtype for dtype in TIME_TARGETS if any(row.dtype == dtype for row in rows)]
    others = [row for row in rows if row.variant != BASELINE]
    measures = [memory for memory in (False, True) if any(row.memory if memory else row.time for row in others)]
    if not dtypes or not measures:
        return
    lengths = sorted({row.length for row in rows})
    size = (1.6 + 5.4 * len(dtypes), 1.6 + 3.3 * len(measures))
    figure, axes = plt.subplots(len(measures), len(dtypes), figsize=size, sharex=True, squeeze=False)
    for column, dtype in enumerate(dtypes):
        own = [row for row in rows if row.dtype == dtype]
        for axis, memory in zip(axes[:, column], measures, strict=True):
            _panel(axis, own, memory=memory)
            _targets(axis, [(MEMORY_TARGETS[v], _STYLE[v][0]) for v in MEMORY_TARGETS] if memory
                     else [(TIME_TARGETS[dtype], "#0072B2")], lengths)  # fmt: skip
        axes[0, column].set_title(dtype, fontsize=12, fontweight="bold")
        axes[-1, column].set_xticks(lengths, [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths])
        axes[-1, column].set_xlabel("tokens in the sequence")
    for axis, memory in zip(axes[:, 0], measures, strict=True):
        axis.set_ylabel(f"{'extra peak memory' if memory else 'time'} (lower is better)")
    found = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    order = [LABELS[variant] for variant in _STYLE if LABELS[variant] in found]
    order += [label for label in found if label not in order]
    line = 0.23 / size[1]
    figure.suptitle("Training step relative to gradient checkpointing", fontsize=14, y=1 - 0.5 * line)
    figure.text(0.5, 1 - 2.4 * line, subtitle, ha="center", fontsize=9, color="#555555")
    columns = 3 if len(dtypes) > 1 else 2
    bottom = line * (0.7 + -(-len(order) // columns))
    figure.legend([found[x] for x in order], order, loc="lower center", ncols=columns, frameon=False, fontsize=9)
    figure.subplots_adjust(left=0.75 / size[0], right=1 - 0.55 / size[0], top=1 - 4 * line, bottom=bottom + 2.7 * line,
                           hspace=0.09, wspace=0.16)  # fmt: skip
    figure.savefig(path, dpi=160)
    plt.close(figure)


def draw_memory(memory: Mapping[str, Mapping[int, float]], path: Path, subtitle: str) -> None:
    """Draw the extra peak memory of a step over its length.

    Args:
        memory: bytes by variant and length.
        path: PNG file to write.
        subtitle: description of model and machine.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7.6, 4.2))
    for variant, (color, marker) in {BASELINE: ("#222222", "s"), **_STYLE}.items():
        points = sorted(memory.get(variant, {}).items())
        if points:
            lengths, nbytes = zip(*points, strict=True)
            axis.plot(lengths, [n / 2**20 for n in nbytes], color=color, marker=marker, linewidth=2)
            axis.annotate(
                f" {LABELS[variant]}", (lengths[-1], nbytes[-1] / 2**20), color=color, fontsize=9, va="center"
            )
    ticks = sorted({length for each in memory.values() for length in each})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(ticks, [f"{n // 1024}K" for n in ticks])
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.minorticks_off()
    axis.set_xlim(ticks[0] / 1.1, ticks[-1] * 3.4)
    axis.set_xlabel("tokens in the sequence")
    axis.set_ylabel("extra peak memory of a step, MiB")
    axis.grid(color="#e4e4e4", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(subtitle, fontsize=9, color="#555555", loc="left")
    figure.savefig(path, dpi=160, bbox_inches="tight")
    plt.close(figure)


def _panel(axis: Axes, rows: Sequence[Row], *, memory: bool) -> None:
    axis.axhline(1, color="#222222", linewidth=1.4, label=LABELS[BASELINE])
    means: list[float] = [1.0]
    for place, (variant, (color, marker)) in enumerate(_STYLE.items()):
        points: list[tuple[int, float, float, float]] = []
        for row in rows:
            if row.variant != variant:
                continue
            if memory and row.memory is not None:
                points.append((row.length, row.memory, 0, 0))
            if not memory and row.time is not None:
                mean, low, high = row.time.mean, row.time.low, row.time.high
                points.append((row.length, mean, mean - low if low else 0, high - mean if high else 0))
        if points:
            x, y, below, above = zip(*points, strict=True)
            means += y
            if not memory:  # shift the points, so that their intervals do not overlap
                x = tuple(length * 2 ** (0.03 * (place - 2)) for length in x)
            axis.errorbar(x, y, yerr=None if memory else (below, above), color=color, marker=marker, markersize=6,
                          linewidth=1.8, elinewidth=1, capsize=3, label=LABELS[variant])  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.minorticks_off()
    low, high = axis.get_ylim()
    if memory:
        axis.set_ylim(0, max(means) * 1.08)
    else:  # an interval from two or three rounds may be much wider than the data
        axis.set_ylim(max(low, min(means) - 0.15, 0), min(high, max(means) + 0.15))
    axis.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _targets(axis: Axes, targets: Sequence[tuple[float, str]], lengths: Sequence[int]) -> None:
    """Draw each target as a dashed line over its lengths."""
    inside = [length for length in TARGET_LENGTHS if length in lengths]
    for value, color in targets if inside else []:
        span = (inside[0] / 1.19, inside[-1] * 1.19)
        axis.plot(span, (value, value), linestyle=(0, (4, 2)), color=color, linewidth=1.2, alpha=0.8)
        axis.text(span[1], value, f" ≤ {value:.2f}", color=color, fontsize=8, va="center")
