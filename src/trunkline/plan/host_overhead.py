"""Host time of an operator, the Python of layers and sweeps included.

A tiny model's step takes longer than the estimate of its device time; the difference, over its operators, is the
host's.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from trunkline.api import stream
from trunkline.plan.estimate import estimate
from trunkline.plan.hardware import Hardware
from trunkline.plan.measurements import timed

_CHUNK, _CHUNKS = 16, 8
_ENOUGH = 0.01  # share of a step's time that an estimate may be off
_LEAST = 1e-9  # seconds: a profile's are positive


def host_seconds(hardware: Hardware, device: torch.device) -> float:
    """Fit the host's seconds per operator, so that the estimate of a tiny step equals its measured time.

    On a CPU the host waits for each operator, so that its time adds to the operators' time. On a GPU the host runs
    ahead, so that only the slower of the two counts. The tiny step is run and timed on the device.

    Args:
        hardware: the profile so far; its own `host_seconds` does not count.
        device: device of the profile.

    Returns:
        Seconds of the host for one operator, never less than 1e-9: also where the device alone is slower than the step.
    """
    model = tiny_model(torch.float32 if device.type == "cpu" else torch.bfloat16)
    estimated, operators = estimated_step(model, hardware, 0.0)
    took = _step_seconds(model, device)
    host = 0.0
    # An estimate grows by no more than its operators' share, so that this never goes too far, and each round is nearer.
    for _ in range(4):
        left = took - estimated
        if left <= _ENOUGH * took:
            break
        host += left / operators
        estimated, _ = estimated_step(model, hardware, host)
    return max(host, _LEAST)


def tiny_model(dtype: torch.dtype) -> PreTrainedModel:
    """Return a llama with random weights, so small that issuing operators takes nearly all its time."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=_CHUNK * _CHUNKS,
    )  # fmt: skip
    model: PreTrainedModel = LlamaForCausalLM(config).to(dtype).train()
    return model


def estimated_step(model: PreTrainedModel, hardware: Hardware, host: float) -> tuple[float, int]:
    """Return the estimated seconds of a tiny model's step and its operators, with `host` seconds for each operator."""
    profile = hardware.model_copy(update={"host_seconds": host})
    step = estimate(model, _CHUNK * _CHUNKS, hardware=profile, chunk_size=_CHUNK).step
    assert step is not None
    return step.seconds, step.operators


def _step_seconds(model: PreTrainedModel, device: torch.device) -> float:
    streamed = stream(model.to(device), chunk_size=_CHUNK)
    ids = torch.arange(_CHUNK * _CHUNKS, device=device)[None] % streamed.config.vocab_size
    return timed(lambda: streamed(input_ids=ids, labels=ids).loss.backward(), device)
