"""Operators counted as they run."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

COPYING = ("copy_", "clone", "cat", "_to_copy", "contiguous")
ALLOCATING = (
    "empty", "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros", "empty_strided", "new_empty_strided",
    "full_like", "full",
)  # fmt: skip


class Operators(TorchDispatchMode):
    """Counts operators as they run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def copies(self) -> int:
        """Operators that copy."""
        return sum(self.counts[name] for name in COPYING)

    @property
    def allocations(self) -> int:
        """Operators that do nothing but allocate, and fill."""
        return sum(self.counts[name] for name in ALLOCATING)
