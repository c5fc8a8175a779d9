"""Dispatch mode of a simulated step: traces every operator for its time and its memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from trunkline.attention.meta_kernel import KernelCall, watcher
from trunkline.offload.lanes.sim_clock import SimClock
from trunkline.plan.cost_model import CostModel, OperatorCost
from trunkline.plan.device_memory import DeviceMemory
from trunkline.plan.meta_output_cache import MetaOutputCache
from trunkline.plan.simulated_ranks import CollectiveLink
from trunkline.plan.simulated_tp import bytes_sent


class OpTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Traces operators on `meta` tensors: advances a clock by their cost, and tracks the memory of their outputs.

    Args:
        cost_model: cost of each operator; None for operators that take no time.
        clock: clock to advance.
        memory: memory that the outputs are allocated in.
        tp_link: link of the tensor-parallel ranks; None without tensor parallelism.

    Attributes:
        flops: FLOPs of matrix products and attention on this rank so far; 0 without a cost model.
        operators: operators that the host of this rank has issued so far; 0 without a cost model.
    """

    def __init__(
        self, cost_model: CostModel | None, clock: SimClock, memory: DeviceMemory, tp_link: CollectiveLink | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cost_model, self._clock, self._memory, self._tp_link = cost_model, clock, memory, tp_link
        self._outputs = MetaOutputCache()
        self.flops = 0
        self.operators = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls the same operator on its local part, which comes here
        kwargs = kwargs or {}
        if self._tp_link is not None and (nbytes := bytes_sent(func, args, self._tp_link.size)) is not None:
            out = func(*args, **kwargs)
            self._tp_link.wait(self._tp_link.send(nbytes, "tensors"))
            return out
        out = self._outputs.call(func, args, kwargs)
        made = [x for x in (out if isinstance(out, (list, tuple)) else (out,)) if isinstance(x, Tensor)]
        if not any(x.device.type == "meta" for x in made):
            return out
        self._memory.track(made)
        if self._cost_model is not None:
            self._run(self._cost_model.operator_cost(func, args, kwargs, out))
        return out

    def _run(self, cost: OperatorCost) -> None:
        self.operators += 1
        self.flops += cost.flops
        # The host issues before the device starts: with a slow host the device waits for it.
        self._clock.issue()
        if cost.seconds:
            self._clock.run(cost.seconds)

    def _attention(self, call: KernelCall) -> None:
        if self._cost_model is not None:
            self._run(self._cost_model.attention_cost(call))

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace operators, and calls of the meta attention kernel, inside the context."""
        token = watcher.set(self._attention)
        try:
            with self:
                yield
        finally:
            watcher.reset(token)
