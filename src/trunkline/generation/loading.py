"""A model and its tokenizer from a local folder, for inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trunkline.data.tokenizers import Encoder, load_encoder

DTYPES = {"auto": "auto", "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_model(folder: str | Path, *, dtype: str = "auto", device: str = "auto") -> tuple[Any, Encoder]:
    """Load a causal language model, in evaluation mode, and its tokenizer.

    Args:
        folder: as `save_pretrained` or `trunkline train` writes it, with a tokenizer; nothing is downloaded.
        dtype: `auto` for that of the weights, `bfloat16`, `float16` or `float32`.
        device: `auto` for CUDA where there is one, `cpu`, `cuda` or `cuda:N`.

    Raises:
        ValueError: a setting is unknown, the device is not there, or the folder holds no such model.
    """
    from transformers import AutoModelForCausalLM

    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}.")
    place = resolved(device)
    path = Path(folder).expanduser()
    if not (path / "config.json").is_file():
        raise ValueError(
            f"'{path}' is no model folder: it must hold config.json, weights and a tokenizer, as save_pretrained and "
            "trunkline train write them; names on the Hub are not downloaded."
        )
    encoder = load_encoder(str(path))
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"'{path}' holds no causal language model that transformers can load ({first}).") from error
    return model.to(place).eval(), encoder


def resolved(device: str) -> torch.device:
    """The device of a name; `auto` is CUDA where there is one.

    Raises:
        ValueError: it is not there.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device={device!r}: give auto, cpu, cuda or cuda:N.") from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={device!r} is not there: PyTorch sees {torch.cuda.device_count()} CUDA devices.")
    return place
