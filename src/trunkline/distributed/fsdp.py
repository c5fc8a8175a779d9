"""Parameters over ranks: tensor parallelism by transformers' plan, ZeRO by FSDP2, gradients summed once a step.

FSDP2 holds the parameters and gathers them. When, the sweeps say: a layer is gathered once for a sweep, not for each of
its chunks, and its gradients, summed over chunks in fp32, are reduced once. So FSDP2's own hooks, which would do both
at every call, are gone around.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.nn import Parameter
from transformers import PreTrainedModel

from trunkline.distributed.hooks import Hooks
from trunkline.distributed.mesh import heads_of, parallel_dims_of
from trunkline.distributed.mesh_ranks import flat, require_same_weights
from trunkline.distributed.state_dict import save_whole
from trunkline.distributed.tp import Partial as PartialModules
from trunkline.distributed.tp import parallelize
from trunkline.hf.introspect import SHARDING, base_model, find_layers, parameters_outside

M = TypeVar("M", bound=nn.Module)
REPLICAS = ("dp", "cp", "sp")  # axes whose ranks compute gradients of the same parameters


def shard(
    model: M,
    mesh: DeviceMesh,
    *,
    zero: Literal[0, 2, 3] = 3,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    offload: bool = False,
) -> M:
    """Spread a model's parameters over the ranks of a mesh, in place; then `trunkline.stream(model, mesh=mesh)`.

    Every rank must hold the same weights. Adapters go on before, optimizers are made after: parameters are other
    tensors then. `save_pretrained` becomes a call that every rank makes, and rank 0 writes.

    Along tp, matrices are cut by transformers' own plan. Along all other axes parameters, gradients and optimizer state
    are cut by FSDP2 (`fully_shard`), one group a layer.

    Args:
        model: a transformers causal language model, or a PEFT model around one; not streamed yet.
        mesh: from `init_mesh`.
        zero: 3 gathers each layer for its sweep; 2 keeps it whole from forward to backward; 0 cuts nothing, and sums
            gradients over ranks.
        param_dtype: of the gathered parameters, in which the model computes; None is that of the parameters.
        reduce_dtype: in which gradients are summed over ranks.
        offload: parameters, gradients and optimizer state rest in host memory.

    Returns:
        `model`.

    Raises:
        ValueError: a setting has no effect or no meaning here, or the ranks hold different weights.
    """
    base = base_model(model)
    if zero not in (0, 2, 3):
        raise ValueError(f"zero={zero!r}: give 0, 2 or 3.")
    if getattr(base, SHARDING, None) is not None:
        raise ValueError(f"this {type(base).__name__} is sharded already.")
    if "forward" in base.__dict__:
        raise ValueError("shard() comes before stream(): call trunkline.unstream(model) first.")
    if zero == 0 and (offload or param_dtype is not None):
        given = "offload" if offload else "param_dtype"
        raise ValueError(f"{given} has no effect with zero=0, which leaves parameters as they are: use zero=2 or 3.")
    parallel_dims = parallel_dims_of(mesh)
    parallel_dims.check_heads(*heads_of(base))
    require_same_weights(base, mesh)
    partial = None
    if parallel_dims.tp > 1:
        partial = parallelize(base, mesh["tp"])
    wholes = {name: Whole.of(parameter) for name, parameter in base.named_parameters()}
    hooks: list[Hooks] = []
    replicas = flat(mesh, REPLICAS)
    if zero and (replicas.size() > 1 or offload):
        offload_policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
        settings: dict[str, Any] = {
            "mesh": replicas,
            "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False),
            "offload_policy": offload_policy,
        }
        units: list[nn.Module] = [*find_layers(base), base]
        before = [(set(unit._forward_pre_hooks), set(unit._forward_hooks)) for unit in units]
        for unit in units:
            fully_shard(unit, **settings)
        hooks = [Hooks(unit, *known) for unit, known in zip(units, before, strict=True)]
    elif zero and param_dtype is not None:
        raise ValueError("param_dtype has no effect where dp x sp x cp is 1: there is nothing to shard.")
    if not hooks and mesh.device_type == "cuda":
        base.to(torch.device("cuda", torch.cuda.current_device()))
    sharding = Sharding(base, mesh, zero=zero, reduce_dtype=reduce_dtype, wholes=wholes, partial=partial, hooks=hooks)
    object.__setattr__(base, SHARDING, sharding)
    for each in {id(base): base, id(model): model}.values():
        save_whole(each)
    return model


def sharding_of(model: PreTrainedModel, mesh: DeviceMesh) -> Sharding:
    """How a model is spread over a mesh: as `shard` did it, or, where it was not called, not at all (zero 0).

    Raises:
        ValueError: `shard` was called with another mesh; the degrees do not fit the model; the weights differ.
    """
    known: Sharding | None = getattr(model, SHARDING, None)
    if known is not None:
        if known.mesh is not mesh and known.mesh != mesh:
            raise ValueError("stream() was given another mesh than shard(): use one mesh for both.")
        known.check()
        return known
    parallel_dims = parallel_dims_of(mesh)
    parallel_dims.check_heads(*heads_of(model))
    if parallel_dims.tp > 1:
        raise ValueError(f"tp={parallel_dims.tp} cuts matrices: call trunkline.shard(model, mesh) before stream().")
    if any(isinstance(m, FSDPModule) for m in model.modules()):
        raise ValueError("this model was sharded by fully_shard: call trunkline.shard(model, mesh) instead.")
    require_same_weights(model, mesh)
    return Sharding(model, mesh, zero=0, reduce_dtype=torch.float32, wholes={}, partial=None, hooks=[])


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Do not reduce the gradients of backward passes in here over ranks: the next one outside reduces all together.

    For micro-batches before the last of a step. Until then every rank holds the whole gradients of the layers, in fp32.
    They are dropped if an error leaves this context; `zero_grad` does not know of them.

    Args:
        model: streamed over a mesh. Where it is not there is nothing to put off.
    """
    forward = base_model(model).__dict__.get("forward")
    sharding = getattr(getattr(forward, "decoder", None), "sharding", None)
    if sharding is None:
        yield
        return
    before, sharding.sync = sharding.sync, False
    try:
        yield
    except BaseException:
        sharding.forget()
        raise
    finally:
        sharding.sync = before


