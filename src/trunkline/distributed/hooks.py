"""FSDP2's hooks, which sweeps go without."""

from __future__ import annotations

from torch import nn


class Hooks:
    """The hooks by which FSDP2 gathers and reduces a unit at every call, which can be put aside.

    Args:
        unit: after `fully_shard`.
        pre: keys of the hooks before its forward that are not FSDP2's.
        post: of those after it.
    """

    def __init__(self, unit: nn.Module, pre: set[int], post: set[int]) -> None:
        self._unit = unit
        self._pre = {key: hook for key, hook in unit._forward_pre_hooks.items() if key not in pre}
        self._post = {key: hook for key, hook in unit._forward_hooks.items() if key not in post}

    def put_aside(self) -> None:
        """The unit is called without them. Twice is once."""
        for key in self._pre:
            self._unit._forward_pre_hooks.pop(key, None)
        for key in self._post:
            self._unit._forward_hooks.pop(key, None)

    def put_back(self) -> None:
        """The unit is FSDP2's again. Twice is once."""
        for key, hook in reversed(self._pre.items()):
            self._unit._forward_pre_hooks[key] = hook
        # Those first that were first.
        others = {key: hook for key, hook in self._unit._forward_pre_hooks.items() if key not in self._pre}
        for key, hook in others.items():
            del self._unit._forward_pre_hooks[key]
            self._unit._forward_pre_hooks[key] = hook
        self._unit._forward_hooks.update(self._post)
