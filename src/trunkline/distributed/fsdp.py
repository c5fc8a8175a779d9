"""Parameters sharded over ranks: ZeRO by FSDP2, tensor parallelism by transformers' plan.

FSDP2 shards and gathers parameters; the sweeps decide when. A sweep gathers a layer once for all its chunks, and
reduces its gradients once, summed over chunks in fp32 or wider. FSDP2's own hooks would do both at every call of a
layer, so they are suspended while the model is streamed.
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
from typing_extensions import override

from trunkline.distributed.mesh import REPLICA_AXES, flatten_axes, heads_of, parallel_dims_of
from trunkline.distributed.mesh_ranks import require_same_weights
from trunkline.distributed.state_dict import save_full_state_dict
from trunkline.distributed.tp import PartialGradModules, parallelize
from trunkline.engine.decoder import ParameterStore
from trunkline.hf.introspect import SHARDING, base_model, find_layers, parameters_outside

M = TypeVar("M", bound=nn.Module)


def shard(
    model: M,
    mesh: DeviceMesh,
    *,
    zero: Literal[0, 2, 3] = 3,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    offload: bool = False,
) -> M:
    """Shard a model's parameters over the ranks of a mesh, in place. Call `trunkline.stream(model, mesh=mesh)` next.

    All ranks call it, with the same weights. Add adapters before, make the optimizer after: `shard` replaces
    parameters. Afterwards every rank calls `save_pretrained`, and rank 0 writes.

    Along tp, transformers' own plan shards matrices. Over all other axes together FSDP2 (`fully_shard`) shards
    parameters, gradients and optimizer state, one group a layer and one for the rest. Where those axes have one rank
    in all, this is skipped, unless `offload` is set.

    Args:
        model: a transformers causal language model, or a PEFT model around one; not streamed yet.
        mesh: mesh from `init_mesh`.
        zero: 3 gathers each layer for each sweep; 2 keeps it unsharded from forward to backward; 0 leaves parameters
            whole along all axes but tp, and all-reduces gradients.
        param_dtype: dtype of gathered parameters, in which the model computes; None keeps theirs.
        reduce_dtype: dtype in which gradients are summed over ranks; fp64 gradients stay in fp64.
        offload: keep parameters, gradients and optimizer state in host memory.

    Returns:
        `model`, on the mesh's device unless `offload` is set.

    Raises:
        ValueError: a setting has no effect or no meaning here, the degrees do not fit the model's heads, the model is
            sharded or streamed already or has no plan for tp, or the ranks hold different weights.
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
    partial_grads = parallelize(base, mesh["tp"]) if parallel_dims.tp > 1 else None
    unsharded_specs = {name: UnshardedSpec.of(parameter) for name, parameter in base.named_parameters()}
    hooks: list[FSDPHooks] = []
    replicas = flatten_axes(mesh, REPLICA_AXES)
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
        hooks = [FSDPHooks(unit, *known) for unit, known in zip(units, before, strict=True)]
    elif zero and param_dtype is not None:
        raise ValueError("param_dtype has no effect where dp x sp x cp is 1: there is nothing to shard.")
    if not hooks and mesh.device_type == "cuda":
        base.to(torch.device("cuda", torch.cuda.current_device()))
    sharding = ShardedParameters(
        base,
        mesh,
        zero=zero,
        reduce_dtype=reduce_dtype,
        unsharded_specs=unsharded_specs,
        partial_grads=partial_grads,
        hooks=hooks,
    )
    object.__setattr__(base, SHARDING, sharding)
    for module in {id(base): base, id(model): model}.values():
        save_full_state_dict(module)
    return model


def sharding_of(model: PreTrainedModel, mesh: DeviceMesh) -> ShardedParameters:
    """Return the parameters of a model as `shard` left them; a model that was never sharded is replicated (zero=0).

    All ranks call it.

    Raises:
        ValueError: `shard` was called with another mesh, or parameters were added after it. Or a model without `shard`
            needs it (tp above 1, or `fully_shard` by the user), has heads that the degrees do not divide, or has other
            weights on another rank.
    """
    known: ShardedParameters | None = getattr(model, SHARDING, None)
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
    return ShardedParameters(
        model, mesh, zero=0, reduce_dtype=torch.float32, unsharded_specs={}, partial_grads=None, hooks=[]
    )


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients on each rank: the next backward outside this context reduces all of them together.

    Use it for micro-batches before the last of a step. Until then every rank holds its own unsharded gradients, in fp32
    or wider and outside `.grad`. An error that leaves this context drops them; `zero_grad` does not.

    Args:
        model: a model streamed over a mesh. On another transformers model this context has no effect.
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
        sharding.drop_pending_grads()
        raise
    finally:
        sharding.sync = before


