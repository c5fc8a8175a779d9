"""Check of attention: the kernel that each dtype gets at the usual head dims, why no other, and whether it is right."""

from __future__ import annotations

import math
import warnings

import torch

from trunkline.attention import kernels
from trunkline.attention.kernel_base import Kernel
from trunkline.plan.checks import Finding, judge

HEAD_DIMS = (64, 128, 256)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TOKENS = 16
# Weights are off by the roundings of their scores, outputs by those of their weights and their own.
_ROUNDINGS = 8
_COARSE = 2**-7  # the rounding of float32 products where PyTorch has been told not to care: that of bfloat16
# A better FlashAttention for a compute capability (major), and its package.
_BETTER = {9: ("FlashAttention 3", "flash-attn 3 (flash_attn_interface)"), 10: ("FlashAttention 4", "flash-attn-4")}


def check_attention(short: str, device: torch.device) -> Finding:
    """Check the attention kernels that `HEAD_DIMS` get in a dtype, by computing a few tokens with each.

    The finding names the kernels, and says why others do not serve. It fails if an output is wrong, and warns if
    attention could be faster.

    Args:
        short: a key of `DTYPES`: `fp32`, `bf16` or `fp16`.
        device: device to compute on.
    """
    name, dtype = f"attention {short}", DTYPES[short]
    implementation = kernels.best_implementation(device) or kernels.active_implementation()
    dims_by_line: dict[str, list[int]] = {}
    chosen: set[str] = set()
    widened = False
    for head_dim in HEAD_DIMS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of slow kernels: this finding says it
            kernel = kernels.resolve(device, dtype, head_dim, head_dim)
        computes = kernel.compute_dtype(dtype)
        with kernels.activated(kernels.best_implementation(device)):
            error = kernel_error(kernel, device, computes, head_dim)
        if not error <= _ROUNDINGS * rounding(computes):  # also where it is nan
            fix = "Use another kernel (attn_kernel='math' is slow and right), and another version of PyTorch."
            return Finding(name, "fail", f"{kernel.name} is wrong by {error:.1e} at head dim {head_dim}", fix)
        chosen.add(kernel.name)
        others = [other for other in kernels.NAMES if other not in ("auto", kernel.name)]
        reasons = {other: kernels.why_not(other, device, dtype, head_dim, head_dim) for other in others}
        refused = "; ".join(f"not {other}: {reason}" for other, reason in reasons.items() if reason is not None)
        line = f"{kernel.name} ({refused})" if refused else kernel.name
        if computes != dtype and kernel.name == "cpu_flash":
            widened, line = True, f"{line}; in fp32, since this processor has no {short} instructions"
        dims_by_line.setdefault(line, []).append(head_dim)
    by_dims = [f"head dims {', '.join(map(str, dims))}: {line}" for line, dims in dims_by_line.items()]
    text = "; ".join(by_dims if len(by_dims) > 1 else dims_by_line)
    if "cuda_flash" in chosen:
        text = f"{text}; FlashAttention {implementation[-1] if implementation else 2}"
    return judge(name, text, _fix(short, device, chosen, widened=widened, implementation=implementation))


def rounding(dtype: torch.dtype) -> float:
    """Return the machine epsilon of a dtype's products: 2**-7 for fp32 where PyTorch may use lower precision."""
    coarse = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return _COARSE if coarse else torch.finfo(dtype).eps


def kernel_error(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    """Return the largest error of a kernel's causal output, as a share of the largest value; the reference is fp64."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(3, 1, 2, _TOKENS, head_dim, generator=generator, dtype=torch.float64).to(dtype)
    scale = head_dim**-0.5
    output, _ = kernel.forward(*exact.to(device), causal=True, scale=scale)
    q, k, v = exact.double()
    hidden = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).triu(1)
    expected = torch.softmax((q @ k.mT * scale).masked_fill(hidden, -math.inf), -1) @ v
    return float((output.double().cpu() - expected).abs().max() / v.abs().max())


def _fix(
    short: str, device: torch.device, chosen: set[str], *, widened: bool, implementation: str | None
) -> str | None:
    """Return how to make attention faster; None if nothing would.

    Args:
        short: a key of `DTYPES`.
        device: device of the kernels.
        chosen: names of the kernels that serve the usual head dims.
        widened: a kernel computes in fp32, since the processor lacks instructions for the dtype.
        implementation: active flash implementation; None is PyTorch's own.
    """
    if widened and short == "bf16":  # the dtype that models come in; few train in fp16 on a CPU
        return (
            "bfloat16 saves memory here and no time: model.dtype float32 is as fast and more exact, where it fits. "
            "Processors with AVX512-BF16 or AMX compute in bfloat16."
        )
    if device.type != "cuda" or short == "fp32":
        return None
    if "math" in chosen:
        return "Attention is several times slower than it could be: see the reason above."
    better = _BETTER.get(torch.cuda.get_device_capability(device)[0])
    if torch.version.hip is None and better is not None and implementation is None:
        return f"Install {better[1]}: {better[0]} is up to twice as fast as 2 on this device."
    return None
