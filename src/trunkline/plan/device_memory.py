"""Simulated memory of a tier: bytes held, their peak, and which tensors they are.

Tensors on the `meta` device have storages with sizes and lifetimes. `DeviceMemory` counts a storage from the operator
that allocates it until its last reference is gone. Memory without such a tensor (sharded parameters, optimizer state)
is added by its owner.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor


class MemoryTally:
    """Bytes that a tier holds, by label.

    Attributes:
        held: bytes held now.
        peak: most bytes held since the last `reset_peak`.
        parts: bytes held now, by label (`parameters`, `gradients`, …); unlabelled bytes are in `held` only.
        parts_at_peak: `parts` when the peak was reached.
        on_change: called with `held` after each change; None for no call.
    """

    def __init__(self) -> None:
        self.held = 0
        self.peak = 0
        self.parts: Counter[str] = Counter()
        self.parts_at_peak: Counter[str] = Counter()
        self.on_change: Callable[[int], None] | None = None

    def add(self, label: str, nbytes: int) -> None:
        """Add labelled bytes, or remove them where `nbytes` is negative."""
        self.parts[label] += nbytes
        self._change(nbytes)

    def label(self, label: str, nbytes: int) -> None:
        """Label bytes that are counted already; a negative number removes the label from so many bytes."""
        self.parts[label] += nbytes

    def reset_peak(self) -> None:
        """Set the peak to the bytes held now."""
        self.peak, self.parts_at_peak = self.held, self.parts.copy()

    def _change(self, nbytes: int) -> None:
        self.held += nbytes
        if self.held > self.peak:
            self.peak = self.held
            self.parts_at_peak = self.parts.copy()
        if self.on_change is not None:
            self.on_change(self.held)


class DeviceMemory(MemoryTally):
    """Memory of the device: storages of live `meta` tensors, and bytes added by label.

    Attributes:
        outside_stores: tally of the bytes that are in none of the engine's activation stores.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outside_stores = MemoryTally()
        self._stored = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def label_stored(self, label: str, nbytes: int) -> None:
        """Label counted bytes as held by an activation store; a negative number removes the label from so many."""
        self.label(label, nbytes)
        self._stored += nbytes
        self._update_outside_stores()

    def _change(self, nbytes: int) -> None:
        super()._change(nbytes)
        self._update_outside_stores()

    def _update_outside_stores(self) -> None:
        self.outside_stores._change(self.held - self._stored - self.outside_stores.held)

    def track(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of an operator's outputs until they are freed; a storage counts once."""
        for x in tensors:
            if x.device.type != "meta":
                continue
            storage = x.untyped_storage()
            key = storage._cdata
            if key not in self._storages:
                nbytes = storage.nbytes()
                self._storages[key] = weakref.ref(storage, partial(self._free, key, nbytes))
                self._change(nbytes)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Exclude the storages of tensors that are not tracked yet, such as parameters, which are counted elsewhere."""
        for x in tensors:
            storage = x.untyped_storage()
            self._storages.setdefault(storage._cdata, weakref.ref(storage, partial(self._free, storage._cdata, 0)))

    def _free(self, key: int, nbytes: int, _: Any) -> None:
        self._storages.pop(key, None)
        self._change(-nbytes)
