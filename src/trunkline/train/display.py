"""Display of a run: a live panel on a terminal, plain lines anywhere else.

The panel shows whether the loss falls, when the run ends, and what it computes now. A timer draws it: the engine's
callback only sets a field, so that drawing never delays a sweep.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.box import ROUNDED
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from typing_extensions import override

from trunkline.config import Progress
from trunkline.evaluate import EvaluateProgress, length_text
from trunkline.train.evaluating import EvaluationRecord, evaluation_text
from trunkline.train.step_metrics import StepMetrics
from trunkline.units import format_bytes

_SWEEPS = ("embed", "forward", "head", "backward")


class StepProgress:
    """Share of a step that is done, in 0 … 1, from the position of its sweeps. It never falls within a step.

    The shares of the parts are those of the step before; for the first step, those of its work (a backward sweep costs
    about 2.5 forward ones). Within a sweep, chunk i of n costs in proportion to 2i+1 where attention dominates, because
    it is causal; a backward sweep begins with the last chunk.

    Args:
        num_micro_batches: forward and backward passes of a step.
        attention_share: share of the step's FLOPs that is attention, and so quadratic in the sequence.
    """

    def __init__(self, num_micro_batches: int, attention_share: float) -> None:
        self._num_micro_batches = num_micro_batches
        self._attention_share = attention_share
        self._shares = {"embed": 0.01, "forward": 0.27, "head": 0.04, "backward": 0.68}
        self.micro_batch = 0
        self.fraction = 0.0

    def start_step(self, last_seconds: Mapping[str, float] | None) -> None:
        """Begin a step; `last_seconds` are the seconds of each part of the step before, None for the first."""
        self.fraction = 0.0
        if last_seconds is not None:
            total = sum(last_seconds[part] for part in _SWEEPS)
            self._shares = {part: last_seconds[part] / total for part in _SWEEPS}

    def update(self, position: Progress) -> None:
        """Set the position of the sweep."""
        done = sum(self._shares[part] for part in _SWEEPS[: _SWEEPS.index(position.part)])
        done += self._shares[position.part] * self._share_of_part(position)
        self.fraction = max(self.fraction, min(1.0, (self.micro_batch + done) / self._num_micro_batches))

    def _share_of_part(self, position: Progress) -> float:
        if position.part == "forward":
            return (position.layer + self._cost(position.chunk / position.num_chunks)) / position.num_layers
        if position.part != "backward":
            return position.chunk / position.num_chunks
        if position.layer < 0:  # the embedding, after all layers
            return 1.0
        layers_done = position.num_layers - 1 - position.layer
        return (layers_done + 1 - self._cost((position.chunk + 1) / position.num_chunks)) / position.num_layers

    def _cost(self, share: float) -> float:
        """Return the cost of the first `share` of a sequence, as a share of the cost of all of it."""
        return self._attention_share * share**2 + (1 - self._attention_share) * share


@dataclass(frozen=True)
class RunHeader:
    """Facts known before the first step.

    Attributes:
        headline: lines that describe model and data.
        steps: steps of the run.
        log_every: steps between permanent lines.
        num_micro_batches: micro-batches of a step.
        attention_share: share of the FLOPs that is attention.
        evaluate_every: steps between evaluations; None for none.
    """

    headline: Sequence[str]
    steps: int
    log_every: int
    num_micro_batches: int
    attention_share: float
    evaluate_every: int | None = None

    def evaluations_after(self, step: int) -> int:
        """Return how many evaluations are left after step `step` (counted from 1), its own not counted."""
        if self.evaluate_every is None or step >= self.steps:
            return 0
        due = self.steps // self.evaluate_every + (self.steps % self.evaluate_every > 0)
        return due - step // self.evaluate_every

    def is_logged(self, step: int) -> bool:
        """Return whether a step (counted from 1) has a permanent line: the first, the last, each `log_every`-th."""
        return step == 1 or step == self.steps or step % self.log_every == 0


class Display:
    """Receiver of a run's events; this one prints plain lines, of every `log_every`-th step, the first and the last.

    Args:
        console: output; None shows nothing.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = Console(quiet=True) if console is None else console
        self._header = RunHeader([], 0, 1, 1, 0.5)
        self._history: list[StepMetrics] = []
        self._evaluation: EvaluationRecord | None = None

    def note(self, text: str) -> None:
        """Show a note of one line."""
        self._print(text, "dim")

    def begin(self, header: RunHeader) -> None:
        """Show the header; the first step follows."""
        self._header = header
        for index, line in enumerate(header.headline):
            self._print(line, "bold" if index == 0 else "")

    def micro_batch(self, index: int) -> None:
        """Note which micro-batch of the step begins."""

    def progress(self, position: Progress) -> None:
        """Note the position of the sweep; called before the work of each chunk."""

    def step(self, metrics: StepMetrics) -> None:
        """Keep the metrics of a finished step, and show it if it is logged."""
        self._history.append(metrics)
        if self._header.is_logged(metrics.step):
            left = self._seconds_after(metrics.step, self._header.evaluations_after(metrics.step - 1))
            self._print(f"{step_line(metrics, self._header.steps)}  eta {clock_text(left)}")

    def evaluating(self, where: EvaluateProgress) -> None:
        """Note the progress of an evaluation; called before each of its samples, and at its end."""

    def evaluated(self, record: EvaluationRecord) -> None:
        """Show a finished evaluation."""
        self._evaluation = record
        self._print(f"eval {record.step:>{len(str(self._header.steps))}}/{self._header.steps}  "
                    f"{evaluation_text(record)}  {record.seconds:.1f} s")  # fmt: skip

    def end(self) -> None:
        """Stop drawing; called however the run ends."""

    def _seconds_after(self, step: float, evaluations: int) -> float:
        """Estimate the seconds left after `step` (may be fractional), with `evaluations` still to run."""
        typical = typical_seconds([metrics.total_seconds for metrics in self._history])
        evaluation = 0.0 if self._evaluation is None else self._evaluation.seconds
        return max(0.0, self._header.steps - step) * typical + evaluations * evaluation

    def _print(self, text: str, style: str = "") -> None:
        # No wrapping except on a terminal, and no markup: programs read these lines, too.
        wraps = self._console.is_terminal
        self._console.print(text, markup=False, highlight=False, soft_wrap=not wraps, style=style)


