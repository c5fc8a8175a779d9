"""torch.compile: layers that are compiled, and models that must not be."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from torch import nn


def is_compiled(layer: nn.Module) -> bool:
    """Tell whether torch.compile compiles this module by itself, not as a part of another."""
    return layer._compiled_call_impl is not None or hasattr(layer, "_orig_mod")


@contextlib.contextmanager
def room_for_graphs(layers: nn.ModuleList) -> Iterator[None]:
    """Raise torch.compile's recompile limit from 8 graphs to 64 in a `with`, if one of the layers is compiled.

    A layer needs a graph for training and evaluation, for each length of chunk and each batch size, and several models
    share the code of transformers' wrappers, and with it the limit.
    """
    if not any(is_compiled(layer) for layer in layers):
        yield
        return
    from torch._dynamo import config

    with config.patch(recompile_limit=max(64, config.recompile_limit)):
        yield


def is_under_compile() -> bool:
    """Tell whether torch.compile traces the calls that are made now."""
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._C._dynamo import eval_frame

    return eval_frame.get_eval_frame_callback() not in (None, False)
