"""Check of torch.distributed: what processes would talk through, and what torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist

from trunkline.plan.checks.finding import Finding


def ranks(num_devices: int, environ: Mapping[str, str] = os.environ) -> Finding:
    """Whether several processes could train together here, and how many are.

    Args:
        num_devices: CUDA devices of this machine.
        environ: where torchrun tells of its processes.
    """
    name = "ranks"
    if not dist.is_available():
        mend = "For several processes install a PyTorch built with torch.distributed."
        return Finding(name, "warn", "this PyTorch is built without torch.distributed", mend)
    nccl, gloo = dist.is_nccl_available(), dist.is_gloo_available()
    has = [f"NCCL {nccl_version()}"] if nccl else []
    has += ["gloo"] if gloo else []
    world = environ.get("WORLD_SIZE")
    local = int(environ.get("LOCAL_WORLD_SIZE", world or "1"))
    started = f"rank {environ.get('RANK', '?')} of {world}, {local} here" if world else "one process, not torchrun"
    text = f"{', '.join(has) or 'no backend'}; {started}"
    if num_devices and local > num_devices:
        mend = f"torchrun --nproc-per-node {num_devices}: each process needs a device of its own."
        return Finding(name, "fail", f"{text}, on {num_devices} devices", mend)
    missing = "NCCL" if num_devices and not nccl else "gloo" if not gloo else None
    if missing is not None:
        mend = f"For several processes install a PyTorch built with {missing}."
        return Finding(name, "warn", f"{text}; {missing} is missing", mend)
    return Finding(name, "ok", text)


def nccl_version() -> str:
    """That which this PyTorch was built with, such as 2.27.5."""
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))