def make_display(console: Console) -> Display:
    """Return a live panel for a terminal, plain lines for anything else."""
    return LiveDisplay(console) if console.is_terminal else Display(console)


class LiveDisplay(Display):
    """Panel that is redrawn four times a second, below the permanent lines of the steps.

    Args:
        console: a terminal.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live: Live | None = None
        self._step_progress = StepProgress(1, 0.5)
        self._position: Progress | None = None
        self._step_began = 0.0
        self._evaluating: EvaluateProgress | None = None

    @override
    def begin(self, header: RunHeader) -> None:
        super().begin(header)
        self._step_progress = StepProgress(header.num_micro_batches, header.attention_share)
        self._print("")
        self._step_began = time.perf_counter()
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True)
        self._live.start()

    @override
    def micro_batch(self, index: int) -> None:
        self._step_progress.micro_batch = index

    @override
    def progress(self, position: Progress) -> None:
        if self._evaluating is None:
            self._step_progress.update(position)
        self._position = position

    @override
    def step(self, metrics: StepMetrics) -> None:
        self._history.append(metrics)
        if self._header.is_logged(metrics.step):
            self._print(step_line(metrics, self._header.steps))
        self._step_progress.start_step(metrics.seconds)
        self._begin_step()

    @override
    def evaluating(self, where: EvaluateProgress) -> None:
        self._evaluating = where

    @override
    def evaluated(self, record: EvaluationRecord) -> None:
        super().evaluated(record)
        self._evaluating = None
        self._begin_step()

    @override
    def end(self) -> None:
        if self._live is not None:
            self._live.stop()

    def seconds_left(self) -> float | None:
        """Estimate the seconds to the end of the run; None before 3% of the first step are done."""
        steps, done = len(self._history), self._step_progress.fraction
        if steps:
            evaluations = self._header.evaluations_after(steps - (self._evaluating is not None))
            return self._seconds_after(steps + done, evaluations)
        elapsed = time.perf_counter() - self._step_began
        return elapsed / done * (self._header.steps - done) if done > 0.03 else None

    def _begin_step(self) -> None:
        self._position, self._step_began = None, time.perf_counter()

    def _render(self) -> RenderableType:
        steps, header, fraction = len(self._history), self._header, self._step_progress.fraction
        # Text beside a bar takes at most 49 columns, label and frame 13.
        width = max(8, min(40, self._console.width - 62))
        left = self.seconds_left()
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True, min_width=6)  # however long the other column's text is
        table.add_column(no_wrap=True)

        def add_bar(label: str, share: float, colour: str, text: str) -> None:
            bar = ProgressBar(1.0, share, width, style="grey23", complete_style=colour, finished_style=colour)
            row = Table.grid(padding=(0, 2))
            row.add_column(width=width)
            row.add_column(no_wrap=True)
            row.add_row(bar, text)
            table.add_row(label, row)

        eta = "…" if left is None else clock_text(left)
        text = f"{min(steps + 1, header.steps)} of {header.steps}   eta {eta}"
        add_bar("step", min(1.0, (steps + fraction) / header.steps), "green", text)
        if self._evaluating is None:
            add_bar("sweep", fraction, "cyan", self._sweep_text())
        else:
            where = self._evaluating
            add_bar("eval", where.done / where.total, "magenta", evaluating_text(where))
        if self._history:
            last, losses = self._history[-1], [metrics.loss for metrics in self._history]
            table.add_row("loss", f"{sparkline(losses, width):{width}}  {last.loss:.4f}   from {losses[0]:.4f}")
            speed = f"{last.tokens_per_second:,.0f} tokens/s   {flops_text(last.flops_per_second)}"
            table.add_row("speed", f"{speed}   {format_bytes(last.peak_memory_bytes)} peak")
            if last.bytes_moved:
                table.add_row("stores", stores_text(last))
            table.add_row("state", f"lr {last.lr:.2e}   grad norm {last.grad_norm:.3f}")
        if self._evaluation is not None:
            table.add_row("found", f"after step {self._evaluation.step}   {evaluation_text(self._evaluation)}")
        return Panel(table, box=ROUNDED, border_style="dim", expand=False)

    def _sweep_text(self) -> str:
        position, num_batches = self._position, self._header.num_micro_batches
        if position is None:
            return "starting"
        batch = f"  batch {self._step_progress.micro_batch + 1}/{num_batches}" if num_batches > 1 else ""
        unit = "tile" if position.part == "head" else "chunk"
        layer = f" layer {position.layer + 1}/{position.num_layers}" if position.layer >= 0 else ""
        part = f"{position.part} embed" if position.part == "backward" and position.layer < 0 else position.part
        return f"{part}{layer}  {unit} {position.chunk + 1}/{position.num_chunks}{batch}"


def typical_seconds(seconds: Sequence[float]) -> float:
    """Return the median (the higher of two) of the last five steps: the first is slow, and machines are shared."""
    return statistics.median_high(seconds[-5:])


def step_line(metrics: StepMetrics, steps: int) -> str:
    """Return the permanent line of a step."""
    width = len(str(steps))
    return (
        f"step {metrics.step:>{width}}/{steps}  loss {metrics.loss:.4f}  grad norm {metrics.grad_norm:.3f}  "
        f"lr {metrics.lr:.2e}  {metrics.tokens_per_second:,.0f} tokens/s  {metrics.total_seconds:.1f} s"
        + (f"  {metrics.exposed_share:.1%} exposed" if metrics.bytes_moved else "")
    )


def evaluating_text(where: EvaluateProgress) -> str:
    """Return the task or document that an evaluation reads now, with its length and number; `writing` at the end."""
    if not where.what:
        return "writing"
    name = where.what if len(where.what) <= 20 else f"…{where.what[-19:]}"
    return f"{name} {length_text(where.length)}  {where.done + 1} of {where.total}"


def stores_text(metrics: StepMetrics) -> str:
    """Return peak bytes of each tier, speed of each lane, and the share of the step that compute waited for lanes."""
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


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last `width` values as blocks of eight heights, the lowest value lowest."""
    recent = values[-width:]
    low, high = min(recent), max(recent)
    span = (high - low) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round((value - low) / span * 7)] for value in recent)
