"""What an operator costs beyond its arithmetic: on the device, and on the host that issues it.

The host's part is that of the real engine, the Python of layers and sweeps included: what a step of a tiny model takes
beyond what a rehearsal says that the device needs for it.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from trunkline.api import stream
from trunkline.plan.estimate import estimate
from trunkline.plan.hardware import Hardware
from trunkline.plan.measure import timed

_ELEMENTS = 256  # of a tensor that takes no time
_LAUNCHES = 200
_REPETITIONS = 15
_CHUNK, _CHUNKS = 16, 8
_ENOUGH = 0.01  # share of a step's time that a rehearsal may be off
_LEAST = 1e-9  # seconds: a profile's are positive


def kernel_seconds(device: torch.device) -> float:
    """The least time of an operator on a device, from the first to the next: of a tiny sum of two tensors.

    It is the least of several repetitions, since whatever else the machine does only adds to it.
    """
    x = torch.zeros(_ELEMENTS, device=device)
    y = torch.zeros(_ELEMENTS, device=device)
    once = _on_cuda if device.type == "cuda" else _on_cpu
    once(x, y)
    return max(min(once(x, y) for _ in range(_REPETITIONS)), _LEAST)


def _on_cpu(x: torch.Tensor, y: torch.Tensor) -> float:
    start = time.perf_counter()
    for _ in range(_LAUNCHES):
        x.add_(y)
    return (time.perf_counter() - start) / _LAUNCHES


def _on_cuda(x: torch.Tensor, y: torch.Tensor) -> float:
    """Back to back: the device is held up until all have been issued, since the host is slower than it."""
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    start, end = events
    a = torch.ones(4_096, 4_096, device=x.device)
    products = 4
    while True:
        for _ in range(products):
            torch.mm(a, a)
        start.record()
        for _ in range(_LAUNCHES):
            x.add_(y)
        held_up = not start.query()
        end.record()
        end.synchronize()
        if held_up:
            return float(start.elapsed_time(end)) / 1e3 / _LAUNCHES
        products *= 2


def host_seconds(hardware: Hardware, device: torch.device) -> float:
    """What the host takes to issue an operator, so that a rehearsal of a tiny step takes as long as the step does.

    Where the host waits for each operator (a CPU) that is what remains of the step's time, over its operators; where it
    runs ahead, as much as makes it the slower of the two.

    Args:
        hardware: the profile so far; its own `host_seconds` does not count.
        device: which it is of.

    Returns:
        Seconds; never negative, and next to nothing where the rehearsal without any is slower than the step.
    """
    model = _model(torch.float32 if device.type == "cpu" else torch.bfloat16)
    rehearsed, operators = _rehearsed(model, hardware, 0.0)
    took = _step_seconds(model, device)
    found = 0.0
    # No rehearsal grows by more than its operators' share, so that this never goes too far, and each round is nearer.
    for _ in range(4):
        left = took - rehearsed
        if left <= _ENOUGH * took:
            break
        found += left / operators
        rehearsed, _ = _rehearsed(model, hardware, found)
    return max(found, _LEAST)


def _model(dtype: torch.dtype) -> PreTrainedModel:
    """A llama whose arithmetic is nothing beside its operators."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=_CHUNK * _CHUNKS,
    )  # fmt: skip
    model: PreTrainedModel = LlamaForCausalLM(config).to(dtype).train()
    return model


def _rehearsed(model: PreTrainedModel, hardware: Hardware, host: float) -> tuple[float, int]:
    """Seconds and operators of a step."""
    profile = dataclasses.replace(hardware, host_seconds=host)
    step = estimate(model, _CHUNK * _CHUNKS, hardware=profile, chunk_size=_CHUNK).step
    assert step is not None
    return step.seconds, step.operators


def _step_seconds(model: PreTrainedModel, device: torch.device) -> float:
    streamed = stream(model.to(device), chunk_size=_CHUNK)
    ids = torch.arange(_CHUNK * _CHUNKS, device=device)[None] % streamed.config.vocab_size
    return timed(lambda: streamed(input_ids=ids, labels=ids).loss.backward(), device)
