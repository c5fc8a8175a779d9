"""One signature over all attention kernels, one function that resolves which, one name for tests to force it.

The private operators of PyTorch are reached through this module only, each with a check of its schema: where a release
changes one, the kernel is no longer offered and the next takes its place. `math` runs everywhere, in every floating
dtype, and is the oracle as well as the fallback.

Shapes: q (B, H, C, D), k and v (B, K, T, D) with H a multiple of K; key/value heads are never repeated in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trunkline.attention.math_kernel import MathKernel
from trunkline.attention.meta_kernel import MetaKernel

MAX_ELEMENTS = 2**31 - 1  # kernels index with 32 bits (flash-attention#767)


class Kernel(Protocol):
    """Attention of query rows over a rectangle of keys, and its gradient.

    Attributes:
        name: what `resolve` and `StreamConfig.kernel` call it.
        bottom_right: with `causal`, the last query sees all keys whatever the lengths; otherwise `causal` is offered
            for equal lengths only.
    """

    name: str
    bottom_right: bool

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which q, k, v of `dtype` are to be handed over."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Attention.

        Args:
            q: queries (B, H, C, D).
            k: keys (B, K, T, D).
            v: values (B, K, T, D).
            causal: each query sees the keys up to its own place only.
            scale: factor of the scores.

        Returns:
            The output (B, H, C, D) and its log-sum-exp (B, H, C), natural logarithm, fp32 (fp64 for fp64).
        """
        ...

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v through this rectangle.

        `o` and `lse` are those over *all* keys of the query, so that the gradients of disjoint rectangles add up
        (FlashAttention-2, arXiv 2307.08691, section 3.1.2).
        """
        ...


# The private operators of `mkldnn` that say whether the processor computes in a dtype itself.
_INSTRUCTIONS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def processor_has(dtype: torch.dtype) -> bool:
    """Whether this machine's processor has instructions for a half dtype; not, where this PyTorch cannot say."""
    operator = getattr(torch.ops.mkldnn, _INSTRUCTIONS[dtype], None)
    return operator is not None and bool(operator())


class CpuFlashKernel:
    """PyTorch's flash attention for CPUs; its causal flag is aligned to the top left."""

    name = "cpu_flash"
    bottom_right = False

    def __init__(self) -> None:
        self._forward: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        self._backward: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """fp32 for half dtypes that this processor has no instructions for: there it is up to 8 times faster."""
        return dtype if dtype not in _INSTRUCTIONS or processor_has(dtype) else torch.float32

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        assert not causal or q.shape[2] == k.shape[2]
        o, lse = self._forward(q, k, v, 0.0, causal, scale=scale)
        return o, lse

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        assert not causal or q.shape[2] == k.shape[2]
        dq, dk, dv = self._backward(do, q, k, v, o, lse, 0.0, causal, scale=scale)
        return dq, dk, dv


class CudaFlashKernel:
    """PyTorch's flash attention for CUDA (FA2; FA3 or FA4 where one is active), causal to the bottom right."""

    name = "cuda_flash"
    bottom_right = True

    def __init__(self) -> None:
        self._forward: Callable[..., Any] = torch.ops.aten._flash_attention_forward.default
        self._backward: Callable[..., Any] = torch.ops.aten._flash_attention_backward.default

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """As it is: fp16 and bf16 are native."""
        return dtype

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`. The operator takes (B, tokens, heads, D)."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o, lse, *_ = self._forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )  # fmt: skip
        return o.transpose(1, 2), lse

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`. Without dropout the operator never reads the random state."""
        do, q, k, v, o = (x.transpose(1, 2) for x in (do, q, k, v, o))
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = self._backward(
            do,
            q,
            k,
            v,
            o,
            lse.contiguous(),
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            causal,
            unused,
            unused,
            scale=scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class PaddedKernel:
    """A kernel that wants equal head dims of keys and values, which it gets by zeros at the end of the shorter.

    Args:
        kernel: which.
        dim: of all heads.
    """

    def __init__(self, kernel: Kernel, dim: int) -> None:
        self._kernel = kernel
        self._dim = dim
        self.name, self.bottom_right = kernel.name, kernel.bottom_right

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """That of the kernel."""
        return self._kernel.compute_dtype(dtype)

    def _pad(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, self._dim - x.shape[-1])) if x.shape[-1] < self._dim else x

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        o, lse = self._kernel.forward(self._pad(q), self._pad(k), self._pad(v), causal=causal, scale=scale)
        return o[..., : v.shape[-1]].contiguous(), lse  # what is kept is no more than it says

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
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
    """Whether this PyTorch has the private operator `aten::<operator>` with the arguments we call it with."""
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


# In order of preference, each with the function that says why not.
_KERNELS: dict[str, tuple[Callable[[], Kernel], Callable[[torch.device, torch.dtype, int, int], str | None]]] = {
    "cpu_flash": (CpuFlashKernel, _cpu_flash),
    "cuda_flash": (CudaFlashKernel, _cuda_flash),
    "math": (MathKernel, lambda *_: None),
}
NAMES = ("auto", *_KERNELS)
# What divides the one head dim that a kernel wants of keys and values; 0 where any two will do.
_DIM_MULTIPLES = {"cpu_flash": 1, "cuda_flash": 8, "math": 0}


def why_not(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> str | None:
    """The reason that a kernel (one of `NAMES` but "auto") cannot serve such tensors; None where it can."""
    return _KERNELS[name][1](device, dtype, head_dim, value_dim)


def _imagined(dtype: torch.dtype, head_dim: int, value_dim: int, name: str, softcap: float | None) -> Kernel | None:
    """The kernel whose place a virtual one takes: `auto` is a CUDA device's, None its flash attention."""
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
    """The kernel for these tensors.

    Args:
        device: where q, k, v are.
        dtype: theirs.
        head_dim: of queries and keys.
        value_dim: of values.
        name: `auto` takes the fastest that can do it; a kernel's name takes that one.
        softcap: of scores, which flash attention does not have; None for none.

    Raises:
        ValueError: the kernel asked for by name cannot do it.
    """
    if device.type == "meta":
        return MetaKernel(_imagined(dtype, head_dim, value_dim, name, softcap))
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
        refused, reason = reason, why_not(candidate, device, dtype, head_dim, value_dim)
        if reason is None:
            if candidate == "math" and name == "auto" and device.type == "cuda":
                _warn_of_math(refused)
            multiple = _DIM_MULTIPLES[candidate]
            dim = -(-max(head_dim, value_dim) // multiple) * multiple if multiple else 0
            return PaddedKernel(make(), dim) if dim and {head_dim, value_dim} != {dim} else make()
    raise ValueError(f"attn_kernel={name!r} cannot serve this model: {reason}. Use attn_kernel='auto'.")