@dataclass(frozen=True, slots=True)
class Whole:
    """A parameter as it is when it is gathered: on this rank, where it is cut along tp."""

    shape: torch.Size
    placements: tuple[Placement, ...]

    @staticmethod
    def of(parameter: Parameter) -> Whole:
        """Of one that is not sharded yet."""
        if isinstance(parameter, DTensor):
            return Whole(parameter.to_local().shape, parameter.placements)
        return Whole(parameter.shape, ())


class Sharding:
    """Where a model's parameters are, and how their gradients come together.

    Args:
        model: sharded, or to be left whole.
        mesh: of the job.
        zero: 0, 2 or 3.
        reduce_dtype: in which gradients are summed over ranks.
        wholes: parameters by name, as they are when they are gathered; not looked at where nothing is.
        partial: what is whole on every tp rank, but gets a part of its gradient on each; None for nothing.
        hooks: of FSDP2.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: DeviceMesh,
        *,
        zero: int,
        reduce_dtype: torch.dtype,
        wholes: dict[str, Whole],
        partial: PartialModules | None,
        hooks: list[Hooks],
    ) -> None:
        self.mesh = mesh
        self.zero = zero
        self.sync = True
        on_cuda = mesh.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device(mesh.device_type)
        self._model = model
        self._layers = find_layers(model)
        self._replicas = flat(mesh, REPLICAS)
        self._group = self._replicas.get_group()
        self._tp = mesh["tp"].get_group()
        self._reduce_dtype = reduce_dtype
        self._sharded = isinstance(model, FSDPModule)
        self._layer_parameters = [list(layer.parameters()) for layer in self._layers]
        self._other_parameters = parameters_outside(model, self._layers)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._wholes = wholes
        self._partial = partial
        if partial is not None:
            partial.put_back()
        self._waiting: dict[Parameter, Tensor] = {}  # sums of micro-batches before the last
        self._touched: set[Parameter] = set()
        self._coming: dict[int, Any] = {}
        self._hooks = hooks

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        if self._sharded or self.mesh["tp"].size() > 1:
            raise ValueError("a sharded model cannot be copied: copy it before shard().")
        new = Sharding.__new__(Sharding)
        memo[id(self)] = new
        shared = ("mesh", "_replicas", "_group", "_tp")  # the job's ranks are those of every copy
        new.__dict__.update({k: v if k in shared else copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        return new

    @property
    def layer_parameters(self) -> list[list[Parameter]]:
        """See `Decoder.layer_parameters`; those of a sharded model are what `shard` found."""
        return self._layer_parameters if self._sharded else [list(layer.parameters()) for layer in self._layers]

    @property
    def other_parameters(self) -> list[Parameter]:
        """See `Decoder.other_parameters`."""
        return self._other_parameters if self._sharded else parameters_outside(self._model, self._layers)

    def check(self) -> None:
        """Refuse parameters that `shard` has not seen.

        Raises:
            ValueError: there are some, adapters perhaps.
        """
        new = [name for name, p in self._model.named_parameters() if self._sharded and p not in self._names]
        if new:
            raise ValueError(
                f"{len(new)} parameters ({new[0]}, …) came after trunkline.shard(), which has not cut them: put "
                "adapters (LoRA) on the model first, then shard() and stream() it."
            )

    def begin(self) -> None:
        """Before a forward: nothing that was gathered before is used."""
        if self._sharded:
            for handle in self._coming.values():
                handle.wait()
            self._coming.clear()
            for layer in self._layers:
                _unit(layer).reshard()
            _unit(self._model).reshard()

    def suspend_hooks(self) -> None:
        """From now on sweeps say when parameters are gathered, not FSDP2's hooks."""
        for hooks in self._hooks:
            hooks.put_aside()
        if self._partial is not None:
            self._partial.put_aside()

    def resume_hooks(self) -> None:
        """The other way."""
        self.begin()
        for hooks in self._hooks:
            hooks.put_back()
        if self._partial is not None:
            self._partial.put_back()

    @contextlib.contextmanager
    def hooks_resumed(self) -> Iterator[None]:
        """FSDP2's for as long as this lasts."""
        self.resume_hooks()
        try:
            yield
        finally:
            self.begin()
            self.suspend_hooks()

    @contextlib.contextmanager
    def unsharded(self, layer: int | None, *, following: int | None = None, again: bool = False) -> Iterator[None]:
        """See `Decoder.present`."""
        if not self._sharded:
            yield
            return
        unit = _unit(self._model if layer is None else self._layers[layer])
        handle = None if layer is None else self._coming.pop(layer, None)
        if handle is None:
            unit.unshard()
        else:
            handle.wait()
        if following is not None and following not in self._coming:
            self._coming[following] = _unit(self._layers[following]).unshard(async_op=True)
        try:
            yield
        finally:
            if not (again and self.zero == 2):
                unit.reshard()

    def graph_params(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        """See `Decoder.live`."""
        if not self._sharded:
            return list(parameters)
        found = [self._model.get_parameter(self._names[parameter]) for parameter in parameters]
        for parameter, live in zip(parameters, found, strict=True):
            live.requires_grad_(parameter.requires_grad)  # FSDP2 looks once
        return list(found)

    def reduce_grads(self, parameters: Sequence[Parameter], totals: Sequence[Tensor | None]) -> list[Tensor | None]:
        """See `Decoder.reduce_grads`."""
        if not parameters:
            return []
        sums = [self._summed(parameter, total) for parameter, total in zip(parameters, totals, strict=True)]
        if not self.sync:
            self._waiting.update((p, total) for p, total in zip(parameters, sums, strict=True) if total is not None)
            return [None] * len(sums)
        # Ranks whose tokens did not touch a parameter take part all the same: in experts, or in a head without targets.
        # One that some rank has ever touched counts as touched: that is asked at first, and never in a later step.
        if not self._touched.issuperset(parameters):
            touched = torch.tensor([total is not None for total in sums], dtype=torch.uint8, device=self.device)
            dist.all_reduce(touched, op=dist.ReduceOp.MAX, group=self._group)
            self._touched.update(p for p, any_rank in zip(parameters, touched.tolist(), strict=True) if any_rank)
        pairs = zip(parameters, sums, strict=True)
        return [self._over_ranks(p, total) if p in self._touched else None for p, total in pairs]

    def forget(self) -> None:
        """Drop the gradients of micro-batches that were not reduced yet."""
        self._waiting.clear()

    @property
    def has_pending_grads(self) -> bool:
        """Whether there are any."""
        return bool(self._waiting)

    def _summed(self, parameter: Parameter, total: Tensor | None) -> Tensor | None:
        """A sum with those of the micro-batches before."""
        waiting = self._waiting.pop(parameter, None)
        if waiting is None or total is None:
            return waiting if total is None else total
        return waiting.add_(total)

    def _over_ranks(self, parameter: Parameter, total: Tensor | None) -> Tensor:
        """The gradient of a parameter, from the sums of all ranks."""
        name = self._names.get(parameter, "")  # none for what was added to a model that is whole
        whole = self._wholes[name] if self._sharded else Whole.of(parameter)
        if total is None:
            dtype = torch.float64 if parameter.dtype == torch.float64 else self._reduce_dtype  # as those of other ranks
            local = torch.zeros(whole.shape, dtype=dtype, device=self.device)
        elif isinstance(total, DTensor):
            local = total.redistribute(placements=whole.placements).to_local()
        else:
            local = total
        if self._partial is not None and name in self._partial.parameters:
            dist.all_reduce(local, group=self._tp)
        if local.dtype != torch.float64:
            local = local.to(self._reduce_dtype)
        if self._sharded:
            parts = DTensor.from_local(local, self._replicas, [Partial()], run_check=False)
            local = parts.redistribute(placements=[Shard(0)]).to_local()
        else:
            dist.all_reduce(local, group=self._group)
        gradient = torch.empty_like(parameter)
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).copy_(local)
        return gradient


def _unit(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
