"""Every operator of a rehearsal, seen as it is called: what it costs in time, and what it leaves in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trunkline.attention.meta_kernel import KernelCall, watcher
from trunkline.offload.lanes.sim_clock import SimClock
from trunkline.plan.cost_model import CostModel
from trunkline.plan.device_memory import DeviceMemory
from trunkline.plan.meta_output_cache import MetaOutputCache
from trunkline.plan.simulated_ranks import CollectiveLink
from trunkline.plan.simulated_tp import sent_by


class OpTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has a clock go on with every operator on tensors without contents, and a memory see what it makes.

    Args:
        costs: of operators; None for a machine on which everything is over at once.
        clock: that goes on.
        memory: that sees.
        tensors: of the ranks that share matrices; None where they are whole.

    Attributes:
        flops: of all operators so far.
        operators: that the host has issued so far.
    """

    def __init__(
        self, costs: CostModel | None, clock: SimClock, memory: DeviceMemory, tensors: CollectiveLink | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._costs, self._clock, self._memory = costs, clock, memory
        self._forms = MetaOutputCache()
        self._tensors = tensors
        self.flops = 0
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operators on its local part come here, too
        kwargs = kwargs or {}
        if self._tensors is not None and (nbytes := sent_by(func, args, self._tensors.size)) is not None:
            out = func(*args, **kwargs)
            self._tensors.wait(self._tensors.send(nbytes, "tensors"))
            return out
        out = self._forms.call(func, args, kwargs)
        made = [x for x in (out if isinstance(out, (list, tuple)) else (out,)) if isinstance(x, Tensor)]
        if not any(x.device.type == "meta" for x in made):
            return out
        self._memory.see(made)
        if self._costs is not None:
            self._issue()
            cost = self._costs.operator_cost(func, args, kwargs, out)
            if cost.seconds:
                self.flops += cost.flops
                self._clock.run(cost.seconds)
        return out

    def _issue(self) -> None:
        self.operators += 1
        self._clock.issue()

    def _attended(self, call: KernelCall) -> None:
        if self._costs is not None:
            self._issue()
            cost = self._costs.attention_cost(call)
            self.flops += cost.flops
            self._clock.run(cost.seconds)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """For as long as this lasts."""
        token = watcher.set(self._attended)
        try:
            with self:
                yield
        finally:
            watcher.reset(token)