@dataclass(frozen=True, slots=True)
class UnshardedSpec:
    """Shape and tp placements of a parameter while FSDP2 has gathered it; the shape is the tp rank's own."""

    shape: torch.Size
    placements: tuple[Placement, ...]

    @staticmethod
    def of(parameter: Parameter) -> UnshardedSpec:
        """Describe a parameter that FSDP2 has not sharded yet."""
        if isinstance(parameter, DTensor):
            return UnshardedSpec(parameter.to_local().shape, parameter.placements)
        return UnshardedSpec(parameter.shape, ())


class FSDPHooks:
    """Forward hooks of one FSDP2 unit, which gather its parameters and reduce its gradients at every call.

    Args:
        unit: a module after `fully_shard`.
        pre: keys of forward pre-hooks that were there before `fully_shard`.
        post: keys of forward hooks that were there before it.
    """

    def __init__(self, unit: nn.Module, pre: set[int], post: set[int]) -> None:
        self._unit = unit
        self._pre = {key: hook for key, hook in unit._forward_pre_hooks.items() if key not in pre}
        self._post = {key: hook for key, hook in unit._forward_hooks.items() if key not in post}

    def suspend(self) -> None:
        """Remove the hooks; a second call changes nothing."""
        for key in self._pre:
            self._unit._forward_pre_hooks.pop(key, None)
        for key in self._post:
            self._unit._forward_hooks.pop(key, None)

    def resume(self) -> None:
        """Restore the hooks; a second call changes nothing."""
        # FSDP2's pre-hooks come first: other pre-hooks may read the gathered parameters.
        others = {key: hook for key, hook in self._unit._forward_pre_hooks.items() if key not in self._pre}
        self._unit._forward_pre_hooks.clear()
        self._unit._forward_pre_hooks.update({**self._pre, **others})
        self._unit._forward_hooks.update(self._post)


