"""Check of attention: which kernel each dtype gets at the usual head dims, why no other, and whether it is right."""

from __future__ import annotations

import math
import warnings

import torch

from trunkline.attention import flash, kernels
from trunkline.plan.checks.finding import Finding, State

HEAD_DIMS = (64, 128, 256)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TOKENS = 16
# Weights are off by the roundings of their scores, outputs by those of their weights and their own.
_ROUNDINGS = 8
_COARSE = 2**-7  # the rounding of float32 products where PyTorch has been told not to care: that of bfloat16
# What an implementation would give, and the compute capability (major) that it is written for.
_BETTER = {9: ("FlashAttention 3", "flash-attn 3 (flash_attn_interface)"), 10: ("FlashAttention 4", "flash-attn-4")}


def attention(short: str, device: torch.device) -> Finding:
    """Which kernel attention in a dtype is computed by, found by computing a little with it.

    Args:
        short: a name of `DTYPES`.
        device: on which.
    """
    name, dtype = f"attention {short}", DTYPES[short]
    implementation = flash.best_implementation(device) or flash.active_implementation()
    lines: dict[str, list[int]] = {}
    chosen: set[str] = set()
    widened = False
    for head_dim in HEAD_DIMS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of slow kernels, which is said here
            kernel = kernels.resolve(device, dtype, head_dim, head_dim)
        computes = kernel.compute_dtype(dtype)
        with flash.activated(flash.best_implementation(device)):
            error = error_of(kernel, device, computes, head_dim)
        if not error <= _ROUNDINGS * rounding(computes):
            mend = "Use another kernel (attn_kernel='math' is slow and right), and another version of PyTorch."
            return Finding(name, "fail", f"{kernel.name} is wrong by {error:.1e} at head dim {head_dim}", mend)
        chosen.add(kernel.name)
        line = _line(kernel.name, device, dtype, head_dim)
        if computes != dtype and kernel.name == "cpu_flash":
            widened = True
            line = f"{line}; in fp32, for want of {short} instructions"
        lines.setdefault(line, []).append(head_dim)
    text = "; ".join(f"head dims {_list(dims)}: {line}" if len(lines) > 1 else line for line, dims in lines.items())
    if "cuda_flash" in chosen:
        text = f"{text}; FlashAttention {implementation[-1] if implementation else 2}"
    return Finding(name, *_judge(short, device, chosen, widened, implementation, text))


def rounding(dtype: torch.dtype) -> float:
    """The distance of 1 and the next number in which products of a dtype are computed."""
    coarse = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return _COARSE if coarse else torch.finfo(dtype).eps


def error_of(kernel: kernels.Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    """How far the causal output of a few tokens is from plain softmax attention in fp64, relative to the values.

    Args:
        kernel: which.
        device: on which.
        dtype: of queries, keys and values.
        head_dim: theirs.
    """
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(3, 1, 2, _TOKENS, head_dim, generator=generator, dtype=torch.float64).to(dtype)
    q, k, v = exact.to(device)
    scale = 1 / math.sqrt(head_dim)
    got, _ = kernel.forward(q, k, v, causal=True, scale=scale)
    q, k, v = exact.double()
    hidden = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).triu(1)
    expected = torch.softmax((q @ k.mT * scale).masked_fill(hidden, -math.inf), -1) @ v
    return float((got.double().cpu() - expected).abs().max() / v.abs().max())


def _line(chosen: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The kernel, and why not the others."""
    others = [other for other in kernels.NAMES if other not in ("auto", chosen)]
    reasons = ((other, kernels.why_not(other, device, dtype, head_dim, head_dim)) for other in others)
    refused = [f"not {other}: {reason}" for other, reason in reasons if reason is not None]
    return f"{chosen} ({'; '.join(refused)})" if refused else chosen


def _judge(
    short: str, device: torch.device, chosen: set[str], widened: bool, implementation: str | None, text: str
) -> tuple[State, str, str | None]:
    """The state of a finding that is not a failure, its text, and its mend."""
    if widened and short == "bf16":  # the dtype that models come in; few train in fp16 on a CPU
        mend = (
            "bfloat16 saves memory here and no time: model.dtype float32 is as fast and more exact, where it fits. "
            "Processors with AVX512-BF16 or AMX compute in bfloat16."
        )
        return "warn", text, mend
    if device.type != "cuda" or short == "fp32":
        return "ok", text, None
    if "math" in chosen:
        return "warn", text, "Attention is several times slower than it could be: see the reason above."
    better = _BETTER.get(torch.cuda.get_device_capability(device)[0])
    if torch.version.hip is None and better is not None and implementation is None:
        return "warn", text, f"Install {better[1]}: {better[0]} is up to twice as fast as 2 on this device."
    return "ok", text, None


def _list(dims: list[int]) -> str:
    return ", ".join(map(str, dims))
