"""What an operator costs on a machine: seconds from its FLOPs and bytes, and the figures of the machine's profile.

Matrix products by the formulas of PyTorch's own FLOP counter, attention by ours (that counter knows nothing of the
operator for CPUs), everything else by the bytes that it reads and writes. An operator takes as long as the slower of
the two, and never less than a kernel takes to start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from trunkline.attention.meta_kernel import KernelCall
from trunkline.plan.hardware import Hardware

Kind = Literal["free", "matmul", "fill", "copy", "pointwise", "transcendental", "reduction", "rows"]

aten = torch.ops.aten
_GROUPED = aten._grouped_mm  # of experts: PyTorch's counter knows nothing of it

_TRANSCENDENTAL = (
    "exp", "log", "silu", "gelu", "sigmoid", "tanh", "softmax", "cos", "sin", "pow", "rsqrt", "erf", "softplus", "mish",
)  # fmt: skip
_REDUCTION = (
    "sum", "mean", "amax", "amin", "max", "min", "var", "std", "prod", "all", "any", "norm", "linalg_vector_norm",
    "argmax", "topk", "sort", "cumsum", "bincount",
)  # fmt: skip
# Begin as names above do, or have them within, and go through each element once like any sum.
_POINTWISE = ("maximum", "minimum", "logical")
_COPY = ("copy", "clone", "cat", "stack", "repeat", "flip", "pad", "to_copy")
# Nothing is read, whatever they are given to be like.
_FILL = ("fill", "zero", "ones", "full", "arange", "new_zeros", "new_ones", "new_full")
# What is read of a table, or written to one, is a few of its rows.
_ROWS = ("embedding", "index_select", "gather", "index", "scatter", "take")
# `_unsafe_view` is a view whose schema does not say so: what a product of three dimensions ends with.
_FREE = (
    "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "alias", "_unsafe_view",
    "_local_scalar_dense", "lift_fresh", "resize_", "set_",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """Of an operator.

    Attributes:
        seconds: on the device.
        flops: of matrix products and attention, those that the mathematics needs: a kernel's own recomputation is none.
    """

    seconds: float = 0.0
    flops: int = 0


FREE = OperatorCost()


class CostModel:
    """Costs on one machine.

    Args:
        hardware: the machine.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._kinds: dict[Any, Kind] = {}

    def operator_cost(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OperatorCost:
        """Of an operator of PyTorch, called with tensors that may have no contents.

        Args:
            func: the overload.
            args: what it was called with.
            kwargs: the same.
            out: what it gave.
        """
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = kind_of(func)
        if kind == "free":
            return FREE
        if kind == "matmul":
            return self._product(func, args, kwargs, out)
        nbytes = _bytes(kind, args, kwargs, out)
        if not nbytes:
            return FREE
        rate = self._hardware.memory_rate("copy" if kind == "rows" or kind == "fill" else kind, nbytes)
        return OperatorCost(max(self._hardware.kernel_seconds, nbytes / rate))

    def attention_cost(self, call: KernelCall) -> OperatorCost:
        """Of a call of an attention kernel.

        Forward 2·D FLOPs a pair for scores and 2·Dv for outputs; backward twice that, beside the scores that a flash
        kernel computes again, which count for time and not as FLOPs.
        """
        dims = call.head_dim + call.value_dim
        flops = (2 if call.direction == "forward" else 4) * dims * call.pairs
        done = (2 if call.direction == "forward" else 5) * dims * call.pairs
        if call.kernel == "math":
            return OperatorCost(self._by_products(call), flops)
        rate = self._hardware.attention_rate(
            call.direction, call.dtype, max(call.head_dim, call.value_dim), call.queries, call.keys, causal=call.causal
        )
        return OperatorCost(max(self._hardware.kernel_seconds, done / rate), flops)

    def _by_products(self, call: KernelCall) -> float:
        """Seconds of attention by plain matrix products, all of the rectangle computed, scores in fp32."""
        heads, hardware = call.batch * call.heads, self._hardware
        products = 2 if call.direction == "forward" else 5
        rate = hardware.matmul_rate(call.dtype, call.queries, call.keys, call.head_dim)
        scores = heads * call.queries * call.keys * 4
        passes = 6 if call.direction == "forward" else 10
        flops = products * heads * call.queries * call.keys * (call.head_dim + call.value_dim)
        return flops / rate + passes * scores / hardware.memory_rate("transcendental", scores)

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OperatorCost:
        if func._overloadpacket is _GROUPED:
            flops, m, n, k, dtype = _grouped(args[0], args[1], out)
        else:
            flops = int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=out))
            m, n, k, dtype = _sizes(func, args, flops)
        nbytes = _bytes("matmul", args, kwargs, out)
        seconds = max(
            flops / self._hardware.matmul_rate(dtype, m, n, k), nbytes / self._hardware.memory_rate("copy", nbytes)
        )
        return OperatorCost(max(self._hardware.kernel_seconds, seconds), flops)