class ShardedParameters(ParameterStore):
    """Parameters of a model on a mesh, gathered for sweeps, and the reduction of their gradients over ranks.

    All ranks of the mesh call its methods in the same order.

    Args:
        model: a model that `shard` has sharded, or a replicated one.
        mesh: mesh of the job.
        zero: 0, 2 or 3; see `shard`.
        reduce_dtype: dtype in which gradients are summed over ranks.
        unsharded_specs: specs of gathered parameters by name; not used for a replicated model.
        partial_grads: modules of which each tp rank computes a part of the gradient; None without tp.
        hooks: hooks of FSDP2's units; empty for a replicated model.

    Attributes:
        sync: whether a backward reduces gradients; False inside `no_sync`.
        device: device on which this rank computes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: DeviceMesh,
        *,
        zero: int,
        reduce_dtype: torch.dtype,
        unsharded_specs: dict[str, UnshardedSpec],
        partial_grads: PartialGradModules | None,
        hooks: list[FSDPHooks],
    ) -> None:
        self.mesh = mesh
        self.zero = zero
        self.sync = True
        on_cuda = mesh.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device(mesh.device_type)
        self._model = model
        self._layers = find_layers(model)
        self._replicas = flatten_axes(mesh, REPLICA_AXES)
        self._group = self._replicas.get_group()
        self._tp = mesh["tp"].get_group()
        self._reduce_dtype = reduce_dtype
        self._sharded = isinstance(model, FSDPModule)
        self._layer_parameters = [list(layer.parameters()) for layer in self._layers]
        self._other_parameters = parameters_outside(model, self._layers)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._unsharded_specs = unsharded_specs
        self._partial_grads = partial_grads
        if partial_grads is not None:
            partial_grads.resume()
        self._pending_grads: dict[Parameter, Tensor] = {}  # sums of micro-batches before the last
        self._touched: set[Parameter] = set()  # parameters that ever had a gradient on any rank of `_group`
        self._prefetched: dict[int, Any] = {}  # layer to handle of its all-gather
        self._hooks = hooks

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameters:
        if self._sharded or self.mesh["tp"].size() > 1:
            raise ValueError("a sharded model cannot be copied: copy it before shard().")
        new = ShardedParameters.__new__(ShardedParameters)
        memo[id(self)] = new
        shared = ("mesh", "_replicas", "_group", "_tp")  # copies of a model run on the same ranks
        new.__dict__.update({k: v if k in shared else copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        return new

    @property
    @override
    def layer_parameters(self) -> list[list[Parameter]]:
        # While FSDP2 has gathered a unit, its modules hold other tensors than the sharded parameters.
        return self._layer_parameters if self._sharded else [list(layer.parameters()) for layer in self._layers]

    @property
    @override
    def other_parameters(self) -> list[Parameter]:
        return self._other_parameters if self._sharded else parameters_outside(self._model, self._layers)

    def check(self) -> None:
        """Refuse parameters that were added after `shard`; a replicated model may have some.

        Raises:
            ValueError: there are some, such as adapters.
        """
        new = [name for name, p in self._model.named_parameters() if self._sharded and p not in self._names]
        if new:
            raise ValueError(
                f"{len(new)} parameters ({new[0]}, …) came after trunkline.shard(), which has not cut them: put "
                "adapters (LoRA) on the model first, then shard() and stream() it."
            )

    @override
    def begin(self) -> None:
        if self._sharded:
            # Whatever is still gathered (zero=2 without a backward, a prefetch of a step that failed) may be older than
            # the optimizer's last step.
            for handle in self._prefetched.values():
                handle.wait()
            self._prefetched.clear()
            for layer in self._layers:
                _unit(layer).reshard()
            _unit(self._model).reshard()

    @override
    def suspend_hooks(self) -> None:
        for hooks in self._hooks:
            hooks.suspend()
        if self._partial_grads is not None:
            self._partial_grads.suspend()

    @override
    def resume_hooks(self) -> None:
        self.begin()
        for hooks in self._hooks:
            hooks.resume()
        if self._partial_grads is not None:
            self._partial_grads.resume()

    @override
    @contextlib.contextmanager
    def hooks_resumed(self) -> Iterator[None]:
        self.resume_hooks()
        try:
            yield
        finally:
            self.begin()
            self.suspend_hooks()

    @override
    @contextlib.contextmanager
    def unsharded(self, layer: int | None, *, following: int | None = None, again: bool = False) -> Iterator[None]:
        if not self._sharded:
            yield
            return
        unit = _unit(self._model if layer is None else self._layers[layer])
        handle = None if layer is None else self._prefetched.pop(layer, None)
        if handle is None:
            unit.unshard()
        else:
            handle.wait()
        # The next layer's all-gather runs while this layer is swept.
        if following is not None and following not in self._prefetched:
            self._prefetched[following] = _unit(self._layers[following]).unshard(async_op=True)
        try:
            yield
        finally:
            if not (again and self.zero == 2):
                unit.reshard()

    @override
    def graph_params(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        if not self._sharded:
            return list(parameters)
        gathered = [self._model.get_parameter(self._names[parameter]) for parameter in parameters]
        for parameter, unsharded in zip(parameters, gathered, strict=True):
            # FSDP2 copies the flag when it makes the unsharded parameter, and never again.
            unsharded.requires_grad_(parameter.requires_grad)
        return list(gathered)

    @override
    def reduce_grads(self, parameters: Sequence[Parameter], totals: Sequence[Tensor | None]) -> list[Tensor | None]:
        if not parameters:
            return []
        sums = [self._with_pending(parameter, total) for parameter, total in zip(parameters, totals, strict=True)]
        if not self.sync:
            self._pending_grads.update(
                (p, total) for p, total in zip(parameters, sums, strict=True) if total is not None
            )
            return [None] * len(sums)
        # A rank whose tokens did not touch a parameter (an expert; a head without targets) must still take part in its
        # reduction. Parameters that any rank has ever touched count as touched, so that the ranks compare once, in the
        # first step, and not in every step.
        if not self._touched.issuperset(parameters):
            touched = torch.tensor([total is not None for total in sums], dtype=torch.uint8, device=self.device)
            dist.all_reduce(touched, op=dist.ReduceOp.MAX, group=self._group)
            self._touched.update(p for p, any_rank in zip(parameters, touched.tolist(), strict=True) if any_rank)
        pairs = zip(parameters, sums, strict=True)
        return [self._reduce(p, total) if p in self._touched else None for p, total in pairs]

    def drop_pending_grads(self) -> None:
        """Drop this rank's gradients of micro-batches that were not reduced yet."""
        self._pending_grads.clear()

    @property
    @override
    def has_pending_grads(self) -> bool:
        return bool(self._pending_grads)

    def _with_pending(self, parameter: Parameter, total: Tensor | None) -> Tensor | None:
        """Add a parameter's pending sum of earlier micro-batches to `total`, and clear it; None if both are None."""
        pending = self._pending_grads.pop(parameter, None)
        if pending is None or total is None:
            return pending if total is None else total
        return pending.add_(total)

    def _reduce(self, parameter: Parameter, total: Tensor | None) -> Tensor:
        """Sum a gradient over the sharding group (dp, cp, sp), and over tp where each tp rank has a part of it.

        Return it in the parameter's dtype and sharded like it. None counts as zeros.
        """
        name = self._names.get(parameter, "")  # empty for adapters added to a replicated model
        spec = self._unsharded_specs[name] if self._sharded else UnshardedSpec.of(parameter)
        if total is None:
            dtype = torch.float64 if parameter.dtype == torch.float64 else self._reduce_dtype  # equal on all ranks
            local = torch.zeros(spec.shape, dtype=dtype, device=self.device)
        elif isinstance(total, DTensor):
            local = total.redistribute(placements=spec.placements).to_local()
        else:
            local = total
        if self._partial_grads is not None and name in self._partial_grads.parameters:
            dist.all_reduce(local, group=self._tp)  # before the cast: in the dtype of the sums over chunks
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
