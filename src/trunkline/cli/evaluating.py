"""How far an evaluation is: a bar on a terminal, a line for each task and length in a log.

Counted in tokens: a sample of 128K takes thirty times as long as one of 4K, or more.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from trunkline.config import Progress as Where
from trunkline.evaluate import EvaluateProgress
from trunkline.evaluate.table import length_text
from trunkline.train.display import clock_text

_WIDTH = 32  # characters in front of a bar


class Watch(Protocol):
    """Told how far an evaluation is; drawn for as long as it is entered.

    Attributes:
        done_tokens: tokens of samples and documents that are through.
    """

    done_tokens: int

    def __call__(self, where: EvaluateProgress) -> None:
        """Take note of the sample or document that comes next."""

    def sweep(self, where: Where) -> None:
        """Take note of the chunk that comes next."""

    def __enter__(self) -> Self:
        """Begin to draw."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End."""


def make_watch(console: Console, total_tokens: int) -> Watch:
    """Return a bar for a terminal, lines for everything else.

    Args:
        console: where to draw.
        total_tokens: of all samples and documents, a sample once for each way.
    """
    return _Bar(console, total_tokens) if console.is_terminal else _Lines(console, total_tokens)


class _Counted:
    """Tokens that are through."""

    def __init__(self, console: Console, total_tokens: int) -> None:
        self._console, self._total = console, total_tokens
        self.done_tokens = 0
        self._last: EvaluateProgress | None = None

    def _count(self, where: EvaluateProgress) -> None:
        if self._last is not None:
            self.done_tokens += (where.done - self._last.done) * self._last.length
        self._last = where


class _Lines(_Counted):
    """A line for each task and length, with the time since the beginning."""

    def __call__(self, where: EvaluateProgress) -> None:
        before = self._last
        self._count(where)
        if where.what and (before is None or (before.what, before.length) != (where.what, where.length)):
            share = self.done_tokens / self._total
            seconds = clock_text(time.perf_counter() - self._begin)
            line = f"{seconds}  {share:4.0%}  {where.done} of {where.total} done  {_named(where)}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def sweep(self, where: Where) -> None:
        """Say nothing."""

    def __enter__(self) -> Self:
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left open."""


class _Bar(_Counted):
    """A bar that also moves within a sample, chunk by chunk."""

    def __init__(self, console: Console, total_tokens: int) -> None:
        super().__init__(console, total_tokens)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
                   TextColumn("[dim]left"), TimeRemainingColumn())  # fmt: skip
        self._bar = Progress(*columns, console=console, transient=True)
        self._line = self._bar.add_task("starting", total=total_tokens)
        self._chunks = 0

    def __call__(self, where: EvaluateProgress) -> None:
        self._count(where)
        self._chunks = 0
        text = f"{where.done + 1} of {where.total}  {_named(where)}" if where.what else "done"
        text = text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
        # Of one width, or the bar would move.
        self._bar.update(self._line, description=f"{text:{_WIDTH}}", completed=self.done_tokens)

    def sweep(self, where: Where) -> None:
        """Move on by a chunk of a layer; what comes after the sequence has been read moves nothing."""
        if where.part != "forward" or self._last is None:
            return
        self._chunks += 1
        share = min(1.0, self._chunks / (where.num_layers * where.num_chunks))
        self._bar.update(self._line, completed=self.done_tokens + share * self._last.length)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _named(where: EvaluateProgress) -> str:
    return f"{where.what} {length_text(where.length)}"
