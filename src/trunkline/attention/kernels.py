"""Attention kernels of PyTorch, and `resolve`, which chooses a kernel for a device, a dtype and head dims.

The private operators of PyTorch are called in this module only, each after a check of its schema: where a release
changes an operator, its kernel is no longer offered and the next one takes its place. `math` runs everywhere, in every
floating dtype; it is the oracle of the tests and the fallback.

FlashAttention 3 and 4 take the place of 2 where they are installed and made for the device. PyTorch swaps its flash
operators process-wide (`torch.nn.attention.activate_flash_attention_impl`); `activated` does so for the duration of a
step, so that nothing outside sees it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention
from typing_extensions import override

from trunkline.attention.kernel_base import Kernel
from trunkline.attention.math_kernel import MathKernel
from trunkline.attention.meta_kernel import MetaKernel

# The private operators of `mkldnn` that report whether the processor has instructions for a dtype.
_INSTRUCTIONS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def processor_has(dtype: torch.dtype) -> bool:
    """Return True if this processor has instructions for a half dtype; False where this PyTorch cannot tell."""
    operator = getattr(torch.ops.mkldnn, _INSTRUCTIONS[dtype], None)
    return operator is not None and bool(operator())


class CpuFlashKernel(Kernel):
    """PyTorch's flash attention for CPUs; `causal` is aligned to the top left, and taken for equal lengths only."""

    name = "cpu_flash"
    bottom_right = False

    def __init__(self) -> None:
        self._forward: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        self._backward: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    @override
    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # Without instructions for a half dtype, fp32 is up to 8 times faster.
        return dtype if dtype not in _INSTRUCTIONS or processor_has(dtype) else torch.float32

    @override
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        assert not causal or q.shape[2] == k.shape[2]
        o, lse = self._forward(q, k, v, 0.0, causal, scale=scale)
        return o, lse

    @override
    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert not causal or q.shape[2] == k.shape[2]
        dq, dk, dv = self._backward(do, q, k, v, o, lse, 0.0, causal, scale=scale)
        return dq, dk, dv


class CudaFlashKernel(Kernel):
    """PyTorch's flash attention for CUDA (FA2; FA3 or FA4 where one is active), causal to the bottom right."""

    name = "cuda_flash"
    bottom_right = True

    def __init__(self) -> None:
        self._forward: Callable[..., Any] = torch.ops.aten._flash_attention_forward.default
        self._backward: Callable[..., Any] = torch.ops.aten._flash_attention_backward.default

    @override
    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    @override
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # the operator takes (B, tokens, heads, D)
        o, lse, *_ = self._forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )  # fmt: skip
        return o.transpose(1, 2), lse

    @override
    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        do, q, k, v, o = (x.transpose(1, 2) for x in (do, q, k, v, o))
        # The random state: without dropout the operator never reads it.
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = self._backward(
            do, q, k, v, o, lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, causal, unused, unused,
            scale=scale,
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class PaddedKernel(Kernel):
    """Kernel around one that takes a single head dim: zeros are appended to q, k and v, and cut off its results.

    Args:
        kernel: the kernel inside.
        dim: head dim after padding, at least that of keys and that of values.
    """

    def __init__(self, kernel: Kernel, dim: int) -> None:
        self._kernel = kernel
        self._dim = dim
        self.name, self.bottom_right = kernel.name, kernel.bottom_right

    @override
    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._kernel.compute_dtype(dtype)

    def _pad(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, self._dim - x.shape[-1])) if x.shape[-1] < self._dim else x

    @override
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        o, lse = self._kernel.forward(self._pad(q), self._pad(k), self._pad(v), causal=causal, scale=scale)
        return o[..., : v.shape[-1]].contiguous(), lse  # a view would keep the padding in memory

    @override
    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        do, q_padded, k_padded, v_padded, o = (self._pad(x) for x in (do, q, k, v, o))
        gradients = self._kernel.backward(do, q_padded, k_padded, v_padded, o, lse, causal=causal, scale=scale)
        dq, dk, dv = (dx[..., : x.shape[-1]] for dx, x in zip(gradients, (q, k, v), strict=True))
        return dq, dk, dv


# The arguments that each private operator must have, in this order, for its kernel to be offered.
_SCHEMAS: dict[str, tuple[str, ...]] = {
    "_scaled_dot_product_flash_attention_for_cpu": ("query", "key", "value", "dropout_p", "is_causal"),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal",
    ),
    "_flash_attention_forward": (
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
        "return_debug_mask",
    ),
    "_flash_attention_backward": (
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k",
        "dropout_p", "is_causal", "rng_state", "unused",
    ),
}  # fmt: skip


def offered(operator: str) -> bool:
    """Return True if this PyTorch has the private operator `aten::<operator>` with the arguments that we pass."""
    packet = getattr(torch.ops.aten, operator, None)
    if packet is None:
        return False
    arguments = [a for a in packet.default._schema.arguments if not a.kwarg_only]
    keywords = {a.name for a in packet.default._schema.arguments if a.kwarg_only}
    expected = _SCHEMAS[operator]
    extra_have_defaults = all(a.has_default_value() for a in arguments[len(expected) :])
    return tuple(a.name for a in arguments[: len(expected)]) == expected and extra_have_defaults and "scale" in keywords


