"""`stream` and `unstream`: a Hugging Face model whose forward and backward run in chunks, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import MethodType
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from trunkline import support
from trunkline.config import Progress, StreamConfig, keepable
from trunkline.decoder import Parameters
from trunkline.forward import StreamedForward
from trunkline.huggingface import HuggingFaceDecoder
from trunkline.ranks import Alone, Ranks
from trunkline.structure import SHARDING, base_model
from trunkline.tiers.meters import Meters
from trunkline.tiers.stores import Tiers

M = TypeVar("M", bound=nn.Module)


def stream(
    model: M,
    *,
    chunk_size: int | Literal["auto"] = "auto",
    keep: Iterable[str] = ("attention",),
    head_bytes: int | str = "auto",
    kernel: str = "auto",
    strategy: Literal["auto", "resident", "head_groups", "streamed"] = "auto",
    inputs_every: int = 1,
    device_budget: int | str | None = None,
    host_budget: int | str | None = None,
    disk: str | Path | None = None,
    disk_budget: int | str | None = None,
    prefetch: int = 2,
    compile: bool = False,
    mesh: DeviceMesh | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> M:
    """Make a decoder-only model run its forward and backward in chunks of the sequence, in place.

    The model stays what it is: its class, parameters, config, `save_pretrained`, PEFT and `Trainer` keep working.
    `model(input_ids=ids, labels=labels).loss` is transformers' loss, and `loss.backward()` leaves the gradients of
    plain autograd in `.grad`. Streaming a streamed model replaces its settings.

    Args:
        model: a transformers causal language model, or a PEFT model around one.
        chunk_size: tokens of the global sequence in a chunk, any positive number; `auto` chooses by device.
        keep: what stays in memory between forward and backward, out of `attention` and `kv`; see `StreamConfig`.
        head_bytes: most bytes that logits, and what is computed from them, take at once; `auto` chooses by device.
        kernel: attention kernel, `auto` or one of `cpu_flash`, `cuda_flash`, `math`.
        strategy: how attention goes where not all fits: `resident`, `head_groups`, `streamed`, or `auto`, the first of
            these that fits; see `StreamConfig`.
        inputs_every: only the input of every N-th layer stays; those between are computed again.
        device_budget: most bytes that what is kept may take on the device, such as "20GiB"; None is no limit.
        host_budget: most bytes in host memory for what the device has no room for.
        disk: folder for a scratch file, for what the host has no room for.
        disk_budget: most bytes in that file; None is what is free on its disk.
        prefetch: tensors of one store on the device at a time (up to 8 in decoding); 1 turns double buffering off.
        compile: compile the layers with torch.compile, all but their attention: those that are alike once, whatever
            the lengths of chunks.
        mesh: the ranks that share the work, from `init_mesh`; every rank calls this, and the model, alike. Parameters
            are spread over them by `shard`, beforehand, or are whole on each.
        progress: called with a `Progress` before each chunk's work is issued.

    Returns:
        `model`.

    Raises:
        ValueError: a setting is out of range, or the model computes something that cannot be streamed exactly.
    """
    config = StreamConfig(
        chunk_size=chunk_size, keep=keepable(keep), head_bytes=head_bytes,
        kernel=kernel, strategy=strategy, inputs_every=inputs_every, device_budget=device_budget,
        host_budget=host_budget, disk=disk, disk_budget=disk_budget, prefetch=prefetch, compile=compile,
        progress=progress,
    )  # fmt: skip
    base = base_model(model)
    before = _streamed_forward(base)
    if mesh is None and (getattr(base, SHARDING, None) or (before and before.decoder.sharding)):
        raise ValueError(
            f"this {type(base).__name__} was spread over ranks by shard() or stream(): give stream() the mesh, too, or "
            "each rank would train a model of its own."
        )
    if isinstance(base.__dict__.get("forward"), StreamedForward):
        unstream(model)
    own = base.__dict__.get("forward")  # put there by Liger, perhaps
    replaced = hasattr(base, "_original_forward") or hasattr(base, "_old_forward")  # accelerate's notes
    if own is not None and (replaced or not isinstance(own, MethodType) or own.__self__ is not base):
        raise ValueError(
            f"the forward of this {type(base).__name__} has been replaced, by accelerate's mixed precision or device "
            "hooks perhaps: call stream() on the model first and prepare() after it, and keep the model on one device "
            "(unstream() first, if it was streamed before it was prepared)."
        )
    if base._compiled_call_impl is not None:
        raise ValueError(
            f"this {type(base).__name__} was compiled as a whole: pass compile=True to have its layers compiled, and "
            "leave the model as it is."
        )
    devices = sorted({str(p.device) for p in base.parameters()})
    if len(devices) > 1:
        raise ValueError(
            f"the parameters of this {type(base).__name__} are on {', '.join(devices)}: put the model on one device "
            "before stream(), without device_map."
        )
    ranks, sharding = _over(base, mesh)
    decoder = HuggingFaceDecoder(base, sharding)
    try:
        if sharding is not None:
            sharding.take_over()
        with ranks.guarded():
            support.verify(decoder)
    except BaseException:
        if sharding is not None:
            sharding.hand_back()
        raise
    if config.compile:
        decoder.compile()
    streamed = base.forward = StreamedForward(decoder, config, ranks)
    if model is not base and base.get_input_embeddings().weight.device.type != "meta":
        try:
            _check_reached(model, streamed)
        except ValueError:
            unstream(model)
            raise
    return model


def _over(base: PreTrainedModel, mesh: DeviceMesh | None) -> tuple[Ranks, Parameters | None]:
    """The ranks that share the work, and how they share the parameters."""
    if mesh is None:
        if any(isinstance(m, FSDPModule) for m in base.modules()):
            raise ValueError("this model is sharded over ranks: give stream() the mesh, too.")
        return Alone(), None
    from trunkline.parallel.group import MeshRanks
    from trunkline.parallel.sharding import sharding_of

    sharding = sharding_of(base, mesh)
    return MeshRanks(mesh), sharding


def unstream(model: M) -> M:
    """Undo `stream`: the model runs its own forward again.

    Wrappers that accelerate has put around the streamed forward since (mixed precision) go with it.

    Raises:
        ValueError: the model is not streamed.
    """
    base = base_model(model)
    forward = _streamed_forward(base)
    if forward is None:
        raise ValueError(f"{type(base).__name__} is not streamed: there is nothing to undo.")
    if forward.decoder.sharding is not None:
        if forward.decoder.sharding.is_waiting:
            raise ValueError("gradients under trunkline.no_sync wait to be reduced: run a backward outside it first.")
        forward.decoder.sharding.hand_back()
    del base.forward
    if forward.decoder.own_forward is not None:
        base.forward = forward.decoder.own_forward
    base.__dict__.pop("_original_forward", None)  # accelerate's note of what it wrapped
    forward.decoder.uncompile()
    return model


def tiers_of(model: nn.Module) -> Tiers:
    """The tiers of a streamed model on the device where it is now.

    Raises:
        ValueError: the model is not streamed.
    """
    return streamed_forward(model, "tiers").tiers


def read_meters(model: nn.Module) -> Meters:
    """What the stores of a streamed model held in each tier, and moved over each lane, since this was last asked.

    Raises:
        ValueError: the model is not streamed.
    """
    forward = streamed_forward(model, "read_meters")
    found = forward.tiers.read_meters()
    return found if forward.ranks.traffic is None else found.with_lane("comm", forward.ranks.traffic)


def streamed_forward(model: nn.Module, wanted: str) -> StreamedForward:
    """A model's streamed forward.

    Args:
        model: streamed, or a wrapper around one.
        wanted: what for, for the message.

    Raises:
        ValueError: the model is not streamed.
    """
    base = base_model(model)
    forward = _streamed_forward(base)
    if forward is None:
        raise ValueError(f"{wanted}: {type(base).__name__} is not streamed: call trunkline.stream(model) first.")
    return forward


def _streamed_forward(base: PreTrainedModel) -> StreamedForward | None:
    """A model's streamed forward, also below wrappers that accelerate has put around it since."""
    forward: Any = base.__dict__.get("forward")
    while forward is not None and not isinstance(forward, StreamedForward):
        forward = getattr(forward, "__wrapped__", None) or getattr(forward, "__func__", None)
    return forward


def _check_reached(model: nn.Module, streamed: StreamedForward) -> None:
    """Run a wrapper around the model once, on two tokens, to see that it does call the streamed forward."""
    device = streamed.decoder.device
    with torch.no_grad(), support.random_state_kept(device), support.evaluation(model):
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device))
    if streamed.calls == 0:
        raise ValueError(
            f"{type(model).__name__} goes around the model's forward, so that it would not be streamed: use an adapter "
            "that changes modules in place, such as LoRA."
        )
