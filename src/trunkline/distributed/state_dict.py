"""`save_pretrained` of a model whose parameters are spread over ranks."""

from __future__ import annotations

import os
from types import MethodType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from trunkline.distributed import failure


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a model, whole, on rank 0's host; empty on the other ranks. All ranks call it."""
    found: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return found


def save_whole(model: nn.Module) -> None:
    """Have a model's own `save_pretrained` write whole parameters: every rank calls it, rank 0 writes."""
    object.__setattr__(model, "save_pretrained", MethodType(_save_pretrained, model))


def _save_pretrained(self: Any, save_directory: str | os.PathLike[str], *args: Any, **settings: Any) -> None:
    write = type(self).save_pretrained
    if settings.get("state_dict") is not None:
        write(self, save_directory, *args, **settings)
        return
    with failure.guard():
        settings["state_dict"] = whole_state_dict(self)
        if dist.get_rank() == 0:
            write(self, save_directory, *args, **settings)
        dist.barrier()
