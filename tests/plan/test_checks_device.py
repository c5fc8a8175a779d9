"""Devices, attention kernels, links and ranks: on this CPU, and on GPUs that are made up."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.nn import attention as torch_attention

from trunkline.attention import flash, kernels
from trunkline.plan.checks import attention, device, link, ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
CPUINFO = """processor\t: 0
model name\t: Example 9000
flags\t\t: fpu avx512f avx512_bf16 amx_bf16

processor\t: 1
model name\t: Example 9000
flags\t\t: fpu avx512f avx512_bf16 amx_bf16
"""


@pytest.fixture
def cpuinfo(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    return tmp_path / "cpuinfo"


def has_instructions(monkeypatch, bf16: bool, fp16: bool) -> None:
    answers = {torch.bfloat16: bf16, torch.float16: fp16}
    monkeypatch.setattr(kernels, "processor_has", answers.__getitem__)


def test_processor(cpuinfo, tmp_path, monkeypatch):
    has_instructions(monkeypatch, True, False)
    found = device.processor(4, cpuinfo, tmp_path / "no driver")
    assert found.state == "ok"
    capability = torch.backends.cpu.get_cpu_capability()
    assert found.found == (
        f"Example 9000, 4 threads on 4 usable, {capability}, bf16 instructions (avx512_bf16, amx_bf16)"
    )
    has_instructions(monkeypatch, False, False)
    assert "no bf16 instructions" in device.processor(4, cpuinfo, tmp_path / "no driver").found


def test_more_threads_than_processors(cpuinfo, tmp_path):
    found = device.processor(2, cpuinfo, tmp_path / "no driver")
    assert found.state == "warn"
    assert "OMP_NUM_THREADS=2" in found.mend


def test_a_gpu_that_this_pytorch_is_not_built_for(cpuinfo, tmp_path):
    (tmp_path / "driver").touch()
    found = device.processor(4, cpuinfo, tmp_path / "driver")
    assert found.state == "warn"
    assert "built for CPUs only" in found.found


def test_a_gpu_that_is_not_found(cpuinfo, tmp_path, monkeypatch):
    def available():
        warnings.warn("The NVIDIA driver on your system is too old (found version 11040). Please update", stacklevel=1)
        return False

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", available)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = device.processor(4, cpuinfo, tmp_path / "no driver")
    assert found.state == "warn"
    assert "built for CUDA 13.0 and finds no GPU: The NVIDIA driver on your system is too old" in found.found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    found = device.processor(4, cpuinfo, tmp_path / "no driver")
    assert (found.state, found.mend) == ("warn", "Unset CUDA_VISIBLE_DEVICES.")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert device.devices() == [CPU]


def made_up(monkeypatch, *, capability=(9, 0), free=138 * 2**30, error: str | None = None) -> None:
    """A GPU whose tensors are the CPU's."""
    properties = SimpleNamespace(name="Made Up", major=capability[0], minor=capability[1])
    real = torch.ones

    def ones(*size, device):
        if error is not None:
            raise RuntimeError(error)
        return real(*size)

    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 140 * 2**30))


def test_gpu(monkeypatch):
    made_up(monkeypatch)
    found = device.gpu(GPU)
    assert (found.name, found.state) == ("device cuda:0", "ok")
    assert found.found == "Made Up, compute capability 9.0, 138.0 GiB of 140.0 GiB free"


def test_gpu_that_others_use(monkeypatch):
    made_up(monkeypatch, free=100 * 2**30)
    found = device.gpu(GPU)
    assert found.state == "warn"
    assert "nvidia-smi" in found.mend


def test_gpu_that_is_too_old(monkeypatch):
    made_up(monkeypatch, capability=(7, 5))
    found = device.gpu(GPU)
    assert found.state == "warn"
    assert "too old" in found.found


def test_gpu_that_does_not_compute(monkeypatch):
    made_up(monkeypatch, capability=(12, 0), error="CUDA error: no kernel image is available\nSet CUDA_LAUNCH_BLOCKING")
    found = device.gpu(GPU)
    assert found.state == "fail"
    assert found.found.endswith("12.0: CUDA error: no kernel image is available")
    assert "sm_80, sm_90" in found.mend


