"""Checks of devices: GPU or CPU, its link to host memory, and backends for several ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trunkline.attention import kernels
from trunkline.plan import measurements
from trunkline.plan.checks import Check, Finding, attempt, check_software, judge
from trunkline.plan.checks.check_attention import DTYPES, check_attention
from trunkline.units import format_bytes
from trunkline.utils.host_limits import usable_processors

DRIVER = Path("/proc/driver/nvidia/version")
_SLOW = 10e9  # bytes a second; PCIe 3 with 16 lanes makes 12, 4 makes 25, 5 makes 54
_SHARED = 0.6  # of the speed alone; 0.7 on an A100 whose link is well, 0.4 in the bad case


def devices() -> list[torch.device]:
    """Return the CUDA devices that PyTorch can use, or the CPU where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `check_cpu` says why there is none
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]


def check_all(devices: Sequence[torch.device]) -> list[Finding]:
    """Check every device and its link, the attention kernels of the first one, and Triton where there is a GPU.

    Args:
        devices: all CUDA devices, or the CPU alone; see `devices`.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    checks: dict[str, Check] = {f"device {gpu}": partial(check_gpu, gpu) for gpu in gpus} or {"device cpu": check_cpu}
    checks |= {f"attention {dtype}": partial(check_attention, dtype, devices[0]) for dtype in DTYPES}
    checks |= {f"link {gpu}" if gpus else "link": partial(check_link, gpu) for gpu in devices}
    if gpus:
        checks["triton"] = check_software.check_triton
    return [finding for name, check in checks.items() for finding in attempt(name, check)]


def check_gpu(device: torch.device) -> Finding:
    """Check a CUDA device.

    The finding fails if the device does not compute. It warns below NVIDIA's compute capability 8.0, or if less than
    90% of the memory is free.
    """
    name, properties = f"device {device}", torch.cuda.get_device_properties(device)
    text = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
    try:
        total = float(torch.ones(8, device=device).sum())
        free, memory = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        fix = (
            f"Stop other programs on the device (nvidia-smi), or install a PyTorch that is built for it: this one "
            f"({torch.__version__}) is for {', '.join(torch.cuda.get_arch_list()) or 'no device'}."
        )
        return Finding(name, "fail", f"{text}: {str(error).strip().splitlines()[0]}", fix)
    assert total == 8
    text = f"{text}, {format_bytes(free)} of {format_bytes(memory)} free"
    if torch.version.hip is None and (properties.major, properties.minor) < (8, 0):
        fix = "Train in float32 or float16 with short chunks, or use a device of compute capability 8.0 or newer."
        return judge(name, f"{text}: too old for flash attention and bfloat16", fix)
    busy = "End the other programs that nvidia-smi lists, or count on the free memory."
    return judge(name, text, busy if free < 0.9 * memory else None)


def check_cpu() -> Finding:
    """Report the CPU where it is the device: its threads, and its instructions for half types.

    The finding warns if there is a reason why PyTorch uses no GPU, else if there are more threads than usable
    processors.
    """
    usable, threads = usable_processors(), torch.get_num_threads()
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # not in every PyTorch
    half = [name for name, there in capabilities.items() if there is True and name.endswith(("bf16", "fp16"))]
    native = "bf16 instructions" if kernels.processor_has(torch.bfloat16) else "no bf16 instructions"
    text = (
        f"{capabilities.get('cpu_name', 'CPU')}, {threads} thread{'s' if threads > 1 else ''} on {usable} usable, "
        f"{torch.backends.cpu.get_cpu_capability()}, {native}"
    ) + (f" ({', '.join(half)})" if half else "")
    unused = _why_no_gpu()
    if unused is not None:
        return judge("device cpu", f"{text}. {unused[0]}", unused[1])
    fix = f"Set OMP_NUM_THREADS={usable}: threads that share a processor wait for each other."
    return judge("device cpu", text, fix if threads > usable else None)


def _why_no_gpu() -> tuple[str, str] | None:
    """Return why PyTorch does not use a GPU, and the fix; None for a CPU build without an NVIDIA driver."""
    if torch.version.cuda is None and torch.version.hip is None:
        fix = "Install a PyTorch that is built for CUDA: https://pytorch.org/get-started/locally"
        return ("There is an NVIDIA GPU, and this PyTorch is built for CPUs only", fix) if DRIVER.is_file() else None
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU", "Unset CUDA_VISIBLE_DEVICES."
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.is_available()
    reason = str(said[0].message).split(". ")[0].strip() if said else "no driver or no device"
    built = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return (
        f"This PyTorch is built for {built} and finds no GPU: {reason}",
        "Install or update the NVIDIA driver (nvidia-smi shows it); in Docker pass --gpus all. Without a GPU, a "
        "PyTorch built for CPUs is enough.",
    )


def check_link(device: torch.device) -> Finding:
    """Measure how fast chunks move between host memory and a device; a CPU has no link, which is `ok`.

    The finding warns below 10 GB/s, or if a direction falls below 60% of its speed while both are busy.
    """
    if device.type != "cuda":
        return Finding("link", "ok", "host memory is the device: chunks cross no link")
    rates = measurements.link(device)
    into, out, both_into, both_out = rates.values()
    name, text = f"link {device}", "in {:.1f} GB/s, out {:.1f} GB/s; at once {:.1f} and {:.1f}"
    text = text.format(*(rate / 1e9 for rate in rates.values()))
    fix = "Run on the processors near the device (numactl), or hide the moves by a larger chunk_size."
    if min(into, out) < _SLOW:
        return judge(name, f"{text}: slower than PCIe 3 with 16 lanes (nvidia-smi -q shows lanes and generation)", fix)
    if min(both_into / into, both_out / out) < _SHARED:
        return judge(name, f"{text}: the directions take speed from each other", fix)
    return judge(name, text, None)


def check_ranks(num_gpus: int) -> Finding:
    """Check that several processes could train together here, and report how many torchrun has started.

    The finding fails if torchrun has started more processes here than there are GPUs. It warns if PyTorch has no
    torch.distributed, no gloo, or with GPUs no NCCL.

    Args:
        num_gpus: CUDA devices of this machine.
    """
    if not dist.is_available():
        fix = "For several processes install a PyTorch built with it."
        return judge("ranks", "this PyTorch is built without torch.distributed", fix)
    nccl, gloo = dist.is_nccl_available(), dist.is_gloo_available()
    has = ([f"NCCL {nccl_version()}"] if nccl else []) + (["gloo"] if gloo else [])
    world = os.environ.get("WORLD_SIZE")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world or "1"))
    started = f"rank {os.environ.get('RANK', '?')} of {world}, {local} here" if world else "one process, not torchrun"
    text = f"{', '.join(has) or 'no backend'}; {started}"
    if num_gpus and local > num_gpus:
        fix = f"torchrun --nproc-per-node {num_gpus}: each process needs a device of its own."
        return Finding("ranks", "fail", f"{text}, on {num_gpus} devices", fix)
    missing = "NCCL" if num_gpus and not nccl else "gloo" if not gloo else None
    fix = f"{missing} is missing: for several processes install a PyTorch built with it."
    return judge("ranks", text, fix if missing else None)


def nccl_version() -> str:
    """Return the version of NCCL that this PyTorch was built with, such as 2.27.5."""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
