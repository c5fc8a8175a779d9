"""Device names."""

from __future__ import annotations

import torch


def parse_device(name: str) -> torch.device:
    """Return the device of a name: `auto` (CUDA if there is one), `cpu`, `cuda` or `cuda:N`.

    Raises:
        ValueError: the name is none of these, or there is no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r}: give auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r}: give auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(
            f"device={name!r} is not there: PyTorch {torch.__version__} sees {count} CUDA devices. Set device to auto "
            "or cpu, or install a PyTorch built for your CUDA."
        )
    return device
