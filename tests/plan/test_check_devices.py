"""Checks of devices, attention kernels, links and ranks: on this CPU, and on made-up GPUs."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.nn import attention as torch_attention

from trunkline.attention import kernels
from trunkline.plan import measurements
from trunkline.plan.checks import check_attention, check_devices

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def processor(monkeypatch, tmp_path):
    """A CPU of four threads, for a PyTorch without CUDA."""
    capabilities = {"cpu_name": "Example 9000", "avx2": True, "avx512_bf16": True, "amx_bf16": True, "amx_fp16": False}
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(check_devices, "usable_processors", lambda: 4)
    monkeypatch.setattr(check_devices, "DRIVER", tmp_path / "driver")


def has_instructions(monkeypatch, bf16: bool, fp16: bool) -> None:
    answers = {torch.bfloat16: bf16, torch.float16: fp16}
    monkeypatch.setattr(kernels, "processor_has", answers.__getitem__)


def test_processor(processor, monkeypatch):
    has_instructions(monkeypatch, True, False)
    finding = check_devices.check_cpu()
    assert finding.state == "ok"
    capability = torch.backends.cpu.get_cpu_capability()
    assert finding.found == (
        f"Example 9000, 4 threads on 4 usable, {capability}, bf16 instructions (avx512_bf16, amx_bf16)"
    )
    has_instructions(monkeypatch, False, False)
    assert "no bf16 instructions" in check_devices.check_cpu().found


def test_more_threads_than_processors(processor, monkeypatch):
    monkeypatch.setattr(check_devices, "usable_processors", lambda: 2)
    finding = check_devices.check_cpu()
    assert finding.state == "warn"
    assert "OMP_NUM_THREADS=2" in finding.fix


def test_a_gpu_that_this_pytorch_is_not_built_for(processor, tmp_path):
    (tmp_path / "driver").touch()
    finding = check_devices.check_cpu()
    assert finding.state == "warn"
    assert "built for CPUs only" in finding.found


def test_a_gpu_that_is_not_found(processor, monkeypatch):
    def available():
        warnings.warn("The NVIDIA driver on your system is too old (found version 11040). Please update", stacklevel=1)
        return False

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", available)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finding = check_devices.check_cpu()
    assert finding.state == "warn"
    assert "built for CUDA 13.0 and finds no GPU: The NVIDIA driver on your system is too old" in finding.found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    finding = check_devices.check_cpu()
    assert (finding.state, finding.fix) == ("warn", "Unset CUDA_VISIBLE_DEVICES.")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_devices.devices() == [CPU]


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
    finding = check_devices.check_gpu(GPU)
    assert (finding.name, finding.state) == ("device cuda:0", "ok")
    assert finding.found == "Made Up, compute capability 9.0, 138.0 GiB of 140.0 GiB free"


def test_gpu_that_others_use(monkeypatch):
    made_up(monkeypatch, free=100 * 2**30)
    finding = check_devices.check_gpu(GPU)
    assert finding.state == "warn"
    assert "nvidia-smi" in finding.fix


def test_gpu_that_is_too_old(monkeypatch):
    made_up(monkeypatch, capability=(7, 5))
    finding = check_devices.check_gpu(GPU)
    assert finding.state == "warn"
    assert "too old" in finding.found


def test_gpu_that_does_not_compute(monkeypatch):
    made_up(monkeypatch, capability=(12, 0), error="CUDA error: no kernel image is available\nSet CUDA_LAUNCH_BLOCKING")
    finding = check_devices.check_gpu(GPU)
    assert finding.state == "fail"
    assert finding.found.endswith("12.0: CUDA error: no kernel image is available")
    assert "sm_80, sm_90" in finding.fix


@pytest.mark.parametrize("short", ["fp32", "bf16", "fp16"])
def test_attention_on_a_cpu(short, monkeypatch):
    has_instructions(monkeypatch, False, False)
    finding = check_attention.check_attention(short, CPU)
    assert finding.found.startswith("cpu_flash (not cuda_flash: it runs on CUDA tensors only)")
    assert finding.state == ("warn" if short == "bf16" else "ok")
    assert ("in fp32, since this processor has no" in finding.found) == (short != "fp32")
    has_instructions(monkeypatch, True, True)
    finding = check_attention.check_attention(short, CPU)
    assert finding.state == "ok"
    assert "in fp32" not in finding.found


class Wrong(kernels.CpuFlashKernel):
    """Forgets the causal mask."""

    def forward(self, q, k, v, *, causal, scale):
        return super().forward(q, k, v, causal=False, scale=scale)


@pytest.mark.parametrize(("short", "dtype"), check_attention.DTYPES.items())
@pytest.mark.parametrize("head_dim", check_attention.HEAD_DIMS)
def test_a_wrong_kernel_is_told_from_rounding(short, dtype, head_dim):
    allowed = check_attention.rounding(dtype) * 8
    for kernel in (kernels.CpuFlashKernel(), kernels.MathKernel()):
        assert check_attention.kernel_error(kernel, CPU, dtype, head_dim) < allowed / 4
    assert check_attention.kernel_error(Wrong(), CPU, dtype, head_dim) > 4 * allowed


def test_a_kernel_that_is_wrong(monkeypatch):
    monkeypatch.setattr(kernels, "resolve", lambda *_: Wrong())
    finding = check_attention.check_attention("fp32", CPU)
    assert finding.state == "fail"
    assert finding.found.startswith("cpu_flash is wrong by ")


def test_products_that_are_meant_to_be_coarse(monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert check_attention.rounding(torch.float32) == 2**-7
    assert check_attention.rounding(torch.float16) == 2**-10


@pytest.fixture
def computes(monkeypatch):
    """Kernels of a GPU are right, without one; which are chosen is up to the real rules."""
    monkeypatch.setattr(check_attention, "kernel_error", lambda *_: 0.0)
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
    monkeypatch.setattr(kernels, "_is_installed", lambda package: installed)
    monkeypatch.setattr(torch_attention, "activate_flash_attention_impl", lambda name: None)
    monkeypatch.setattr(torch_attention, "restore_flash_attention_impl", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finding = check_attention.check_attention(short, GPU)
    assert finding.state == state
    assert text in finding.found


def test_head_dims_that_get_other_kernels_are_told_apart(monkeypatch, computes):
    made_up(monkeypatch)
    monkeypatch.setattr(check_attention, "HEAD_DIMS", (64, 256, 512))
    finding = check_attention.check_attention("bf16", GPU)
    assert "head dims 64, 256: cuda_flash" in finding.found
    assert (
        "head dims 512: math (not cpu_flash: it runs on CPU tensors only; not cuda_flash: it takes head"
        in finding.found
    )
    assert finding.state == "warn"
    assert "several times slower" in finding.fix


def test_a_cpu_has_no_link():
    assert check_devices.check_link(CPU).found == "host memory is the device: chunks cross no link"


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
def test_a_slow_link_is_a_warning(speeds, state, monkeypatch):
    names = ("to_device", "to_host", "both_to_device", "both_to_host")
    monkeypatch.setattr(
        measurements, "link", lambda _: {n: speed * 1e9 for n, speed in zip(names, speeds, strict=True)}
    )
    finding = check_devices.check_link(GPU)
    assert finding.state == state
    fetch, stash, fetch_both, stash_both = speeds
    assert f"in {fetch:.1f} GB/s, out {stash:.1f} GB/s; at once {fetch_both:.1f} and {stash_both:.1f}" in finding.found


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
    monkeypatch.setattr(measurements, "Stream", clock.stream)
    monkeypatch.setattr(measurements, "Event", clock.event)
    rates = measurements.link(GPU, nbytes=1000, copies=100)
    assert (rates["to_device"], rates["to_host"]) == pytest.approx((1e9, 0.5e9))
    assert rates["both_to_device"] == pytest.approx(0.5e9, rel=0.02)  # the very first copy is alone
    assert rates["both_to_host"] == pytest.approx(0.25e9, rel=0.02)


@pytest.fixture
def backends(monkeypatch):
    """Return a function that says which backends are missing, and what torchrun has set."""

    def set_up(*missing: str, **environ: str) -> None:
        for name in ("nccl", "gloo"):
            monkeypatch.setattr(f"torch.distributed.is_{name}_available", lambda name=name: name not in missing)
        monkeypatch.setattr(check_devices, "nccl_version", lambda: "2.27.5")
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)

    return set_up


def test_ranks(backends):
    backends()
    assert check_devices.check_ranks(8).found == "NCCL 2.27.5, gloo; one process, not torchrun"
    backends(WORLD_SIZE="16", LOCAL_WORLD_SIZE="8", RANK="8")
    finding = check_devices.check_ranks(8)
    assert (finding.state, finding.found) == ("ok", "NCCL 2.27.5, gloo; rank 8 of 16, 8 here")
    finding = check_devices.check_ranks(4)
    assert finding.state == "fail"
    assert "--nproc-per-node 4" in finding.fix
    assert check_devices.check_ranks(0).state == "ok"


@pytest.mark.parametrize(
    ("missing", "num_gpus", "state"), [("nccl", 1, "warn"), ("nccl", 0, "ok"), ("gloo", 0, "warn")]
)
def test_missing_backends(backends, missing, num_gpus, state):
    backends(missing)
    assert check_devices.check_ranks(num_gpus).state == state


def test_a_pytorch_without_distributed(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_available", lambda: False)
    assert check_devices.check_ranks(0).state == "warn"
