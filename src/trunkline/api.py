"""`stream` and `unstream`: run a Hugging Face model's forward and backward in chunks, in place."""

from __future__ import annotations

from types import MethodType
from typing import Any, TypeVar, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from trunkline.config import StreamConfig, StreamSettings, resolve_config
from trunkline.engine.decoder import ParameterStore
from trunkline.engine.ranks import Ranks
from trunkline.forward import StreamedForward
from trunkline.hf import probe
from trunkline.hf.decoder import HuggingFaceDecoder
from trunkline.hf.introspect import SHARDING, base_model
from trunkline.offload.stats import Stats
from trunkline.offload.stores import Tiers

M = TypeVar("M", bound=nn.Module)


def stream(
    model: M,
    config: StreamConfig | None = None,
    *,
    mesh: DeviceMesh | None = None,
    **settings: Unpack[StreamSettings],
) -> M:
    """Run a decoder-only model's forward and backward in chunks of the sequence; the model is changed in place.

    The model keeps its class, parameters and config; `save_pretrained`, PEFT and `Trainer` keep working.
    `model(input_ids=ids, labels=labels).loss` is transformers' loss, and `loss.backward()` leaves the gradients of
    plain autograd in `.grad`. Streaming a streamed model replaces all its settings: those that are not given again get
    their defaults.

    First the pieces of the model run on eight tokens in two chunks, and their outputs are compared with the model's
    own. Gradients are not compared. A model on `meta` is compared at its first forward with values.

    Args:
        model: transformers causal language model, or a PEFT model around one.
        config: settings; None is all defaults.
        mesh: ranks that share the work, from `init_mesh`; None for one process. Every rank calls `stream` with the same
            arguments, and later the model; only data-parallel replicas give it different data. Call `shard` before to
            shard the parameters over the ranks; else each rank holds all of them.
        settings: fields of `StreamConfig` as keyword arguments; they replace those of `config`.

    Returns:
        `model`.

    Raises:
        ValueError: a setting is out of range, the mesh does not fit the model, or the comparison of outputs (or another
            check) shows that the model cannot be streamed exactly.
    """
    config = resolve_config(config, settings)
    base = base_model(model)
    before = _streamed_forward(base)
    if mesh is None and (getattr(base, SHARDING, None) or (before and before.decoder.sharding)):
        raise ValueError(
            f"this {type(base).__name__} was spread over ranks by shard() or stream(): give stream() the mesh, too, or "
            "each rank would train a model of its own."
        )
    if isinstance(base.__dict__.get("forward"), StreamedForward):
        unstream(model)
    own = base.__dict__.get("forward")  # perhaps set by Liger
    replaced = hasattr(base, "_original_forward") or hasattr(base, "_old_forward")  # set by accelerate
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
    ranks, sharding = _ranks_and_sharding(base, mesh)
    decoder = HuggingFaceDecoder(base, sharding)
    try:
        if sharding is not None:
            sharding.suspend_hooks()
        with ranks.guard():
            probe.verify(decoder)
    except BaseException:
        if sharding is not None:
            sharding.resume_hooks()
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


def _ranks_and_sharding(base: PreTrainedModel, mesh: DeviceMesh | None) -> tuple[Ranks, ParameterStore | None]:
    """Return the ranks that share the work, and the parameters' sharding; one rank and None without a mesh."""
    if mesh is None:
        if any(isinstance(m, FSDPModule) for m in base.modules()):
            raise ValueError("this model is sharded over ranks: give stream() the mesh, too.")
        return Ranks(), None
    from trunkline.distributed.fsdp import sharding_of
    from trunkline.distributed.mesh_ranks import MeshRanks

    sharding = sharding_of(base, mesh)
    return MeshRanks(mesh), sharding


def unstream(model: M) -> M:
    """Undo `stream`: the model runs its own forward again, on layers that are not compiled.

    A sharded model stays sharded. Wrappers that accelerate has put around the streamed forward since (mixed precision)
    are removed, too.

    Returns:
        `model`.

    Raises:
        ValueError: the model is not streamed, or gradients under `trunkline.no_sync` wait to be reduced.
    """
    base = base_model(model)
    forward = _streamed_forward(base)
    if forward is None:
        raise ValueError(f"{type(base).__name__} is not streamed: there is nothing to undo.")
    if forward.decoder.sharding is not None:
        if forward.decoder.sharding.has_pending_grads:
            raise ValueError("gradients under trunkline.no_sync wait to be reduced: run a backward outside it first.")
        forward.decoder.sharding.resume_hooks()
    del base.forward
    if forward.decoder.own_forward is not None:
        base.forward = forward.decoder.own_forward
    base.__dict__.pop("_original_forward", None)  # accelerate's note of what it wrapped
    forward.decoder.uncompile()
    return model


def tiers_of(model: nn.Module) -> Tiers:
    """Return the tiers of a streamed model on the device where it is now.

    Raises:
        ValueError: the model is not streamed.
    """
    return streamed_forward(model, "tiers").tiers


def stats(model: nn.Module) -> Stats:
    """Return this rank's peak bytes of each tier and traffic of each lane since the last call, and reset them.

    Over ranks, the lane `comm` has the collectives' traffic.

    Raises:
        ValueError: the model is not streamed.
    """
    forward = streamed_forward(model, "stats")
    found = forward.tiers.stats()
    return found if forward.ranks.traffic is None else found.with_lane("comm", forward.ranks.traffic)


def streamed_forward(model: nn.Module, wanted: str) -> StreamedForward:
    """Return the `StreamedForward` of a model.

    Args:
        model: streamed model, or a wrapper around one.
        wanted: name of the caller, for the message.

    Raises:
        ValueError: the model is not streamed.
    """
    base = base_model(model)
    forward = _streamed_forward(base)
    if forward is None:
        raise ValueError(f"{wanted}: {type(base).__name__} is not streamed: call trunkline.stream(model) first.")
    return forward


def _streamed_forward(base: PreTrainedModel) -> StreamedForward | None:
    """Return a model's `StreamedForward`, also below wrappers that accelerate has put around it; None without one."""
    forward: Any = base.__dict__.get("forward")
    while forward is not None and not isinstance(forward, StreamedForward):
        forward = getattr(forward, "__wrapped__", None) or getattr(forward, "__func__", None)
    return forward


def _check_reached(model: nn.Module, streamed: StreamedForward) -> None:
    """Run a wrapper around the model once, on two tokens, and refuse it if it does not call the streamed forward."""
    device = streamed.decoder.device
    with torch.no_grad(), probe.random_state_restored(device), probe.in_eval_mode(model):
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device))
    if streamed.calls == 0:
        raise ValueError(
            f"{type(model).__name__} goes around the model's forward, so that it would not be streamed: use an adapter "
            "that changes modules in place, such as LoRA."
        )
