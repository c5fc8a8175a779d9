"""Simulated sharding of parameters: timing of all-gathers and reductions, and memory of one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from typing_extensions import override

from trunkline.distributed.grad_norm import local
from trunkline.engine.decoder import ParameterStore
from trunkline.hf.introspect import parameters_outside
from trunkline.offload.lanes.sim_clock import QueuedWork, SimClock
from trunkline.offload.lanes.simulated import LINK
from trunkline.plan.device_memory import DeviceMemory, MemoryTally
from trunkline.plan.simulated_ranks import CollectiveLink

_GATHERED, _IN_FLIGHT = "gathered parameters", "parameters being gathered"


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """Sharding of parameters over ranks; the names are those of `trunkline.shard`, except for `dtype`.

    Attributes:
        zero: ZeRO stage: 0 (whole parameters on each device), 2 or 3.
        dtype: dtype of the shards and their gradients, such as float32 for master weights; None is the parameters' own.
            It has no effect with `zero=0`. The model computes in the dtype of its parameters.
        reduce_dtype: dtype in which gradients are reduced.
        offload: keep parameters, gradients and optimizer state in host memory; no effect with `zero=0`.
    """

    zero: int = 3
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype = torch.float32
    offload: bool = False

    def is_sharded(self, ranks: int) -> bool:
        """Return whether parameters are sharded over `ranks` ranks or offloaded, not whole on each device."""
        return self.zero > 0 and (ranks > 1 or self.offload)

    def itemsize(self, parameter: Parameter, ranks: int) -> int:
        """Return the bytes of one element of a parameter, as each of `ranks` ranks holds it between steps."""
        return ((self.is_sharded(ranks) and self.dtype) or parameter.dtype).itemsize


class SimulatedSharding(ParameterStore):
    """Simulated FSDP of one rank.

    Args:
        model: model on the `meta` device, unsharded.
        layers: its decoder layers.
        sharding_spec: sharding of its parameters.
        link: link of the ranks that share the parameters.
        clock: clock of the rank; None where nothing takes time.
        memory: memory of its device.
        host: host memory, for offloaded parameters and gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: nn.ModuleList,
        sharding_spec: ShardingSpec,
        link: CollectiveLink,
        clock: SimClock | None,
        memory: DeviceMemory,
        host: MemoryTally,
    ) -> None:
        self.device = torch.device("meta")
        self._model, self._layers, self._spec = model, layers, sharding_spec
        self._link, self._clock, self._memory, self._host = link, clock, memory, host
        self._sharded = sharding_spec.is_sharded(link.size)
        self._prefetched: dict[int, QueuedWork | None] = {}
        self._unsharded: set[int | None] = set()
        self._reduced: set[Parameter] = set()
        self._offloading: QueuedWork | None = None

    @property
    @override
    def layer_parameters(self) -> list[list[Parameter]]:
        return [list(layer.parameters()) for layer in self._layers]

    @property
    @override
    def other_parameters(self) -> list[Parameter]:
        return parameters_outside(self._model, self._layers)

    @property
    @override
    def has_pending_grads(self) -> bool:
        return False

    @override
    def suspend_hooks(self) -> None: ...

    @override
    def resume_hooks(self) -> None: ...

    @override
    def hooks_resumed(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @override
    def begin(self) -> None: ...

    @override
    @contextlib.contextmanager
    def unsharded(self, layer: int | None, *, following: int | None = None, again: bool = False) -> Iterator[None]:
        if not self._sharded:
            yield
            return
        was_unsharded = layer in self._unsharded
        if not was_unsharded:
            prefetched = layer is not None and layer in self._prefetched
            gather = self._prefetched.pop(layer) if prefetched else self._gather(layer)  # type: ignore[arg-type]
            self._link.wait(gather)
            self._memory.add(_GATHERED, self._nbytes(layer))
            self._memory.add(_IN_FLIGHT, -self._nbytes(layer))
            self._unsharded.add(layer)
        if following is not None and following not in self._prefetched and following not in self._unsharded:
            self._prefetched[following] = self._gather(following)
        try:
            yield
        finally:
            # ZeRO-2 keeps a gathered layer from forward to backward.
            if not was_unsharded and not (again and self._spec.zero == 2):
                self._unsharded.discard(layer)
                self._memory.add(_GATHERED, -self._nbytes(layer))

    @override
    def graph_params(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        return list(parameters)

    @override
    def reduce_grads(self, parameters: Sequence[Parameter], totals: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [
            None if total is None else self._reduce(parameter, total)
            for parameter, total in zip(parameters, totals, strict=True)
        ]

    def wait_for_offloaded_grads(self) -> None:
        """Make compute wait until the last gradient is in host memory: the optimizer step needs it there."""
        self._link.wait(self._offloading)
        self._offloading = None

    def _reduce(self, parameter: Parameter, total: Tensor) -> Tensor | None:
        """Simulate the reduction of a gradient; a sharded one is counted in memory, and no tensor is returned."""
        size = self._link.size
        full = local(total)
        full = full if full.dtype == torch.float64 else full.to(self._spec.reduce_dtype)
        sent = full.nbytes * (size - 1) // size
        self._link.wait(self._link.send(sent if self._sharded else 2 * sent, "gradients"))
        if not self._sharded:
            return torch.empty_like(parameter)
        shard = -(-local(parameter).numel() // size) * self._spec.itemsize(parameter, size)
        if self._spec.offload and self._clock is not None:
            self._offloading = self._clock.submit(LINK["stash"], shard, lane="stash", label="gradients")
        if parameter not in self._reduced:  # later ones are added to the same memory
            (self._host if self._spec.offload else self._memory).add("gradients", shard)
        self._reduced.add(parameter)
        return None

    def _gather(self, layer: int | None) -> QueuedWork | None:
        """Queue the all-gather of a layer's parameters; None means everything outside the layers."""
        nbytes, size = self._nbytes(layer), self._link.size
        self._memory.add(_IN_FLIGHT, nbytes)
        if self._spec.offload and self._clock is not None:
            shard = sum(local(p).numel() * self._spec.itemsize(p, size) for p in self._parameters(layer)) // size
            self._clock.wait(self._clock.submit(LINK["fetch"], shard, lane="fetch", label="parameters"))
        return self._link.send(nbytes * (size - 1) // size, "parameters")

    def _nbytes(self, layer: int | None) -> int:
        return sum(local(p).nbytes for p in self._parameters(layer))

    def _parameters(self, layer: int | None) -> list[Parameter]:
        return self.other_parameters if layer is None else list(self._layers[layer].parameters())