def _cpu_flash(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> str | None:
    if device.type != "cpu":
        return "it runs on CPU tensors only"
    if not all(offered(f"_scaled_dot_product_flash_attention_for_cpu{part}") for part in ("", "_backward")):
        return f"this PyTorch ({torch.__version__}) has it under another signature"
    return None


def _cuda_flash(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> str | None:
    if device.type != "cuda":
        return "it runs on CUDA tensors only"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {dtype}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 (Ampere) or newer"
    if max(head_dim, value_dim) > 256:
        return f"it takes head dims up to 256, not {max(head_dim, value_dim)}"
    if not all(offered(f"_flash_attention_{part}") for part in ("forward", "backward")):
        return f"this PyTorch ({torch.__version__}) has it under another signature"
    return None


# In order of preference, each with the function that returns why it cannot serve some tensors.
_KERNELS: dict[str, tuple[Callable[[], Kernel], Callable[[torch.device, torch.dtype, int, int], str | None]]] = {
    "cpu_flash": (CpuFlashKernel, _cpu_flash),
    "cuda_flash": (CudaFlashKernel, _cuda_flash),
    "math": (MathKernel, lambda *_: None),
}
NAMES = ("auto", *_KERNELS)
# A kernel with one head dim for keys and values needs a multiple of this; 0 where the two may differ.
_DIM_MULTIPLES = {"cpu_flash": 1, "cuda_flash": 8, "math": 0}


def why_not(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> str | None:
    """Return why a kernel (one of `NAMES` but "auto") cannot serve such tensors; None where it can.

    Soft caps are not considered; `resolve` does.
    """
    return _KERNELS[name][1](device, dtype, head_dim, value_dim)


def _imitated(dtype: torch.dtype, head_dim: int, value_dim: int, name: str, softcap: float | None) -> Kernel | None:
    """Return the kernel that `MetaKernel` imitates; None for CUDA flash attention, which `auto` stands for."""
    if softcap is not None:
        return MathKernel()
    if name == "auto":
        half = dtype in (torch.float16, torch.bfloat16)
        return None if half and max(head_dim, value_dim) <= 256 else MathKernel()
    if name == "cpu_flash":
        return resolve(torch.device("cpu"), dtype, head_dim, value_dim)
    return _KERNELS[name][0]()


def _warn_of_math(reason: str | None) -> None:
    warnings.warn(
        f"attention is computed by plain matrix products, several times slower than by flash attention: {reason}.",
        stacklevel=3,
    )


def resolve(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    name: str = "auto",
    *,
    softcap: float | None = None,
) -> Kernel:
    """Choose the kernel for some tensors, and warn where `auto` finds none but `math` on CUDA.

    Args:
        device: of q, k, v. `meta` gives a `MetaKernel`, for any name.
        dtype: of q, k, v.
        head_dim: of queries and keys.
        value_dim: of values.
        name: `auto` for the fastest kernel that can serve them; a kernel's name for that kernel.
        softcap: soft cap of the scores, which only `math` has; None for none.

    Returns:
        The kernel; it pads head dims itself where it needs equal ones.

    Raises:
        ValueError: the kernel of that name cannot serve them.
    """
    if device.type == "meta":
        return MetaKernel(_imitated(dtype, head_dim, value_dim, name, softcap))
    if softcap is not None:
        if name not in ("auto", "math"):
            raise ValueError(
                f"attn_kernel={name!r} has no soft cap of scores, which this model has: use attn_kernel='auto'."
            )
        if device.type == "cuda" and name == "auto":
            _warn_of_math("no flash attention here has the soft cap of scores that this model has")
        return MathKernel(softcap=softcap)
    candidates = list(_KERNELS) if name == "auto" else [name]
    reason = None
    for candidate in candidates:
        make = _KERNELS[candidate][0]
        previous, reason = reason, why_not(candidate, device, dtype, head_dim, value_dim)
        if reason is None:
            if candidate == "math" and name == "auto" and device.type == "cuda":
                _warn_of_math(previous)
            multiple = _DIM_MULTIPLES[candidate]
            dim = -(-max(head_dim, value_dim) // multiple) * multiple if multiple else 0
            return PaddedKernel(make(), dim) if dim and {head_dim, value_dim} != {dim} else make()
    raise ValueError(f"attn_kernel={name!r} cannot serve this model: {reason}. Use attn_kernel='auto'.")


# -- implementations of flash attention on CUDA ------------------------------------------------------------------------

# Implementation, the package it comes from, and the compute capability (major) it is written for. On Hopper FA3 reaches
# about 1.7 times the throughput of FA2.
_FLASH_IMPLEMENTATIONS = (("FA4", "flash_attn.cute", 10), ("FA3", "flash_attn_interface", 9))


def active_implementation() -> str | None:
    """Return the flash implementation that is active process-wide; None is PyTorch's own."""
    current: Callable[[], str | None] | None = getattr(attention, "current_flash_attention_impl", None)
    return None if current is None else current()


def best_implementation(device: torch.device) -> str | None:
    """Return the flash implementation to activate for a device; None keeps the active one, the user's or PyTorch's."""
    offered_by_torch = getattr(attention, "list_flash_attention_impls", None)
    if device.type != "cuda" or offered_by_torch is None or active_implementation() is not None:
        return None
    major, _ = torch.cuda.get_device_capability(device)
    for name, package, capability in _FLASH_IMPLEMENTATIONS:
        if capability == major and name in offered_by_torch() and _is_installed(package):
            return name
    return None


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


@contextlib.contextmanager
def activated(implementation: str | None) -> Iterator[None]:
    """Activate a flash implementation, process-wide, for the duration of a `with`; None changes nothing."""
    if implementation is None:
        yield
        return
    attention.activate_flash_attention_impl(implementation)
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()
