"""Parameters over ranks that are not there: what is gathered and reduced, when, and what a rank holds meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from trunkline.distributed.grad_norm import local
from trunkline.hf.introspect import parameters_outside
from trunkline.offload.lanes.sim_clock import QueuedWork, SimClock
from trunkline.offload.lanes.simulated import LINK
from trunkline.plan.device_memory import DeviceMemory, MemoryTally
from trunkline.plan.simulated_ranks import CollectiveLink


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """How parameters are spread over ranks; as `trunkline.shard` takes it.

    Attributes:
        zero: 0, 2 or 3.
        dtype: in which parts rest, with their gradients, where they are wider than what the model computes in (float32
            masters); None is that of the parameters.
        reduce_dtype: in which gradients are summed.
        offload: parameters, gradients and optimizer state rest in host memory.
    """

    zero: int = 3
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype = torch.float32
    offload: bool = False

    def cuts(self, ranks: int) -> bool:
        """Whether parameters are anywhere else than whole on each of so many ranks."""
        return self.zero > 0 and (ranks > 1 or self.offload)


class SimulatedSharding:
    """Simulated FSDP sharding of one rank: the `ParameterStore` of an estimate.

    Args:
        model: on the `meta` device, whole.
        layers: its decoder layers.
        sharding_spec: how its parameters are spread.
        wire: of the ranks that they are spread over.
        clock: of this rank; None where everything is over at once.
        memory: of its device.
        host: of what it offloads.
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
        self.has_pending_grads = False
        self._layers = layers
        self._model = model
        self._sharding_spec, self._wire, self._clock, self._memory, self._host = (
            sharding_spec,
            link,
            clock,
            memory,
            host,
        )
        self._sharded = sharding_spec.cuts(link.size)
        self._coming: dict[int, QueuedWork | None] = {}
        self._whole: set[int | None] = set()
        self._reduced: set[Parameter] = set()
        self._leaving: QueuedWork | None = None

    @property
    def layer_parameters(self) -> list[list[Parameter]]:
        """See `ParameterStore.layer_parameters`."""
        return [list(layer.parameters()) for layer in self._layers]

    @property
    def other_parameters(self) -> list[Parameter]:
        """See `ParameterStore.other_parameters`."""
        return parameters_outside(self._model, self._layers)

    def suspend_hooks(self) -> None:
        """See `ParameterStore.suspend_hooks`."""

    def resume_hooks(self) -> None:
        """See `ParameterStore.resume_hooks`."""

    def hooks_resumed(self) -> contextlib.AbstractContextManager[None]:
        """See `ParameterStore.hooks_resumed`."""
        return contextlib.nullcontext()

    def begin(self) -> None:
        """See `ParameterStore.begin`."""

    @contextlib.contextmanager
    def unsharded(self, layer: int | None, *, following: int | None = None, again: bool = False) -> Iterator[None]:
        """See `ParameterStore.present`."""
        if not self._sharded:
            yield
            return
        was_whole = layer in self._whole
        if not was_whole:
            job = self._coming.pop(layer) if layer is not None and layer in self._coming else self._gather(layer)
            self._wire.wait(job)
            self._memory.put("gathered parameters", self._nbytes(layer))
            self._memory.put("parameters on their way", -self._nbytes(layer))
            self._whole.add(layer)
        if following is not None and following not in self._coming and following not in self._whole:
            self._coming[following] = self._gather(following)
        try:
            yield
        finally:
            if not was_whole and not (again and self._sharding_spec.zero == 2):
                self._whole.discard(layer)
                self._memory.put("gathered parameters", -self._nbytes(layer))

    def graph_params(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        """See `ParameterStore.live`."""
        return list(parameters)

    def reduce_grads(self, parameters: Sequence[Parameter], totals: Sequence[Tensor | None]) -> list[Tensor | None]:
        """See `ParameterStore.reduce_grads`: where they are in parts, a rank's own is counted and not made."""
        return [
            None if total is None else self._over_ranks(parameter, total)
            for parameter, total in zip(parameters, totals, strict=True)
        ]

    def settle(self) -> None:
        """Have compute go on after the last gradient is where it rests: the optimizer works on it."""
        self._wire.wait(self._leaving)
        self._leaving = None

    def _over_ranks(self, parameter: Parameter, total: Tensor) -> Tensor | None:
        size = self._wire.size
        part = local(total)
        part = part if part.dtype == torch.float64 else part.to(self._sharding_spec.reduce_dtype)
        sent = part.nbytes * (size - 1) // size
        self._wire.wait(self._wire.send(sent if self._sharded else 2 * sent, "gradients"))
        if not self._sharded:
            return torch.empty_like(parameter)
        own = -(-local(parameter).numel() // size) * self._at_rest(parameter)
        if self._sharding_spec.offload and self._clock is not None:
            self._leaving = self._clock.submit(LINK["stash"], own, lane="stash", label="gradients")
        if parameter not in self._reduced:
            (self._host if self._sharding_spec.offload else self._memory).put("gradients", own)
        self._reduced.add(parameter)
        return None

    def _gather(self, layer: int | None) -> QueuedWork | None:
        """Have the parameters of a layer, or of what is in none, brought together."""
        nbytes, size = self._nbytes(layer), self._wire.size
        self._memory.put("parameters on their way", nbytes)
        if self._sharding_spec.offload and self._clock is not None:
            own = sum(local(p).numel() * self._at_rest(p) for p in self._parameters(layer)) // size
            self._clock.wait(self._clock.submit(LINK["fetch"], own, lane="fetch", label="parameters"))
        return self._wire.send(nbytes * (size - 1) // size, "parameters")

    def _nbytes(self, layer: int | None) -> int:
        return sum(local(p).nbytes for p in self._parameters(layer))

    def _at_rest(self, parameter: Parameter) -> int:
        """Bytes of an element of a part."""
        return (self._sharding_spec.dtype or parameter.dtype).itemsize

    def _parameters(self, layer: int | None) -> list[Parameter]:
        return self.other_parameters if layer is None else list(self._layers[layer].parameters())
