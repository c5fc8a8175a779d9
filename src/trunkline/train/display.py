"""What a person sees during a run: a live panel on a terminal, plain lines anywhere else.

The panel answers three questions: does the loss fall, when is it done, and what is it doing now. Drawing happens on a
timer, not in the sweep's callback, which only sets a field.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trunkline.evaluate import EvaluateProgress, length_text
from trunkline.train.estimate import StepProgress, SweepPosition
from trunkline.train.evaluating import EvaluationRecord, evaluation_text
from trunkline.train.step_metrics import StepMetrics
from trunkline.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live


@dataclass(frozen=True)
class RunHeader:
    """What is known before the first step.

    Attributes:
        headline: Lines that say what is trained on what.
        steps: Steps of the run.
        log_every: Steps between permanent lines.
        num_micro_batches: Micro-batches of a step.
        attention_share: Share of the FLOPs that is attention.
        evaluate_every: Steps between evaluations; None for none.
    """

    headline: Sequence[str]
    steps: int
    log_every: int
    num_micro_batches: int
    attention_share: float
    evaluate_every: int | None = None

    def evaluations_after(self, step: int) -> int:
        """Return how many evaluations are still to come once a step, counted from 1, is over and its own, too."""
        if self.evaluate_every is None or step >= self.steps:
            return 0
        due = self.steps // self.evaluate_every + (self.steps % self.evaluate_every > 0)
        return due - step // self.evaluate_every


class Display(Protocol):
    """What the loop tells."""

    def note(self, text: str) -> None:
        """Say something about the preparations."""

    def begin(self, info: RunHeader) -> None:
        """Start; the first step follows."""

    def micro_batch(self, index: int) -> None:
        """Say which micro-batch of the step begins."""

    def progress(self, position: SweepPosition) -> None:
        """Say where the sweep is; called before the work of each chunk."""

    def step(self, metrics: StepMetrics) -> None:
        """Say that a step is over."""

    def evaluating(self, where: EvaluateProgress) -> None:
        """Say where an evaluation is; called before each of its samples, and at its end."""

    def evaluated(self, record: EvaluationRecord) -> None:
        """Say what an evaluation found."""

    def end(self) -> None:
        """Stop drawing; called however the run ends."""


def make_display(console: Console) -> Display:
    """Return the live panel for a terminal, plain lines for everything else."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


