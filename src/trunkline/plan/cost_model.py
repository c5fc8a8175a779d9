"""Cost model of operators: seconds from their FLOPs and bytes, and from the figures of a hardware profile.

Matrix products count the FLOPs of PyTorch's FLOP counter, attention those of our own formula (PyTorch's counter does
not know the CPU operator), all other operators the bytes that they read and write. An operator takes as long as the
slower of its FLOPs and its bytes, and never less than the launch of a kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from trunkline.attention.meta_kernel import KernelCall
from trunkline.plan.hardware import Hardware
from trunkline.plan.simulated_tp import tensors_in

OperatorKind = Literal["free", "matmul", "fill", "copy", "pointwise", "transcendental", "reduction", "rows"]

aten = torch.ops.aten
_GROUPED = aten._grouped_mm  # products of experts, which PyTorch's counter does not know

_TRANSCENDENTAL = (
    "exp", "log", "silu", "gelu", "sigmoid", "tanh", "softmax", "cos", "sin", "pow", "rsqrt", "erf", "softplus", "mish",
)  # fmt: skip
_REDUCTION = (
    "sum", "mean", "amax", "amin", "max", "min", "var", "std", "prod", "all", "any", "norm", "linalg_vector_norm",
    "argmax", "topk", "sort", "cumsum", "bincount",
)  # fmt: skip
# Pointwise, although their names begin with or contain a name above.
_POINTWISE = ("maximum", "minimum", "logical")
_COPY = ("copy", "clone", "cat", "stack", "repeat", "flip", "pad", "to_copy")
# Written and not read: `zeros_like` does not read its argument.
_FILL = ("fill", "zero", "ones", "full", "arange", "new_zeros", "new_ones", "new_full")
# They read or write a few rows of a table.
_ROWS = ("embedding", "index_select", "gather", "index", "scatter", "take")
# No kernel runs. `_unsafe_view`, which ends a product of three dimensions, is a view, and its schema does not say so.
_FREE = (
    "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "alias", "_unsafe_view",
    "_local_scalar_dense", "lift_fresh", "resize_", "set_",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """Cost of an operator.

    Attributes:
        seconds: seconds on the device.
        flops: FLOPs of matrix products and attention; scores that a kernel recomputes in backward are not counted.
    """

    seconds: float = 0.0
    flops: int = 0


FREE = OperatorCost()


class CostModel:
    """Cost model of one machine.

    Args:
        hardware: profile of the machine.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware

    def operator_cost(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OperatorCost:
        """Return the cost of a PyTorch operator; its tensors may be on the `meta` device.

        Args:
            func: operator overload.
            args: positional arguments.
            kwargs: keyword arguments.
            out: its output.

        Raises:
            NoFigures: a ValueError: the profile has no figures of matrix products in the dtype.
        """
        kind = operator_kind(func)
        if kind == "free":
            return FREE
        if kind == "matmul":
            return self._matmul_cost(func, args, kwargs, out)
        nbytes = _bytes(kind, args, kwargs, out)
        if not nbytes:
            return FREE
        rate = self._hardware.memory_rate("copy" if kind == "rows" or kind == "fill" else kind, nbytes)
        return OperatorCost(max(self._hardware.kernel_seconds, nbytes / rate))

    def attention_cost(self, call: KernelCall) -> OperatorCost:
        """Return the cost of a call of an attention kernel.

        A query-key pair costs 2·D FLOPs for its score and 2·Dv for its output in forward, and twice that in backward.
        A flash kernel also recomputes scores in backward: they count as time, not as FLOPs.

        Raises:
            NoFigures: a ValueError: the profile has no figures of attention in the dtype.
        """
        forward, dims = call.direction == "forward", call.head_dim + call.value_dim
        flops, executed = ((2 if forward else products) * dims * call.pairs for products in (4, 5))
        if call.kernel == "math":
            return OperatorCost(self._math_attention_seconds(call), flops)
        rate = self._hardware.attention_rate(
            call.direction, call.dtype, max(call.head_dim, call.value_dim), call.queries, call.keys, causal=call.causal
        )
        return OperatorCost(max(self._hardware.kernel_seconds, executed / rate), flops)

    def _math_attention_seconds(self, call: KernelCall) -> float:
        """Return the seconds of attention by matrix products: all pairs, masked ones included, and scores in fp32."""
        heads, hardware = call.batch * call.heads, self._hardware
        products = 2 if call.direction == "forward" else 5
        rate = hardware.matmul_rate(call.dtype, call.queries, call.keys, call.head_dim)
        scores = heads * call.queries * call.keys * 4
        passes = 6 if call.direction == "forward" else 10
        flops = products * heads * call.queries * call.keys * (call.head_dim + call.value_dim)
        return flops / rate + passes * scores / hardware.memory_rate("transcendental", scores)

    def _matmul_cost(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OperatorCost:
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


@cache
def operator_kind(func: Any) -> OperatorKind:
    """Classify an operator by the kind of work that determines its time."""
    packet = func._overloadpacket
    if packet in flop_registry or packet is _GROUPED:
        return "matmul"
    name = packet.__name__
    written = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    if name in _FREE or (is_view and not written):
        return "free"
    if name == "embedding_dense_backward":  # it first writes zeros to the whole table
        return "copy"
    words = name.removesuffix("_backward").strip("_")
    if words.startswith(_POINTWISE):
        return "pointwise"
    if words.startswith(_ROWS):
        return "rows"
    if any(name in words for name in _TRANSCENDENTAL):
        return "transcendental"
    if words.startswith(_REDUCTION):
        return "reduction"
    if words.startswith(_FILL):
        return "fill"
    if words.startswith(_COPY):
        return "copy"
    return "pointwise"


def _sizes(func: Any, args: tuple[Any, ...], flops: int) -> tuple[int, int, int, torch.dtype]:
    """Return m, n, k of one of the matrix products of a call, and their dtype."""
    packet = func._overloadpacket
    adds = packet in (aten.addmm, aten.baddbmm)  # their first argument is no factor
    a, b = [x for x in args if isinstance(x, Tensor)][adds : adds + 2]
    n, k = b.shape[-1], a.shape[-1]
    is_product = a.ndim == b.ndim and (adds or packet in (aten.mm, aten.bmm))
    return a.shape[-2] if is_product else max(1, flops // (2 * n * k)), n, k, a.dtype


def _grouped(a: Tensor, b: Tensor, out: Tensor) -> tuple[int, int, int, int, torch.dtype]:
    """Return the FLOPs of a grouped product, m, n, k of one group, and the dtype; any of the three may be grouped."""
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


def _touched(x: Tensor) -> int:
    """Return the bytes of a tensor in memory: an expanded dim is read once."""
    if 0 not in x.stride():
        return x.nbytes
    sizes = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride]
    return math.prod(sizes) * x.itemsize


def _bytes(kind: OperatorKind, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the bytes that an operator reads and writes."""
    if kind == "copy" and args and args[0] is out:  # in place: the old contents are not read
        args = args[1:]
    written = sum(_touched(x) for x in tensors_in(out if isinstance(out, (list, tuple)) else (out,)))
    if kind == "fill":
        return written
    if kind == "rows":
        return 2 * min([written, *(_touched(x) for x in tensors_in(args))], default=0)
    return written + sum(_touched(x) for x in (*tensors_in(args), *tensors_in(kwargs.values())))