@pytest.mark.parametrize("short", ["fp32", "bf16", "fp16"])
def test_attention_on_a_cpu(short, monkeypatch):
    has_instructions(monkeypatch, False, False)
    found = attention.attention(short, CPU)
    assert found.found.startswith("cpu_flash (not cuda_flash: it runs on CUDA tensors only)")
    assert found.state == ("warn" if short == "bf16" else "ok")
    assert ("in fp32, for want of" in found.found) == (short != "fp32")
    has_instructions(monkeypatch, True, True)
    found = attention.attention(short, CPU)
    assert found.state == "ok"
    assert "in fp32" not in found.found


class Wrong(kernels.CpuFlashKernel):
    """Forgets the causal mask."""

    def forward(self, q, k, v, *, causal, scale):
        return super().forward(q, k, v, causal=False, scale=scale)


@pytest.mark.parametrize(("short", "dtype"), attention.DTYPES.items())
@pytest.mark.parametrize("head_dim", attention.HEAD_DIMS)
def test_what_is_wrong_is_told_from_what_is_rounded(short, dtype, head_dim):
    allowed = attention.rounding(dtype) * 8
    for kernel in (kernels.CpuFlashKernel(), kernels.MathKernel()):
        assert attention.error_of(kernel, CPU, dtype, head_dim) < allowed / 4
    assert attention.error_of(Wrong(), CPU, dtype, head_dim) > 4 * allowed


def test_a_kernel_that_is_wrong(monkeypatch):
    monkeypatch.setattr(kernels, "resolve", lambda *_: Wrong())
    found = attention.attention("fp32", CPU)
    assert found.state == "fail"
    assert found.found.startswith("cpu_flash is wrong by ")