class PlainDisplay:
    """One line every `log_every` steps, and the first and last.

    Args:
        console: Where to write.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._info: RunHeader | None = None
        self._seconds: list[float] = []
        self._evaluation_seconds = 0.0

    def note(self, text: str) -> None:
        """Print the line."""
        self._line(text)

    def begin(self, info: RunHeader) -> None:
        """Print the headline."""
        self._info = info
        for line in info.headline:
            self._line(line)

    def micro_batch(self, index: int) -> None:
        """Say nothing: a plain line is for a whole step."""

    def progress(self, position: SweepPosition) -> None:
        """Say nothing: a plain line is for a whole step."""

    def step(self, metrics: StepMetrics) -> None:
        """Print the step's line, if it is due."""
        assert self._info is not None
        self._seconds.append(metrics.total_seconds)
        if is_due(metrics.step, self._info):
            left = (self._info.steps - metrics.step) * typical(self._seconds)
            left += self._info.evaluations_after(metrics.step - 1) * self._evaluation_seconds
            self._line(f"{step_line(metrics, self._info.steps)}  eta {clock_text(left)}")

    def evaluating(self, where: EvaluateProgress) -> None:
        """Say nothing: a plain line is for a whole evaluation."""

    def evaluated(self, record: EvaluationRecord) -> None:
        """Print the evaluation's line."""
        assert self._info is not None
        self._evaluation_seconds = record.seconds
        self._line(evaluation_line(record, self._info.steps))

    def end(self) -> None:
        """Nothing is left open."""

    def _line(self, text: str) -> None:
        # Not wrapped and not marked up: these lines are read by programs too.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """A panel that is redrawn four times a second, below the permanent lines of the steps.

    Args:
        console: A terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._info: RunHeader | None = None
        self._estimate: StepProgress | None = None
        self._position: SweepPosition | None = None
        self._history: list[StepMetrics] = []
        self._step_began = 0.0
        self._evaluating: EvaluateProgress | None = None
        self._evaluation: EvaluationRecord | None = None

    def note(self, text: str) -> None:
        """Print the line."""
        self._console.print(text, markup=False, highlight=False, style="dim")

    def begin(self, info: RunHeader) -> None:
        """Print the headline and start drawing."""
        from rich.live import Live

        self._info = info
        self._estimate = StepProgress(info.num_micro_batches, info.attention_share)
        self._estimate.start_step(None)
        for index, line in enumerate(info.headline):
            self._console.print(line, markup=False, highlight=False, style="bold" if index == 0 else "")
        self._console.print()
        self._step_began = time.perf_counter()
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True)
        self._live.start()

    def micro_batch(self, index: int) -> None:
        """Take note."""
        assert self._estimate is not None
        self._estimate.micro_batch = index

    def progress(self, position: SweepPosition) -> None:
        """Take note; the timer draws."""
        assert self._estimate is not None
        if self._evaluating is None:
            self._estimate.update(position)
        self._position = position

    def step(self, metrics: StepMetrics) -> None:
        """Print the step's permanent line, if it is due, and begin the next step."""
        assert self._info is not None
        assert self._estimate is not None
        self._history.append(metrics)
        if is_due(metrics.step, self._info):
            self._console.print(step_line(metrics, self._info.steps), markup=False, highlight=False)
        self._estimate.start_step(metrics.seconds)
        self._position = None
        self._step_began = time.perf_counter()

    def evaluating(self, where: EvaluateProgress) -> None:
        """Take note; the timer draws."""
        self._evaluating = where

    def evaluated(self, record: EvaluationRecord) -> None:
        """Print the evaluation's permanent line; the next step begins."""
        assert self._info is not None
        self._evaluating, self._evaluation = None, record
        self._console.print(evaluation_line(record, self._info.steps), markup=False, highlight=False)
        self._position = None
        self._step_began = time.perf_counter()

    def end(self) -> None:
        """Take the panel away; the permanent lines stay."""
        if self._live is not None:
            self._live.stop()

    def seconds_left(self) -> float | None:
        """Return the seconds to the end of the run, None while nothing is known."""
        assert self._info is not None
        assert self._estimate is not None
        elapsed = time.perf_counter() - self._step_began
        done = self._estimate.fraction
        if self._history:
            whole = typical([metrics.total_seconds for metrics in self._history])
            current = max(0.0, whole * (1 - done))
        elif done > 0.03:
            whole = elapsed / done
            current = whole - elapsed
        else:
            return None
        evaluation = 0.0 if self._evaluation is None else self._evaluation.seconds
        more = self._info.evaluations_after(len(self._history) - (self._evaluating is not None)) * evaluation
        return current + whole * max(0, self._info.steps - len(self._history) - 1) + more

    def _render(self) -> RenderableType:
        from rich.box import ROUNDED
        from rich.panel import Panel
        from rich.table import Table

        info, estimate = self._info, self._estimate
        assert info is not None
        assert estimate is not None
        # What stands beside a bar takes at most 49 columns, label and frame 13.
        width = max(8, min(40, self._console.width - 62))
        done_steps = len(self._history)
        left = self.seconds_left()
        eta = clock_text(left) if left is not None else "…"
        overall = min(1.0, (done_steps + estimate.fraction) / info.steps)
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True, min_width=6)  # however long the other column's text is
        table.add_column(no_wrap=True)
        table.add_row(
            "step", bar(overall, width, "green", f"{min(done_steps + 1, info.steps)} of {info.steps}   eta {eta}")
        )
        if self._evaluating is None:
            table.add_row("sweep", bar(estimate.fraction, width, "cyan", self._sweep_text()))
        else:
            share = self._evaluating.done / self._evaluating.total
            table.add_row("eval", bar(share, width, "magenta", self._evaluating_text(self._evaluating)))
        if self._history:
            last = self._history[-1]
            losses = [metrics.loss for metrics in self._history]
            line = sparkline(losses, width)
            table.add_row("loss", f"{line:{width}}  {last.loss:.4f}   from {losses[0]:.4f}")
            speed = f"{last.tokens_per_second:,.0f} tokens/s   {flops_text(last.flops_per_second)}"
            table.add_row("speed", f"{speed}   {format_bytes(last.peak_memory_bytes)} peak")
            if last.bytes_moved:
                table.add_row("stores", stores_text(last))
            table.add_row("state", f"lr {last.lr:.2e}   grad norm {last.grad_norm:.3f}")
        if self._evaluation is not None:
            table.add_row("found", f"after step {self._evaluation.step}   {evaluation_text(self._evaluation)}")
        return Panel(table, box=ROUNDED, border_style="dim", expand=False)

    def _evaluating_text(self, where: EvaluateProgress) -> str:
        if not where.what:
            return "writing"
        name = where.what if len(where.what) <= 20 else f"…{where.what[-19:]}"
        return f"{name} {length_text(where.length)}  {where.done + 1} of {where.total}"

    def _sweep_text(self) -> str:
        position, info, estimate = self._position, self._info, self._estimate
        assert info is not None
        assert estimate is not None
        if position is None:
            return "starting"
        batch = f"  batch {estimate.micro_batch + 1}/{info.num_micro_batches}" if info.num_micro_batches > 1 else ""
        unit = "tile" if position.part == "head" else "chunk"
        layer = f" layer {position.layer + 1}/{position.num_layers}" if position.layer >= 0 else ""
        part = f"{position.part} embed" if position.part == "backward" and position.layer < 0 else position.part
        return f"{part}{layer}  {unit} {position.chunk + 1}/{position.num_chunks}{batch}"


