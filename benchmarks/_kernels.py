"""Recorder of a step's attention kernels and matrix products, and a replay of these calls alone.

`Recorder` sees every operator of a real step: forward, recomputation and backward. It times each attention kernel and
matrix product in place, and stores the shapes, strides and dtypes of its arguments. Operators on a CPU are synchronous,
so a clock around the call is exact. `Bare` then runs the recorded calls one after another, with nothing between them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = ("attention", "matmul")
_MATMULS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "addmm_", "mv", "addmv", "dot")}


def kind_of(operator: Any) -> str | None:
    """Return `attention` or `matmul`, or None for any other operator."""
    name: str = operator._schema.name
    if "flash_attention" in name or "efficient_attention" in name or "cudnn_attention" in name:
        return "attention"
    return "matmul" if name in _MATMULS else None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def extent(self) -> int:
        """Number of elements from the first to the last in memory, including gaps."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True, slots=True)
class Call:
    """Call of an operator; each tensor argument is replaced by its `TensorSpec`."""

    operator: Callable[..., Any]
    kind: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recorder(TorchDispatchMode):
    """Dispatch mode that times and records attention kernels and matrix products.

    Attributes:
        calls: recorded calls, in order.
        seconds: time inside the calls, by kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.seconds = dict.fromkeys(KINDS, 0.0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and record it if it is an attention kernel or a matrix product."""
        kwargs = kwargs or {}
        kind = kind_of(func)
        if kind is None:
            return func(*args, **kwargs)
        self.calls.append(Call(func, kind, tuple(_spec(x) for x in args), {k: _spec(x) for k, x in kwargs.items()}))
        start = time.perf_counter()
        result = func(*args, **kwargs)
        self.seconds[kind] += time.perf_counter() - start
        return result

    @property
    def counts(self) -> dict[str, int]:
        """Number of recorded calls, by kind."""
        return {kind: sum(call.kind == kind for call in self.calls) for kind in KINDS}


def _spec(x: Any) -> Any:
    return TensorSpec(tuple(x.shape), tuple(x.stride()), x.dtype) if isinstance(x, Tensor) else x


class Bare:
    """Recorded calls, ready to run on random tensors of the same shapes, strides and dtypes.

    All calls share one buffer per position in the argument list. The buffer has the size of the largest tensor at that
    position, so the calls of a long step need little memory. Shared buffers also hit the processor's cache more often
    than a step does, which makes the bare calls faster.

    Args:
        calls: calls of a `Recorder`.
    """

    def __init__(self, calls: list[Call]) -> None:
        extents: dict[tuple[str, int, torch.dtype], int] = {}
        for call in calls:
            for slot, spec in _slots(call):
                extents[slot] = max(extents.get(slot, 0), spec.extent)
        generator = torch.Generator().manual_seed(0)
        self._buffers = {
            slot: torch.randn(extent, generator=generator).mul_(0.3).to(slot[2]) for slot, extent in extents.items()
        }
        self._bound = [self._bind(call) for call in calls]

    def _bind(self, call: Call) -> tuple[str, Callable[..., Any], list[Any], dict[str, Any]]:
        assert not any(isinstance(x, TensorSpec) for x in call.kwargs.values()), "aten passes tensors by position"
        args = list(call.args)
        names = [argument.name for argument in call.operator._schema.arguments]  # type: ignore[attr-defined]
        for slot, spec in _slots(call):
            buffer = self._buffers[slot]
            if names[slot[1]] == "logsumexp":
                # Log-sum-exp of scores near 0 over all keys: exp(score - lse) is then as large as in a step.
                buffer.fill_(math.log(1 + self._most_keys(call)))
            args[slot[1]] = buffer.as_strided(spec.shape, spec.stride)
        return call.kind, call.operator, args, call.kwargs

    def _most_keys(self, call: Call) -> int:
        return max(spec.shape[-2] for _, spec in _slots(call) if len(spec.shape) == 4)

    def run(self) -> dict[str, float]:
        """Run all calls once; return seconds by kind, and `total`, which includes the loop around the calls."""
        seconds = dict.fromkeys(KINDS, 0.0)
        begin = time.perf_counter()
        for kind, operator, args, kwargs in self._bound:
            start = time.perf_counter()
            operator(*args, **kwargs)
            seconds[kind] += time.perf_counter() - start
        return {**seconds, "total": time.perf_counter() - begin}


def _slots(call: Call) -> list[tuple[tuple[str, int, torch.dtype], TensorSpec]]:
    """Return the tensors of a call, each with the key of its shared buffer."""
    return [((call.kind, i, x.dtype), x) for i, x in enumerate(call.args) if isinstance(x, TensorSpec)]
