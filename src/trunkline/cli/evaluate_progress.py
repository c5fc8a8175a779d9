"""Progress of an evaluation: a bar on a terminal, elsewhere a line for each task and length.

Progress is counted in tokens: a sample of 128K takes thirty times as long as one of 4K, or more.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from trunkline.cli.console import say
from trunkline.config import Progress as Position
from trunkline.evaluate import EvaluateProgress, length_text
from trunkline.train.display import clock_text

_WIDTH = 32  # characters before a bar


class EvaluationDisplay:
    """Context manager that shows progress: called before each sample or document, and swept before each chunk.

    Args:
        console: console to print on.
        total_tokens: tokens of all samples and documents; a sample counts once for each way of scoring.

    Attributes:
        bar: the bar; disabled if the console is no terminal.
        done_tokens: tokens of finished samples and documents.
    """

    def __init__(self, console: Console, total_tokens: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
                   TextColumn("[dim]left"), TimeRemainingColumn())  # fmt: skip
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.done_tokens = 0
        self._task = self.bar.add_task("starting", total=total_tokens)
        self._console, self._total = console, total_tokens
        self._begin, self._chunks = time.perf_counter(), 0
        self._last: EvaluateProgress | None = None

    def __call__(self, progress: EvaluateProgress) -> None:
        """Show the sample or document that comes next; count the tokens of the last one."""
        last, self._last, self._chunks = self._last, progress, 0
        if last is not None:
            self.done_tokens += (progress.done - last.done) * last.length
        name = f"{progress.what} {length_text(progress.length)}"
        text = f"{progress.done + 1} of {progress.total}  {name}" if progress.what else "done"
        text = text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
        # Padded to one width: the bar must not move.
        self.bar.update(self._task, description=f"{text:{_WIDTH}}", completed=self.done_tokens)
        is_new = last is None or (last.what, last.length) != (progress.what, progress.length)
        if self.bar.disable and progress.what and is_new:
            share, seconds = self.done_tokens / self._total, time.perf_counter() - self._begin
            line = f"{clock_text(seconds)}  {share:4.0%}  {progress.done} of {progress.total} done  {name}"
            say(self._console, line)

    def sweep(self, position: Position) -> None:
        """Move the bar by a chunk of a layer; chunks of generated tokens do not move it."""
        if position.part == "forward" and self._last is not None:
            self._chunks += 1
            share = min(1.0, self._chunks / (position.num_layers * position.num_chunks))
            self.bar.update(self._task, completed=self.done_tokens + share * self._last.length)

    def __enter__(self) -> Self:
        self._begin = time.perf_counter()
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.bar.stop()
