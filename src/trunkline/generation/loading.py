"""Loading of a model and its tokenizer from a local folder, for inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trunkline.data.tokenizers import Encoder, load_encoder
from trunkline.utils.devices import parse_device
from trunkline.utils.error_text import first_line

DTYPES = {"auto": "auto", "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_model(folder: str | Path, *, dtype: str = "auto", device: str = "auto") -> tuple[Any, Encoder]:
    """Load a causal language model, in evaluation mode, and its tokenizer.

    Args:
        folder: written by `save_pretrained` or `trunkline train`, with a tokenizer; nothing is downloaded.
        dtype: `auto` for the dtype of the weights, `bfloat16`, `float16` or `float32`.
        device: `auto` for CUDA where there is one, `cpu`, `cuda` or `cuda:N`.

    Returns:
        The model on its device, not streamed, and the encoder of its tokenizer.

    Raises:
        ValueError: a setting is unknown, the device does not exist, or the folder holds no causal language model or no
            tokenizer.
    """
    from transformers import AutoModelForCausalLM

    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}.")
    place = parse_device(device)
    path = Path(folder).expanduser()
    if not (path / "config.json").is_file():
        if (path / "model" / "config.json").is_file():
            raise ValueError(f"'{path}' is the output folder of a run: give its model, '{path / 'model'}'.")
        raise ValueError(
            f"'{path}' is no model folder: it must hold config.json, weights and a tokenizer, as save_pretrained and "
            "trunkline train write them; names on the Hub are not downloaded."
        )
    encoder = load_encoder(str(path))
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"'{path}' holds no causal language model that transformers can load ({first_line(error)})."
        ) from error
    return model.to(place).eval(), encoder
