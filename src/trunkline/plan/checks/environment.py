"""Check of environment variables: those that are set to something that changes how training goes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trunkline.plan.checks.finding import Finding, State

NAME = "environment"


@dataclass(frozen=True, slots=True)
class Machine:
    """What it depends on whether a variable matters.

    Attributes:
        processors: that this process can keep busy.
        devices: CUDA devices.
    """

    processors: int
    devices: int


@dataclass(frozen=True, slots=True)
class _Rule:
    """When a variable matters, and what it does then.

    Attributes:
        variables: names that mean the same.
        applies: whether this value matters on this machine.
        effect: what it does.
        mend: what to do; None where it is as it should be.
    """

    variables: tuple[str, ...]
    applies: Callable[[str, Machine], bool]
    effect: str
    mend: str | None = None


def _on(value: str, _: Machine) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off", "n")


def _on_with_devices(number: int) -> Callable[[str, Machine], bool]:
    return lambda value, machine: machine.devices >= number and _on(value, machine)


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def _expandable(value: str) -> bool:
    return "expandable_segments:true" in value.replace(" ", "").lower()


_RULES = (
    _Rule(
        _ALLOCATOR,
        lambda value, machine: machine.devices > 0 and _expandable(value),
        "device memory grows without being torn to pieces",
    ),
    _Rule(
        _ALLOCATOR,
        lambda value, machine: machine.devices > 0 and bool(value) and not _expandable(value),
        "without expandable segments device memory may be torn to pieces too small for a chunk",
        "Add expandable_segments:True.",
    ),
    _Rule(
        ("PYTORCH_NO_CUDA_MEMORY_CACHING",),
        _on_with_devices(1),
        "every tensor is asked of the driver, which waits for the device",
        "Unset it; it is for finding errors.",
    ),
    _Rule(
        ("CUDA_LAUNCH_BLOCKING",),
        _on_with_devices(1),
        "every kernel is waited for, so that no move goes on beside compute",
        "Unset it; it is for finding errors.",
    ),
    _Rule(
        ("TORCH_CUDA_SANITIZER",),
        _on_with_devices(1),
        "every access to memory is checked, many times slower",
        "Unset it; it is for finding errors.",
    ),
    _Rule(
        ("CUDA_VISIBLE_DEVICES",),
        lambda value, _: value.strip() in ("", "-1"),
        "hides every CUDA device",
        "Unset it, or name devices, such as 0,1.",
    ),
    _Rule(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
        lambda value, machine: value.strip() == "1" and machine.processors >= 4,
        "one thread for all that this processor computes",
        "Unset it, or set it to the processors of each process: torchrun sets 1 where it is unset.",
    ),
    _Rule(
        ("ATEN_CPU_CAPABILITY",),
        lambda value, _: value.strip().lower() in ("default", "avx2"),
        "keeps from using all instructions of the processor",
        "Unset it.",
    ),
    _Rule(
        ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
        lambda value, _: value.strip().lower() not in ("", "default", "all"),
        "keeps matrix products from using all instructions of the processor, those of bfloat16 perhaps",
        "Unset it.",
    ),
    _Rule(
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",),
        _on_with_devices(1),
        "matrix products of float32 are rounded to 10 bits, 1e-3 of their value",
        "Unset it, unless float32 is meant to be that coarse.",
    ),
    _Rule(
        ("NCCL_P2P_DISABLE",),
        _on_with_devices(2),
        "ranks exchange through host memory instead of NVLink",
        "Unset it, unless training hangs without.",
    ),
    _Rule(
        ("NCCL_SHM_DISABLE",),
        _on_with_devices(2),
        "ranks that cannot reach each other's memory exchange through the network",
        "Unset it; /dev/shm of some GiB is the better mend.",
    ),
    _Rule(
        ("NCCL_IB_DISABLE",),
        _on_with_devices(1),
        "machines exchange over TCP instead of InfiniBand",
        "Unset it where there is InfiniBand.",
    ),
    _Rule(
        ("TORCH_DISTRIBUTED_DEBUG",),
        lambda value, _: value.strip().upper() == "DETAIL",
        "every collective waits until all ranks have been compared",
        "Unset it; it is for finding hangs.",
    ),
    _Rule(
        ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"),
        _on,
        "compile=True has no effect",
        "Unset it.",
    ),
    _Rule(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), _on, "models and tokenizers come from folders and caches only"),
)


def variables(machine: Machine, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """A finding for each variable that is set to something that matters; one that says so where none is.

    Args:
        machine: on which they matter.
        environ: what is set.
    """
    found = []
    for rule in _RULES:
        state: State = "ok" if rule.mend is None else "warn"
        for name in rule.variables:
            value = environ.get(name)
            if value is not None and rule.applies(value, machine):
                found.append(Finding(NAME, state, f"{name}={value}: {rule.effect}", rule.mend))
    return found or [Finding(NAME, "ok", "nothing is set that changes how training goes")]
