"""Check of environment variables that change how training goes."""

from __future__ import annotations

import os
from collections.abc import Callable

from trunkline.plan.checks import Finding
from trunkline.utils.host_limits import usable_processors


def _on(value: str) -> bool:
    return value not in ("", "0", "false", "no", "off", "n")


def _expandable(value: str) -> bool:
    return "expandable_segments:true" in value.replace(" ", "")


_DEBUG = "Unset it; it is for finding errors."
_ALLOCATOR = "PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF"
# Variables that mean the same; a test whether the value (in lower case) matters; from how many GPUs on it does; its
# effect; the fix, or None where the value is as it should be.
_RULES: tuple[tuple[str, Callable[[str], bool], int, str, str | None], ...] = (
    (_ALLOCATOR, _expandable, 1, "device memory grows without fragments", None),
    (_ALLOCATOR, lambda value: bool(value) and not _expandable(value), 1,
     "without expandable segments device memory may be fragmented into pieces too small for a chunk",
     "Add expandable_segments:True."),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", _on, 1, "every tensor calls the driver, which waits for the device", _DEBUG),
    ("CUDA_LAUNCH_BLOCKING", _on, 1, "the host waits for every kernel, and no move runs beside compute", _DEBUG),
    ("TORCH_CUDA_SANITIZER", _on, 1, "every memory access is checked, many times slower", _DEBUG),
    ("CUDA_VISIBLE_DEVICES", lambda value: value in ("", "-1"), 0, "hides every CUDA device",
     "Unset it, or name devices, such as 0,1."),
    ("OMP_NUM_THREADS MKL_NUM_THREADS", lambda value: value == "1" and usable_processors() >= 4, 0,
     "one thread for all that this processor computes",
     "Unset it, or set it to the processors of each process: torchrun sets 1 where it is unset."),
    ("ATEN_CPU_CAPABILITY", lambda value: value in ("default", "avx2"), 0,
     "keeps PyTorch from some instructions of the processor", "Unset it."),
    ("ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA", lambda value: value not in ("", "default", "all"), 0,
     "keeps matrix products from some instructions of the processor, perhaps from bfloat16's", "Unset it."),
    ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", _on, 1, "float32 matrix products are rounded to 10 bits, 1e-3 of their value",
     "Unset it, unless float32 is meant to be that coarse."),
    ("NCCL_P2P_DISABLE", _on, 2, "ranks exchange through host memory instead of NVLink",
     "Unset it, unless training hangs without."),
    ("NCCL_SHM_DISABLE", _on, 2, "ranks that cannot reach each other's memory exchange through the network",
     "Unset it; /dev/shm of some GiB is the better fix."),
    ("NCCL_IB_DISABLE", _on, 1, "machines exchange over TCP instead of InfiniBand",
     "Unset it where there is InfiniBand."),
    ("TORCH_DISTRIBUTED_DEBUG", lambda value: value == "detail", 0,
     "every collective waits until all ranks have been compared", "Unset it; it is for finding hangs."),
    ("TORCH_COMPILE_DISABLE TORCHDYNAMO_DISABLE", _on, 0, "compile=True has no effect", "Unset it."),
    ("HF_HUB_OFFLINE TRANSFORMERS_OFFLINE", _on, 0, "models and tokenizers come from folders and caches only", None),
)  # fmt: skip


def check_variables(num_gpus: int) -> list[Finding]:
    """Return a finding for each variable whose value changes training: a warning where there is a fix.

    If there is none, return one `ok` finding that says so.

    Args:
        num_gpus: CUDA devices of this machine.
    """
    findings = [
        Finding("environment", "warn" if fix else "ok", f"{name}={os.environ[name]}: {effect}", fix)
        for names, matters, gpus, effect, fix in _RULES
        for name in names.split()
        if name in os.environ and num_gpus >= gpus and matters(os.environ[name].strip().lower())
    ]
    return findings or [Finding("environment", "ok", "nothing is set that changes how training goes")]
