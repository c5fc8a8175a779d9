"""What torch.compile has to do with: layers that are compiled, and models that are not to be."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from torch import nn


def is_compiled(layer: nn.Module) -> bool:
    """Whether torch.compile compiles a module."""
    return layer._compiled_call_impl is not None or hasattr(layer, "_orig_mod")


@contextlib.contextmanager
def room_for_graphs(layers: nn.ModuleList) -> Iterator[None]:
    """Let compiled layers have a graph for each way in which they run: training and evaluation, tails, batch sizes.

    Several models share the code of transformers' wrappers, and with it torch.compile's limit of 8.
    """
    if not any(is_compiled(layer) for layer in layers):
        yield
        return
    from torch._dynamo import config

    with config.patch(recompile_limit=max(64, config.recompile_limit)):
        yield


def is_under_compile() -> bool:
    """Whether torch.compile looks at every call that is made now."""
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._C._dynamo import eval_frame

    return eval_frame.get_eval_frame_callback() not in (None, False)
