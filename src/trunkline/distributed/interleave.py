"""Interleaving of chunks, so that one computes while another waits for an exchange.

Ulysses' exchanges lie in the middle of a layer, inside the model's own code, and nothing of the same chunk can be
computed meanwhile. So the layer's call is a greenlet: it pauses at an exchange, and the next chunk's call runs. All
calls run in one thread, in an order that is the same on all ranks, since collectives must start in the same order.

A greenlet shares the thread's state with all others. Each call therefore has its own context variables, grad mode and
autocast state (CPU and device), saved at every switch. Any other thread-local state is shared between calls.
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


class PausableCall(greenlet):
    """Call in a greenlet of its own. It starts at the first `step`.

    Args:
        call: the function to run.
        device_types: device types whose autocast state is the call's own.
    """

    def __init__(self, call: Callable[[], Any], device_types: Iterable[str]) -> None:
        super().__init__(call)
        self.gr_context = contextvars.copy_context()
        self.thread = threading.get_ident()
        self._device_types = device_types
        self._modes = _torch_modes(device_types)
        self._result: Any = None

    def step(self) -> None:
        """Run to the next pause, or to the end."""
        with self._own_modes():
            self._result = self.switch()

    def finish(self) -> Any:
        """Run to the end and return the result, once: the call keeps no reference to it."""
        while not self.dead:
            self.step()
        result, self._result = self._result, None
        return result

    def close(self) -> None:
        """End a paused call where it stands, so that its `finally` blocks run; do nothing before its start or after."""
        if self:  # a greenlet is true between its start and its end
            with self._own_modes():
                self.throw(GreenletExit)

    @contextlib.contextmanager
    def _own_modes(self) -> Iterator[None]:
        outer = _torch_modes(self._device_types)
        _set_torch_modes(self._modes)
        try:
            yield
        finally:
            self._modes = _torch_modes(self._device_types)
            _set_torch_modes(outer)


class Interleaver:
    """Scheduler of calls that exchange with other ranks.

    Args:
        device_type: device that the calls compute on, `cpu` or `cuda`.
    """

    def __init__(self, device_type: str) -> None:
        self._device_types = tuple({"cpu", device_type})
        self._unfinished: set[PausableCall] = set()
        self._next: PausableCall | None = None

    def pause(self) -> None:
        """Let another call run; do nothing outside calls. Start an exchange before this, and wait for it after."""
        current = getcurrent()
        if isinstance(current, PausableCall):
            assert current.parent is not None
            current.parent.switch()

    def run_next(self) -> None:
        """Run the call that `pipeline` yields next up to its next pause, from the backward of the present result.

        In another thread than the call's this does nothing.
        """
        call = self._next
        # Autograd runs a CUDA backward in its own thread, where a greenlet of this one cannot be resumed.
        if call is not None and not call.dead and call.thread == threading.get_ident():
            call.step()

    def interleave(self, calls: Iterable[Callable[[], None]]) -> None:
        """Run all calls to their ends, two at a time: whenever one pauses the other runs."""
        waiting, running = iter(calls), deque[PausableCall]()
        while True:
            call = next(waiting, None) if len(running) < 2 else None
            if call is not None:
                running.append(self._pausable(call))
            elif running:
                running.rotate(-1)
            else:
                return
            running[-1].step()
            if running[-1].dead:
                self._unfinished.discard(running.pop())

    def pipeline(self, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
        """Yield the results of calls in order; `run_next` advances the next call while one result is in use."""
        waiting = map(self._pausable, calls)
        call = next(waiting, None)
        while call is not None:
            self._next = next(waiting, None)
            self._unfinished.discard(call)
            yield call.finish()
            call = self._next

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """On an error, end the calls of this context that are unfinished.

        A forward inside a call (evaluation from a progress callback) opens its own scope, and its own order of calls.
        """
        outer = self._unfinished, self._next
        self._unfinished, self._next = set(), None
        try:
            yield
        except BaseException as error:
            for call in self._unfinished:
                try:
                    call.close()
                except Exception as further:
                    error.add_note(f"While another chunk's call ended, {type(further).__name__}: {further}")
            raise
        finally:
            self._unfinished, self._next = outer

    def _pausable(self, call: Callable[[], Any]) -> PausableCall:
        pausable = PausableCall(call, self._device_types)
        self._unfinished.add(pausable)
        return pausable


def _torch_modes(device_types: Iterable[str]) -> tuple[Any, ...]:
    """Return the thread's grad mode and autocast state, which a call may have changed when it pauses."""
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in device_types]
    return torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), autocast


def _set_torch_modes(modes: tuple[Any, ...]) -> None:
    grad_enabled, cache_enabled, autocast = modes
    torch.set_grad_enabled(grad_enabled)
    torch.set_autocast_cache_enabled(cache_enabled)
    for kind, enabled, dtype in autocast:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
