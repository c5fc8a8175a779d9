"""Checks of devices: what computes, how much memory it has, and whether it is used as it could be."""

from __future__ import annotations

import os
import platform
import warnings
from pathlib import Path

import torch

from trunkline.attention import kernels
from trunkline.plan.checks.finding import Finding
from trunkline.units import format_bytes

# Instructions for half types, as Linux calls them on x86 ("flags") and on Arm ("Features").
_HALF = ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "bf16", "sme", "fphp")
_DRIVER = Path("/proc/driver/nvidia/version")


def devices() -> list[torch.device]:
    """The CUDA devices that PyTorch can use, or the CPU where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `processor` says why there is none
        number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", index) for index in range(number)] or [torch.device("cpu")]


def gpu(device: torch.device) -> Finding:
    """A CUDA device: its name, memory and generation, and whether it computes.

    Args:
        device: which.
    """
    name = f"device {device}"
    properties = torch.cuda.get_device_properties(device)
    text = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
    try:
        total = float(torch.ones(8, device=device).sum())
        free, memory = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        mend = (
            f"End what else uses the device (nvidia-smi), or install a PyTorch that is built for it: this one "
            f"({torch.__version__}) is for {', '.join(torch.cuda.get_arch_list()) or 'no device'}."
        )
        return Finding(name, "fail", f"{text}: {reason}", mend)
    assert total == 8
    text = f"{text}, {format_bytes(free)} of {format_bytes(memory)} free"
    if torch.version.hip is None and (properties.major, properties.minor) < (8, 0):
        mend = "Train in float32 or float16 with short chunks, or use a device of compute capability 8.0 or newer."
        return Finding(name, "warn", f"{text}: too old for flash attention and bfloat16", mend)
    if free < 0.9 * memory:
        return Finding(name, "warn", text, "End the other programs that nvidia-smi lists, or count on what is free.")
    return Finding(name, "ok", text)


def processor(usable: int, cpuinfo: Path = Path("/proc/cpuinfo"), driver: Path = _DRIVER) -> Finding:
    """The CPU, where it is the device: its threads and its instructions for half types.

    Args:
        usable: processors that this process can keep busy.
        cpuinfo: the kernel's description of them.
        driver: is there where the driver of a GPU is.
    """
    name, threads = "device cpu", torch.get_num_threads()
    model, flags = _described(cpuinfo)
    half = [flag for flag in _HALF if flag in flags]
    native = "bf16 instructions" if kernels.processor_has(torch.bfloat16) else "no bf16 instructions"
    has = f"{torch.backends.cpu.get_cpu_capability()}, {native}" + (f" ({', '.join(half)})" if half else "")
    text = f"{model}, {threads} {'thread' if threads == 1 else 'threads'} on {usable} usable, {has}"
    idle = _why_no_gpu(driver)
    if idle is not None:
        return Finding(name, "warn", f"{text}. {idle[0]}", idle[1])
    if threads > usable:
        mend = f"Set OMP_NUM_THREADS={usable}: threads that share a processor wait for each other."
        return Finding(name, "warn", text, mend)
    return Finding(name, "ok", text)


def _why_no_gpu(driver: Path) -> tuple[str, str] | None:
    """What keeps PyTorch from a GPU that is there, and the mend; None where nobody would expect one."""
    if torch.version.cuda is None and torch.version.hip is None:
        if not driver.is_file():
            return None
        return (
            "There is an NVIDIA GPU, and this PyTorch is built for CPUs only",
            "Install a PyTorch that is built for CUDA: https://pytorch.org/get-started/locally",
        )
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU", "Unset CUDA_VISIBLE_DEVICES."
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.is_available()
    reason = str(said[0].message).split(". ")[0].strip() if said else "no driver or no device"
    return (
        f"This PyTorch is built for {_built_for()} and finds no GPU: {reason}",
        "Install or update the NVIDIA driver (nvidia-smi shows it); in Docker pass --gpus all. Without a GPU, a "
        "PyTorch built for CPUs is enough.",
    )


def _built_for() -> str:
    return f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"


def _described(cpuinfo: Path) -> tuple[str, set[str]]:
    """The processor's name and the names of its instructions."""
    fields: dict[str, str] = {}
    for line in cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features") or ""
    return fields.get("model name") or platform.processor() or platform.machine(), set(flags.split())
