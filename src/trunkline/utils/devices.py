"""Which device a name means."""

from __future__ import annotations

import torch


def parse_device(name: str) -> torch.device:
    """The device of a name: `auto` for CUDA where there is one, `cpu`, `cuda` or `cuda:N`.

    Raises:
        ValueError: it is none of these, or not there.
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
