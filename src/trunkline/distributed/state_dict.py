"""Full state dict of a sharded model, and `save_pretrained` that writes it."""

from __future__ import annotations

import os
from types import MethodType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from trunkline.distributed import failure


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Gather all parameters and buffers on rank 0's host; the other ranks get an empty dict. All ranks call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state_dict: dict[str, Any] = get_model_state_dict(model, options=options)
    return state_dict


def save_full_state_dict(model: nn.Module) -> None:
    """Make a model's `save_pretrained` gather its parameters: all ranks call it then, and rank 0 writes.

    If the caller passes a `state_dict`, nothing is gathered, and each rank that calls it writes.
    """
    object.__setattr__(model, "save_pretrained", MethodType(_save_pretrained, model))


def _save_pretrained(self: Any, save_directory: str | os.PathLike[str], *args: Any, **settings: Any) -> None:
    write = type(self).save_pretrained
    if settings.get("state_dict") is not None:
        write(self, save_directory, *args, **settings)
        return
    with failure.guard():
        settings["state_dict"] = full_state_dict(self)
        if dist.get_rank() == 0:
            write(self, save_directory, *args, **settings)
        dist.barrier()
