"""FlashAttention 3 and 4 in place of 2, where they are installed and the device is made for them.

PyTorch swaps its flash operators for those of another implementation process-wide
(`torch.nn.attention.activate_flash_attention_impl`). A step of ours does so for its own duration and puts back what was
there before, so that nothing outside sees it.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch.nn import attention

# Implementation, the package it comes from, and the compute capability (major) it is written for. On Hopper FA3 reaches
# about 1.7 times the throughput of FA2.
_IMPLEMENTATIONS = (("FA4", "flash_attn.cute", 10), ("FA3", "flash_attn_interface", 9))


def active_implementation() -> str | None:
    """The implementation that has been activated process-wide; None is PyTorch's own."""
    current: Callable[[], str | None] | None = getattr(attention, "current_flash_attention_impl", None)
    return None if current is None else current()


def best_implementation(device: torch.device) -> str | None:
    """The implementation to activate for `device`; None leaves PyTorch's own, or what the user has activated."""
    offered = getattr(attention, "list_flash_attention_impls", None)
    if device.type != "cuda" or offered is None or active_implementation() is not None:
        return None
    major, _ = torch.cuda.get_device_capability(device)
    for name, package, capability in _IMPLEMENTATIONS:
        if capability == major and name in offered() and _installed(package):
            return name
    return None


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


@contextlib.contextmanager
def activated(implementation: str | None) -> Iterator[None]:
    """Run with a flash implementation in place of PyTorch's own; None changes nothing."""
    if implementation is None:
        yield
        return
    attention.activate_flash_attention_impl(implementation)
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()
