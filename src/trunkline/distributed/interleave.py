"""Calls that take turns, so that one computes while what another has sent is on its way.

A chunk's layer is one call of the model's own code, and exchanges of Ulysses lie in the middle of it: nothing of that
chunk can be computed until they are through. So the call pauses there (`pause`), and a call for the next chunk goes on.
A call that can pause is a greenlet: all run in one thread, each until it pauses, in an order that is the same on all
ranks.

Every call has its own context variables, its own mode of gradients, and its own autocast, on the CPU and on the device.
Whatever else belongs to a thread, they share.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from trunkline.engine.ranks import T


class _Turn(greenlet):
    """A call that can pause, with the thread's modes as it left them; begun by the first `step`."""

    def __init__(self, call: Callable[[], Any], device_types: Iterable[str]) -> None:
        super().__init__(call)
        self.gr_context = contextvars.copy_context()
        self.thread = threading.get_ident()
        self._device_types = device_types
        self._modes = _modes(device_types)
        self._result: Any = None

    def step(self) -> None:
        """Go on to the next pause, or to the end."""
        with self._entered():
            self._result = self.switch()

    def finish(self) -> Any:
        """Go on to the end; gives what the call returns, once."""
        while not self.dead:
            self.step()
        result, self._result = self._result, None
        return result

    def close(self) -> None:
        """End the call, wherever it is."""
        if self:
            with self._entered():
                self.throw(GreenletExit)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        outer = _modes(self._device_types)
        _set_modes(self._modes)
        try:
            yield
        finally:
            self._modes = _modes(self._device_types)
            _set_modes(outer)


class Interleaver:
    """Who goes on while an exchange is under way.

    Args:
        device_type: on which calls compute.
    """

    def __init__(self, device_type: str) -> None:
        self._device_types = tuple({"cpu", device_type})
        self._under_way: set[_Turn] = set()
        self._coming: _Turn | None = None

    def pause(self) -> None:
        """Let others go on, if there are any: what was started before this will be waited for after it."""
        current = getcurrent()
        if isinstance(current, _Turn):
            assert current.parent is not None
            current.parent.switch()

    def meanwhile(self) -> None:
        """Let the call that `ahead` will give next go on to its next pause."""
        coming = self._coming
        # Autograd may be in a thread of its own.
        if coming is not None and not coming.dead and coming.thread == threading.get_ident():
            coming.step()

    def interleave(self, calls: Iterable[Callable[[], None]]) -> None:
        """Make calls, two of them under way at a time: at every pause the other goes on."""
        waiting, slots = iter(calls), deque[_Turn]()
        while True:
            call = next(waiting, None) if len(slots) < 2 else None
            if call is not None:
                slots.append(self._turn(call))
            elif slots:
                slots.rotate(-1)
            else:
                return
            slots[-1].step()
            if slots[-1].dead:
                self._under_way.discard(slots.pop())

    def pipeline(self, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
        """What calls return, in their order; while one's result is in use, `meanwhile` lets the next begin."""
        waiting = map(self._turn, calls)
        turn = next(waiting, None)
        while turn is not None:
            self._coming = next(waiting, None)
            self._under_way.discard(turn)
            yield turn.finish()
            turn = self._coming

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Calls that are made in here end with it, also where an error has left them under way."""
        outer = self._under_way, self._coming
        self._under_way, self._coming = set(), None
        try:
            yield
        except BaseException as error:
            for turn in self._under_way:
                try:
                    turn.close()
                except Exception as further:
                    error.add_note(f"While another chunk's call ended, {type(further).__name__}: {further}")
            raise
        finally:
            self._under_way, self._coming = outer

    def _turn(self, call: Callable[[], Any]) -> _Turn:
        turn = _Turn(call, self._device_types)
        self._under_way.add(turn)
        return turn


def _modes(device_types: Iterable[str]) -> tuple[Any, ...]:
    """What a thread has of modes that a call may have changed by the time it pauses."""
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in device_types]
    return torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), autocast


def _set_modes(modes: tuple[Any, ...]) -> None:
    gradients, cache, autocast = modes
    torch.set_grad_enabled(gradients)
    torch.set_autocast_cache_enabled(cache)
    for kind, enabled, dtype in autocast:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
