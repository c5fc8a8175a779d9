"""Calls that take turns, so that one computes while what another has sent is on its way.

A chunk's layer is one call of the model's own code, and exchanges of Ulysses lie in the middle of it: nothing of that
chunk can be computed until they are through. So the call pauses there (`pause`), and a call for the next chunk goes on.
A call that can pause is a greenlet: all run in one thread, each until it pauses, in an order that is the same on all
ranks.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet

T = TypeVar("T")
_DEVICE_TYPES = ("cpu", "cuda")


class _Turn(greenlet):
    """A call that can pause, with the thread's modes as it left them; begun by the first `step`."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(call)
        self.gr_context = contextvars.copy_context()
        self._modes = _modes()
        self._thread = threading.get_ident()
        self._result: Any = None

    def step(self) -> None:
        """Go on to the next pause, or to the end."""
        if self.dead or threading.get_ident() != self._thread:  # autograd may be in a thread of its own
            return
        outer = _modes()
        _set_modes(self._modes)
        try:
            self._result = self.switch()  # at a pause None
        finally:
            self._modes = _modes()
            _set_modes(outer)

    def finish(self) -> Any:
        """Go on to the end; gives what the call returns, once."""
        while not self.dead:
            self.step()
        result, self._result = self._result, None
        return result

    def close(self) -> None:
        """End a call that nobody will finish."""
        if self:
            outer = _modes()
            self.throw(GreenletExit)
            _set_modes(outer)


class Turns:
    """Who goes on while an exchange is under way."""

    def __init__(self) -> None:
        self._under_way: deque[_Turn] = deque()
        self._coming: _Turn | None = None

    def pause(self) -> None:
        """Let others go on, if there are any: what was started before this will be waited for after it."""
        current = getcurrent()
        if isinstance(current, _Turn):
            assert current.parent is not None
            current.parent.switch()

    def meanwhile(self) -> None:
        """Let the call that `ahead` will give next go on to its next pause."""
        if self._coming is not None:
            self._coming.step()

    def side_by_side(self, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
        """What calls return, in their order, two of them under way at a time: at every pause the other goes on."""
        waiting, under_way = map(_Turn, calls), self._under_way
        while True:
            turn = next(waiting, None) if len(under_way) < 2 else None
            if turn is None and not under_way:
                return
            under_way.append(under_way.popleft() if turn is None else turn)
            del turn
            under_way[-1].step()
            if under_way[-1].dead:
                yield under_way.pop().finish()

    def ahead(self, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
        """What calls return, in their order; while one's result is in use, `meanwhile` lets the next begin."""
        waiting = map(_Turn, calls)
        turn = next(waiting, None)
        while turn is not None:
            self._coming = next(waiting, None)
            yield turn.finish()
            turn = self._coming

    def close(self) -> None:
        """End all that an error has left under way."""
        for turn in (*self._under_way, self._coming):
            if turn is not None:
                turn.close()
        self._under_way.clear()
        self._coming = None


def _modes() -> tuple[Any, ...]:
    """What a thread has of modes that a call may have changed by the time it pauses."""
    autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICE_TYPES)
    return torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), autocast


def _set_modes(modes: tuple[Any, ...]) -> None:
    gradients, cache, autocast = modes
    torch.set_grad_enabled(gradients)
    torch.set_autocast_cache_enabled(cache)
    for kind, (enabled, dtype) in zip(_DEVICE_TYPES, autocast, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