def is_due(step: int, info: RunHeader) -> bool:
    """Return whether a step gets a permanent line: the first, the last, and every `log_every`-th."""
    return step == 1 or step == info.steps or step % info.log_every == 0


def typical(seconds: Sequence[float]) -> float:
    """Return the median of the last five steps: the first is slow, and machines are shared."""
    recent = sorted(seconds[-5:])
    return recent[len(recent) // 2]


def step_line(metrics: StepMetrics, steps: int) -> str:
    """Return the permanent line of a step."""
    width = len(str(steps))
    return (
        f"step {metrics.step:>{width}}/{steps}  loss {metrics.loss:.4f}  grad norm {metrics.grad_norm:.3f}  "
        f"lr {metrics.lr:.2e}  {metrics.tokens_per_second:,.0f} tokens/s  {metrics.total_seconds:.1f} s"
        + (f"  {metrics.exposed_share:.1%} exposed" if metrics.bytes_moved else "")
    )


def evaluation_line(record: EvaluationRecord, steps: int) -> str:
    """Return the permanent line of an evaluation."""
    width = len(str(steps))
    return f"eval {record.step:>{width}}/{steps}  {evaluation_text(record)}  {record.seconds:.1f} s"


def stores_text(metrics: StepMetrics) -> str:
    """Return what rests where, how fast it moves, and how much of the step compute waited for it."""
    held = "   ".join(f"{tier} {format_bytes(peak)}" for tier, peak in metrics.tiers.items() if peak)
    speeds = "   ".join(f"{name} {lane['gb_per_second']:.1f} GB/s" for name, lane in metrics.lanes.items())
    return f"{held}   {speeds}   {metrics.exposed_share:.1%} exposed"


def clock_text(seconds: float) -> str:
    """Return a duration as 0:07, 12:30 or 3:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def flops_text(flops: float | None) -> str:
    """Return FLOP/s with a prefix, empty if unknown."""
    if flops is None:
        return ""
    for prefix, unit in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if flops >= unit:
            return f"{flops / unit:.1f} {prefix}FLOP/s"
    return f"{flops / 1e6:.1f} MFLOP/s"


def bar(share: float, width: int, colour: str, label: str) -> RenderableType:
    """Return a bar of `width` cells, `share` of it filled, and a label after it."""
    from rich.text import Text

    filled = round(min(1.0, max(0.0, share)) * width)
    return Text.assemble(("━" * filled, colour), ("━" * (width - filled), "grey23"), "  ", label)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last `width` values as blocks of eight heights, the lowest value lowest."""
    recent = values[-width:]
    low, high = min(recent), max(recent)
    span = (high - low) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round((value - low) / span * 7)] for value in recent)