def test_products_that_are_meant_to_be_coarse(monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert attention.rounding(torch.float32) == 2**-7
    assert attention.rounding(torch.float16) == 2**-10


@pytest.fixture
def computes(monkeypatch):
    """Kernels of a GPU are right, without one; which are chosen is up to the real rules."""
    monkeypatch.setattr(attention, "error_of", lambda *_: 0.0)
    monkeypatch.setattr(
        kernels, "CudaFlashKernel", lambda: SimpleNamespace(name="cuda_flash", compute_dtype=lambda d: d)
    )


@pytest.mark.parametrize(
    ("capability", "installed", "short", "state", "text"),
    [
        ((8, 0), False, "bf16", "ok", "cuda_flash (not cpu_flash: it runs on CPU tensors only); FlashAttention 2"),
        ((9, 0), False, "bf16", "warn", "cuda_flash (not cpu_flash: it runs on CPU tensors only); FlashAttention 2"),
        ((9, 0), True, "fp16", "ok", "cuda_flash (not cpu_flash: it runs on CPU tensors only); FlashAttention 3"),
        ((10, 0), False, "fp16", "warn", "cuda_flash (not cpu_flash: it runs on CPU tensors only); FlashAttention 2"),
        ((9, 0), False, "fp32", "ok", "not cuda_flash: it takes float16 and bfloat16, not torch.float32"),
        ((7, 5), False, "fp16", "warn", "not cuda_flash: it needs compute capability 8.0"),
    ],
)
def test_attention_on_gpus(monkeypatch, computes, capability, installed, short, state, text):
    made_up(monkeypatch, capability=capability)
    monkeypatch.setattr(flash, "_installed", lambda package: installed)
    monkeypatch.setattr(torch_attention, "activate_flash_attention_impl", lambda name: None)
    monkeypatch.setattr(torch_attention, "restore_flash_attention_impl", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = attention.attention(short, GPU)
    assert found.state == state
    assert text in found.found


def test_head_dims_that_get_other_kernels_are_told_apart(monkeypatch, computes):
    made_up(monkeypatch)
    monkeypatch.setattr(attention, "HEAD_DIMS", (64, 256, 512))
    found = attention.attention("bf16", GPU)
    assert "head dims 64, 256: cuda_flash" in found.found
    assert (
        "head dims 512: math (not cpu_flash: it runs on CPU tensors only; not cuda_flash: it takes head" in found.found
    )
    assert found.state == "warn"
    assert "several times slower" in found.mend


def test_a_cpu_has_no_link():
    assert link.link(CPU).found == "host memory is the device: chunks cross no link"


@pytest.mark.parametrize(
    ("speeds", "state"),
    [
        ((55.4, 55.1, 42.0, 41.0), "ok"),
        ((26.0, 25.0, 18.6, 18.6), "ok"),  # an A100 as it should be
        ((26.0, 25.0, 11.0, 25.0), "warn"),  # and as it should not
        ((26.0, 25.0, 25.0, 11.0), "warn"),
        ((6.0, 25.0, 6.0, 25.0), "warn"),
        ((26.0, 6.0, 26.0, 6.0), "warn"),
    ],
)
def test_what_a_link_means(speeds, state):
    found = link.judge_link("link cuda:0", link.LinkSpeed(*(speed * 1e9 for speed in speeds)))
    assert found.state == state
    fetch, stash, fetch_both, stash_both = speeds
    assert f"in {fetch:.1f} GB/s, out {stash:.1f} GB/s; at once {fetch_both:.1f} and {stash_both:.1f}" in found.found


class Clock:
    """Streams and events of a link that moves a byte in a nanosecond into the device, in two out of it."""

    def __init__(self) -> None:
        self.now: dict[int, int] = {}
        self.current = 0

    def stream(self, device):
        self.now[len(self.now)] = 0
        return SimpleNamespace(key=len(self.now) - 1)

    def event(self, enable_timing):
        event = SimpleNamespace(at=None)
        event.record = lambda stream: setattr(event, "at", self.now[stream.key])
        event.elapsed_time = lambda end: (end.at - event.at) / 1e6
        return event


def test_each_way_is_measured_alone_and_with_the_other(monkeypatch):
    clock, entered = Clock(), []

    class Entered:
        def __init__(self, stream):
            self.key = stream.key

        def __enter__(self):
            entered.append(self.key)

        def __exit__(self, *_):
            return None

    class Buffer:
        def __init__(self, on_device):
            self.on_device = on_device

        def copy_(self, source, non_blocking):
            assert non_blocking
            assert self.on_device != source.on_device
            together = len({*entered[-2:]}) == 2
            clock.now[entered[-1]] += 1000 * (1 if self.on_device else 2) * (2 if together else 1)

    monkeypatch.setattr(torch, "empty", lambda n, dtype, device=None, pin_memory=False: Buffer(device is not None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: entered.clear())
    monkeypatch.setattr(torch.cuda, "stream", Entered)
    monkeypatch.setattr(link, "Stream", clock.stream)
    monkeypatch.setattr(link, "Event", clock.event)
    speed = link.measure_link(GPU, nbytes=1000, copies=100)
    assert (speed.fetch, speed.stash) == pytest.approx((1e9, 0.5e9))
    assert speed.fetch_both == pytest.approx(0.5e9, rel=0.02)  # the very first copy is alone
    assert speed.stash_both == pytest.approx(0.25e9, rel=0.02)


def without(monkeypatch, *names: str) -> None:
    for name in ("nccl", "gloo"):
        monkeypatch.setattr(f"torch.distributed.is_{name}_available", lambda name=name: name not in names)
    monkeypatch.setattr(ranks, "nccl_version", lambda: "2.27.5")


def test_ranks(monkeypatch):
    without(monkeypatch)
    assert ranks.ranks(8, {}).found == "NCCL 2.27.5, gloo; one process, not torchrun"
    started = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "RANK": "8"}
    found = ranks.ranks(8, started)
    assert (found.state, found.found) == ("ok", "NCCL 2.27.5, gloo; rank 8 of 16, 8 here")
    found = ranks.ranks(4, started)
    assert found.state == "fail"
    assert "--nproc-per-node 4" in found.mend
    assert ranks.ranks(0, started).state == "ok"


@pytest.mark.parametrize(
    ("missing", "num_devices", "state"), [("nccl", 1, "warn"), ("nccl", 0, "ok"), ("gloo", 0, "warn")]
)
def test_backends_that_are_missing(monkeypatch, missing, num_devices, state):
    without(monkeypatch, missing)
    assert ranks.ranks(num_devices, {}).state == state


def test_a_pytorch_without_distributed(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_available", lambda: False)
    assert ranks.ranks(0, {}).state == "warn"