def kind_of(func: Any) -> Kind:
    """What an operator's time depends on."""
    packet = func._overloadpacket
    if packet in flop_registry or packet is _GROUPED:
        return "matmul"
    name = packet.__name__
    written = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    if name in _FREE or (is_view and not written):
        return "free"
    if name == "embedding_dense_backward":  # zeros for the whole table first
        return "copy"
    words = name.removesuffix("_backward").strip("_")
    if words.startswith(_POINTWISE):
        return "pointwise"
    if words.startswith(_ROWS):
        return "rows"
    if any(each in words for each in _TRANSCENDENTAL):
        return "transcendental"
    if words.startswith(_REDUCTION):
        return "reduction"
    if words.startswith(_FILL):
        return "fill"
    if words.startswith(_COPY):
        return "copy"
    return "pointwise"


def _sizes(func: Any, args: tuple[Any, ...], flops: int) -> tuple[int, int, int, torch.dtype]:
    """m, n, k of one matrix product among those of a call, and its dtype."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    packet = func._overloadpacket
    if packet in (aten.addmm, aten.baddbmm):
        tensors = tensors[1:]
    a, b = tensors[0], tensors[1]
    if a.ndim == b.ndim and packet in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):
        return a.shape[-2], b.shape[-1], a.shape[-1], a.dtype
    n = b.shape[-1]
    k = a.shape[-1]
    return max(1, flops // (2 * n * k)), n, k, a.dtype


def _grouped(a: Tensor, b: Tensor, out: Tensor) -> tuple[int, int, int, int, torch.dtype]:
    """FLOPs of products of which each group has its part, whichever dim is cut; m, n, k of one group; the dtype."""
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    groups = next(x.shape[0] for x in (a, b, out) if x.ndim == 3)
    if a.ndim == b.ndim == 3:
        return 2 * groups * m * n * k, m, n, k, a.dtype
    flops = 2 * m * n * k
    if a.ndim == b.ndim:
        k = max(1, k // groups)
    elif a.ndim == 2:
        m = max(1, m // groups)
    else:
        n = max(1, n // groups)
    return flops, m, n, k, a.dtype


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _touched(x: Tensor) -> int:
    """Bytes of a tensor that are there: what is expanded is read once."""
    if 0 not in x.stride():
        return x.nbytes
    sizes = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride]
    return math.prod(sizes) * x.itemsize


def _bytes(kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Bytes that an operator reads and writes."""
    if kind == "copy" and args and args[0] is out:  # in place: what was there is not read
        args = args[1:]
    written = sum(_touched(x) for x in _tensors(out if isinstance(out, (list, tuple)) else (out,)))
    if kind == "fill":
        return written
    if kind == "rows":
        return 2 * min([written, *(_touched(x) for x in _tensors(args))], default=0)
    return written + sum(_touched(x) for x in (*_tensors(args), *_tensors(kwargs.values())))
