"""Every kernel against plain softmax attention in fp64, forward and backward."""

import pytest
import torch
from cases import all_pairs
from torch import Tensor

from trunkline.attention import kernels
from trunkline.attention.kernels import CpuFlashKernel, Kernel, MathKernel, offered, resolve

CPU = torch.device("cpu")
# A few roundings of sums over at most 70 keys.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6}


def reference(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


def inputs(heads: int, kv_heads: int, rows: int, keys: int, dtype: torch.dtype, value_dim: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, heads, rows, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, value_dim)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


# For each kernel: head counts, value dims, dtypes, and (rows, keys) with and without a causal mask, pair by pair.
SHAPES = [(rows, keys, causal) for rows, keys in [(33, 33), (13, 70), (1, 1)] for causal in (False, True)]
CASES = all_pairs([(4, 4), (4, 2), (6, 1)], [8, 16, 4], [torch.float64, torch.float32], SHAPES)


@pytest.mark.parametrize(("heads", "value_dim", "dtype", "shape"), CASES)
@pytest.mark.parametrize("name", ["math", "tiled", "capped", "capped and tiled", "flash"])
def test_output_and_gradients_are_those_of_softmax_attention(
    name: str, heads: tuple[int, int], value_dim: int, dtype: torch.dtype, shape: tuple[int, int, bool]
) -> None:
    rows, keys, causal = shape
    softcap = 0.5 if "capped" in name else None
    kernel: Kernel = MathKernel(16 if "tiled" in name else 1024, softcap=softcap)
    if name == "flash":
        kernel = resolve(CPU, dtype, 8, value_dim)
        assert kernel.name == "cpu_flash"
    q, k, v = inputs(*heads, rows, keys, dtype, value_dim)
    if causal and rows != keys and not kernel.bottom_right:
        with pytest.raises(AssertionError):
            kernel.forward(q, k, v, causal=True, scale=0.3)
        return
    o, lse = kernel.forward(q, k, v, causal=causal, scale=0.3)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = reference(*exact, causal, 0.3, softcap)
    do = torch.randn_like(o)
    expected_grads = torch.autograd.grad(expected, exact, do.double())
    grads = kernel.backward(do, q, k, v, o, lse, causal=causal, scale=0.3)
    for got, wanted in zip((o, lse, *grads), (expected, expected_lse, *expected_grads), strict=True):
        assert got.shape == wanted.shape
        wanted = wanted.detach()
        assert float((got.double() - wanted).norm()) <= TOLERANCE[dtype] * max(1.0, float(wanted.norm()))


@pytest.mark.parametrize("kernel", [MathKernel(tile=16), CpuFlashKernel()], ids=["math", "flash"])
def test_gradients_of_disjoint_rectangles_add_up(kernel: Kernel) -> None:
    """Given output and log-sum-exp over all keys, each rectangle returns its own share."""
    q, k, v = inputs(4, 2, 20, 50, torch.float64)
    o, lse = reference(q, k, v, False, 0.3)
    do = torch.randn_like(o)
    whole = kernel.backward(do, q, k, v, o, lse, causal=False, scale=0.3)
    left, right = (
        kernel.backward(do, q, k[:, :, at], v[:, :, at], o, lse, causal=False, scale=0.3)
        for at in (slice(0, 17), slice(17, 50))
    )
    torch.testing.assert_close(left[0] + right[0], whole[0])
    torch.testing.assert_close(torch.cat([left[1], right[1]], 2), whole[1])
    torch.testing.assert_close(torch.cat([left[2], right[2]], 2), whole[2])


def test_resolve_takes_the_named_kernel_or_the_fastest() -> None:
    assert resolve(CPU, torch.float32, 8, 8).name == "cpu_flash"
    assert resolve(CPU, torch.float32, 8, 8, "math").name == "math"
    with pytest.raises(
        ValueError, match="attn_kernel='cuda_flash' cannot serve this model: it runs on CUDA tensors only"
    ):
        resolve(CPU, torch.float32, 8, 8, "cuda_flash")
    assert resolve(CPU, torch.float32, 8, 8, softcap=30.0).name == "math"
    with pytest.raises(ValueError, match="attn_kernel='cpu_flash' has no soft cap of scores"):
        resolve(CPU, torch.float32, 8, 8, "cpu_flash", softcap=30.0)


def test_cuda_kernel_needs_compute_capability_half_dtype_and_head_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself runs in tests/gpu."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0" in str(kernels._cuda_flash(cuda, torch.float16, 64, 64))
    assert resolve(cuda, torch.float16, 64, 64).name == "math"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kernels._cuda_flash(cuda, torch.bfloat16, 64, 64) is None
    assert "float32" in str(kernels._cuda_flash(cuda, torch.float32, 64, 64))
    assert "head dims" in str(kernels._cuda_flash(cuda, torch.float16, 512, 512))
    assert resolve(cuda, torch.bfloat16, 64, 64).name == "cuda_flash"
    assert resolve(cuda, torch.float32, 64, 64).name == "math"


def test_an_operator_under_another_signature_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = "_scaled_dot_product_flash_attention_for_cpu"
    assert offered(operator)
    monkeypatch.setitem(kernels._SCHEMAS, operator, ("query", "key", "value", "window"))
    assert not offered(operator)
    assert resolve(CPU, torch.float32, 8, 8).name == "math"
    with pytest.raises(ValueError, match="another signature"):
        resolve(CPU, torch.float32, 8, 8, "cpu_flash")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_without_instructions_is_computed_in_fp32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Processor:
        def __init__(self, supported: bool) -> None:
            self._is_mkldnn_bf16_supported = self._is_mkldnn_fp16_supported = lambda: supported

    monkeypatch.setattr(torch.ops, "mkldnn", Processor(False))
    assert CpuFlashKernel().compute_dtype(dtype) == torch.float32
    monkeypatch.setattr(torch.ops, "mkldnn", Processor(True))
    assert CpuFlashKernel().compute_dtype(dtype) == dtype
    assert CpuFlashKernel().compute_dtype(torch.float64) == torch.float64
    monkeypatch.setattr(torch.ops, "mkldnn", object())  # a PyTorch that cannot say
    assert not kernels.processor_has(dtype)
    assert CpuFlashKernel().compute_dtype(dtype) == torch.float32


def test_why_not_names_the_reason() -> None:
    for name in kernels.NAMES[1:]:
        reason = kernels.why_not(name, CPU, torch.float32, 64, 64)
        assert reason == ("it runs on CUDA tensors only" if name == "cuda_flash" else None)


def test_padded_outputs_hold_no_padding_in_memory() -> None:
    """They are kept for backward, and counted by their visible size."""
    o, _ = resolve(CPU, torch.float32, 16, 8).forward(
        torch.randn(1, 4, 20, 16), torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 8), causal=True, scale=0.3
    )
    assert o.untyped_storage().nbytes() == o.nbytes
