"""Check of environment variables that change how training goes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from trunkline.plan.checks import Finding
from trunkline.utils.host_limits import usable_processors


class _VariableRule(NamedTuple):
    """When the value of a variable matters, and what it does then.

    Attributes:
        names: variables that mean the same, separated by spaces.
        matters: takes the value in lower case.
        effect: on training.
        fix: None where the value is as it should be.
        devices: CUDA devices from which on it matters.
    """

    names: str
    matters: Callable[[str], bool]
    effect: str
    fix: str | None
    devices: int = 0


def _on(value: str) -> bool:
    return value not in ("", "0", "false", "no", "off", "n")


def _expandable(value: str) -> bool:
    return "expandable_segments:true" in value.replace(" ", "")


_DEBUG = "Unset it; it is for finding errors."
_ALLOCATOR = "PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF"
_RULES = (
    _VariableRule(_ALLOCATOR, _expandable, "device memory grows without fragments", None, 1),
    _VariableRule(_ALLOCATOR, lambda value: bool(value) and not _expandable(value),
        "without expandable segments device memory may be fragmented into pieces too small for a chunk",
        "Add expandable_segments:True.", 1),
    _VariableRule("PYTORCH_NO_CUDA_MEMORY_CACHING", _on, "every tensor calls the driver, which waits for the device",
        _DEBUG, 1),
    _VariableRule("CUDA_LAUNCH_BLOCKING", _on, "the host waits for every kernel, and no move runs beside compute",
        _DEBUG, 1),
    _VariableRule("TORCH_CUDA_SANITIZER", _on, "every memory access is checked, many times slower", _DEBUG, 1),
    _VariableRule("CUDA_VISIBLE_DEVICES", lambda value: value in ("", "-1"), "hides every CUDA device",
        "Unset it, or name devices, such as 0,1."),
    _VariableRule("OMP_NUM_THREADS MKL_NUM_THREADS", lambda value: value == "1" and usable_processors() >= 4,
        "one thread for all that this processor computes",
        "Unset it, or set it to the processors of each process: torchrun sets 1 where it is unset."),
    _VariableRule("ATEN_CPU_CAPABILITY", lambda value: value in ("default", "avx2"),
        "keeps PyTorch from some instructions of the processor", "Unset it."),
    _VariableRule("ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA", lambda value: value not in ("", "default", "all"),
        "keeps matrix products from some instructions of the processor, perhaps from bfloat16's", "Unset it."),
    _VariableRule("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", _on,
        "matrix products of float32 are rounded to 10 bits, 1e-3 of their value",
        "Unset it, unless float32 is meant to be that coarse.", 1),
    _VariableRule("NCCL_P2P_DISABLE", _on, "ranks exchange through host memory instead of NVLink",
        "Unset it, unless training hangs without.", 2),
    _VariableRule("NCCL_SHM_DISABLE", _on, "ranks that cannot reach each other's memory exchange through the network",
        "Unset it; /dev/shm of some GiB is the better fix.", 2),
    _VariableRule("NCCL_IB_DISABLE", _on, "machines exchange over TCP instead of InfiniBand",
        "Unset it where there is InfiniBand.", 1),
    _VariableRule("TORCH_DISTRIBUTED_DEBUG", lambda value: value == "detail",
        "every collective waits until all ranks have been compared", "Unset it; it is for finding hangs."),
    _VariableRule("TORCH_COMPILE_DISABLE TORCHDYNAMO_DISABLE", _on, "compile=True has no effect", "Unset it."),
    _VariableRule("HF_HUB_OFFLINE TRANSFORMERS_OFFLINE", _on, "models and tokenizers come from folders and caches only",
        None),
)  # fmt: skip


def check_variables(num_gpus: int) -> list[Finding]:
    """Return a finding for each variable whose value matters; one that says so where none does.

    Args:
        num_gpus: CUDA devices of this machine.
    """
    findings = [
        Finding("environment", "warn" if rule.fix else "ok", f"{name}={os.environ[name]}: {rule.effect}", rule.fix)
        for rule in _RULES
        for name in rule.names.split()
        if name in os.environ and num_gpus >= rule.devices and rule.matters(os.environ[name].strip().lower())
    ]
    return findings or [Finding("environment", "ok", "nothing is set that changes how training goes")]
