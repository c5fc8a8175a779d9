"""`stream` and `unstream`: a Hugging Face model whose forward and backward run in chunks, in place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from trunkline import documents, engine, inputs, support
from trunkline.compilation import is_under_compile
from trunkline.conditions import Conditions, draw_seed
from trunkline.config import Progress, StreamConfig, keepable
from trunkline.decoder import Batch, Parameters
from trunkline.huggingface import HuggingFaceDecoder
from trunkline.ranks import Agreement, Alone, Ranks
from trunkline.structure import SHARDING, base_model
from trunkline.tiers.machines import tiers_for
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
        prefetch: tensors of one store on the device at a time; 1 turns double buffering off.
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
    return _streamed(model).tiers


def read_meters(model: nn.Module) -> Meters:
    """What the stores of a streamed model held in each tier, and moved over each lane, since this was last asked.

    Raises:
        ValueError: the model is not streamed.
    """
    forward = _streamed(model)
    found = forward.tiers.read_meters()
    return found if forward.ranks.traffic is None else found.with_lane("comm", forward.ranks.traffic)


def _streamed(model: nn.Module) -> StreamedForward:
    base = base_model(model)
    forward = _streamed_forward(base)
    if forward is None:
        raise ValueError(f"{type(base).__name__} is not streamed: there is nothing to read.")
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


class StreamedForward:
    """A model's `forward` while it is streamed: transformers' signature and semantics, in chunks.

    An object rather than a closure, so that a deep copy of the model streams the copy.
    """

    def __init__(self, decoder: HuggingFaceDecoder, config: StreamConfig, ranks: Ranks) -> None:
        self.decoder = decoder
        self.config = config
        self.ranks = ranks
        self.calls = 0
        self._num_parameters = sum(1 for _ in decoder.model.parameters())
        self._verified = decoder.device.type != "meta"  # where there were no values there was nothing to compare
        self._tiers: Tiers | None = None
        self._tiers_device: torch.device | None = None
        own = inspect.signature(decoder.model.forward)
        # Trainer drops columns of a dataset that are no argument of a model's forward.
        more = inspect.Parameter("document_ids", inspect.Parameter.KEYWORD_ONLY, default=None)
        kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        rest = [p for p in own.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
        self.__signature__ = own.replace(parameters=[*kept, more, *rest])

    def __getstate__(self) -> dict[str, Any]:
        """All but the tiers: a copy of the model has its own."""
        return {**self.__dict__, "_tiers": None}

    @property
    def tiers(self) -> Tiers:
        """Where what forwards keep rests; of the device on which the model is now."""
        device = self.decoder.device
        if self._tiers is None or self._tiers_device != device:
            self._tiers, self._tiers_device = tiers_for(device, self.config), device
        return self._tiers

    def __call__(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Forward in chunks.

        Takes what the model's own forward takes: `input_ids` (B, S), and optionally `labels` (B, S, unshifted) or
        `shift_labels` (B, S), `num_items_in_batch`, `position_ids`, a right-padded `attention_mask`, and without labels
        `logits_to_keep`. `position_ids` that begin at 0 again mark packed documents; so do `document_ids` (B, S), a
        number for each token's document, and what packing collators give (`cu_seq_lens_q`, `seq_idx`). Documents never
        attend to each other, and the last token of one has no target; `shift_labels` are taken as they are.

        Returns:
            With labels the loss, fp32 (fp64 for an fp64 model): the mean over all tokens whose label is not -100, or
            their sum over `num_items_in_batch`; 0 where there is none. Logits are not returned: they never exist as a
            whole. Without labels the logits of the last position (B, 1, V), or of the last `logits_to_keep`.

        Raises:
            ValueError: an argument is of the wrong shape or not supported; the text names it and the mend.
        """
        self._refuse_changes()
        self.calls += 1
        model = self.decoder.model
        if args and args[0] is model:  # accelerate makes a method of what it finds below its wrappers
            args = args[1:]
        packing = {name: kwargs.pop(name) for name in documents.ARGUMENTS if name in kwargs}
        given = self.__signature__.bind(*args, **kwargs).arguments | packing
        for parameter in self.__signature__.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given |= given.pop(parameter.name, {})
        for flag in ("output_hidden_states", "output_attentions", "output_router_logits"):
            if given.get(flag) is None:
                given[flag] = getattr(model.config, flag, None)
        wanted, agreement = self._begin(given)
        batch = wanted.batch
        if agreement.num_targets is not None and given.get("num_items_in_batch") is None:
            batch = replace(batch, divisor=agreement.num_targets)
        loss: Tensor | None = None
        logits: Tensor | None = None
        if not self._verified and self.decoder.device.type != "meta":
            self._verify()
        conditions = Conditions(model, batch.input_ids_BS.device, agreement.seed, self.ranks.salt)
        self.decoder.begin()
        with self.ranks.guarded(), self.decoder.lock, self.decoder.present(None):
            support.check_length(self.decoder, batch.last_position)
            reaches = support.reaches(self.decoder)
            run, differentiate = engine.begin(
                self.decoder, self.config, batch, conditions, self.tiers, self.ranks, reaches
            )
            engine.forward(run, differentiate=differentiate)
            if batch.targets is not None:
                loss = engine.loss(run, differentiate=differentiate)
            else:
                logits = engine.last_logits(run, wanted.logits_to_keep)
        output = CausalLMOutputWithPast(loss=loss, logits=logits)
        return output if wanted.return_dict else output.to_tuple()

    def _verify(self) -> None:
        """Compare the pieces of a model that had no values when it was streamed with the model itself."""
        self._verified = True
        model = self.decoder.model
        del model.forward
        try:
            if self.decoder.own_forward is not None:
                model.forward = self.decoder.own_forward
            with self.ranks.guarded():
                support.verify(self.decoder)
        finally:
            model.forward = self

    def _refuse_changes(self) -> None:
        """Refuse what has been done to the model since it was streamed, and would go wrong unseen.

        Raises:
            ValueError: the text says what.
        """
        model = self.decoder.model
        if is_under_compile() or model._compiled_call_impl is not None:
            raise ValueError(
                f"{type(model).__name__} runs under torch.compile, which would follow every sweep into one graph: pass "
                "compile=True to stream() instead, which compiles its layers (in TrainingArguments leave torch_compile "
                "off)."
            )
        count = sum(1 for _ in model.parameters())
        if count != self._num_parameters:  # adapters, perhaps, drawn at random
            self.ranks.require_same_weights(model)
            self._num_parameters = count

    def _begin(self, given: dict[str, Any]) -> tuple[inputs.Wanted, Agreement]:
        """Check what a forward was given, with all other ranks, before the first sweep."""
        found: list[inputs.Wanted] = []

        def read() -> tuple[Batch, str]:
            found.append(self._read(given))
            batch, device = found[0].batch, self.decoder.device.type
            # Whatever decides which collectives follow.
            kind = [batch.targets is not None, torch.is_grad_enabled(), self.config.decisive,
                    torch.is_autocast_enabled(device), torch.get_autocast_dtype(device),
                    None if given.get("num_items_in_batch") is None else float(batch.num_targets or 0)]  # fmt: skip
            return batch, repr(kind)

        _, agreement = self.ranks.begin(read, draw_seed())
        return found[0], agreement

    def _read(self, given: dict[str, Any]) -> inputs.Wanted:
        """Check what a forward was given, as far as this rank alone can."""
        model = self.decoder.model
        if model.training and any(getattr(layer, "gradient_checkpointing", False) for layer in self.decoder.layers):
            raise ValueError(
                f"{type(model).__name__} has gradient checkpointing on; streaming already recomputes what it needs: "
                "call model.gradient_checkpointing_disable() (gradient_checkpointing=False in TrainingArguments)."
            )
        wanted = inputs.read(given, type(model).__name__, model.get_input_embeddings().weight.shape[0])
        device = wanted.batch.input_ids_BS.device
        if device != self.decoder.device:
            raise ValueError(
                f"input_ids are on {device} and the model is on {self.decoder.device}: a streamed model is one process "
                "and one device. Move the input; under torch.nn.DataParallel, which Trainer uses where it sees several "
                "devices, let it see one (CUDA_VISIBLE_DEVICES=0)."
            )
        if wanted.batch.targets is None and model.training and torch.is_grad_enabled():
            raise ValueError(
                "no labels in training: logits of the whole sequence never exist, so there is nothing to "
                "differentiate. Pass labels (Trainer takes them away for label_smoothing_factor and "
                "compute_loss_func: leave these out); for the last logits use model.eval() or torch.no_grad()."
            )
        if wanted.batch.targets is not None:
            support.check_loss(self.decoder)
        return wanted
