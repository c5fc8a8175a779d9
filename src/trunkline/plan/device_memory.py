"""What a device's memory holds while a step is rehearsed: every tensor for as long as it lives.

Tensors on the `meta` device have storages with sizes and lifetimes like any; each is counted when an operator makes it
and until nothing refers to it. What is not such a tensor (parameters in parts, an optimizer's state) is put here by
hand.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


class MemoryTally:
    """Bytes that a tier holds, and what they are.

    Attributes:
        held: now.
        peak: most since it was last set back.
        parts: what is held, by what it is, as far as anybody has said.
        at_peak: the same, when the peak was reached.
        changed: called with what is held after each change; None for nobody.
    """

    def __init__(self) -> None:
        self.held = 0
        self.peak = 0
        self.parts: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()
        self.changed: Callable[[int], None] | None = None

    def put(self, part: str, nbytes: int) -> None:
        """Count bytes in, or out where negative."""
        self.parts[part] += nbytes
        self._add(nbytes)

    def note(self, part: str, nbytes: int) -> None:
        """Say what some of the bytes are that are counted anyway; negative when they no longer are."""
        self.parts[part] += nbytes

    def begin(self) -> None:
        """Set the peak back to what is held."""
        self.peak, self.at_peak = self.held, self.parts.copy()

    def _add(self, nbytes: int) -> None:
        self.held += nbytes
        if self.held > self.peak:
            self.peak = self.held
            self.at_peak = self.parts.copy()
        if self.changed is not None:
            self.changed(self.held)


class DeviceMemory(MemoryTally):
    """Bytes that live tensors take, and what is put here by hand.

    Attributes:
        beyond: those that are in no store of the engine.
    """

    def __init__(self) -> None:
        super().__init__()
        self.beyond = MemoryTally()
        self._stored = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def store(self, part: str, nbytes: int) -> None:
        """Say that some of the bytes are in a store of the engine; negative when they no longer are."""
        self.note(part, nbytes)
        self._stored += nbytes
        self._compare()

    def _add(self, nbytes: int) -> None:
        super()._add(nbytes)
        self._compare()

    def _compare(self) -> None:
        self.beyond._add(self.held - self._stored - self.beyond.held)

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors that an operator has made, from now until they are gone."""
        for x in tensors:
            if x.device.type != "meta":
                continue
            storage = x.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            nbytes = storage.nbytes()
            self._known[key] = weakref.ref(storage, _Farewell(self, key, nbytes))
            self._add(nbytes)

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Never count the storages of these."""
        for x in tensors:
            storage = x.untyped_storage()
            self._known.setdefault(storage._cdata, weakref.ref(storage, _Farewell(self, storage._cdata, 0)))

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.pop(key, None)
        self._add(-nbytes)


class _Farewell:
    """Called when a storage is gone."""

    __slots__ = ("key", "memory", "nbytes")

    def __init__(self, memory: DeviceMemory, key: int, nbytes: int) -> None:
        self.memory, self.key, self.nbytes = memory, key, nbytes

    def __call__(self, _: Any) -> None:
        self.memory._forget(self.key, self.nbytes)
