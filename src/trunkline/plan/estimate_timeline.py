"""Timelines of estimated steps, for reports: of a streamed step, and of the same step without chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from transformers import PreTrainedModel

from trunkline.plan.estimate import Estimate, estimate
from trunkline.plan.hardware import Hardware, load
from trunkline.plan.meta_model import MetaModel
from trunkline.report.timeline import Phase, PhaseName, Timeline, clipped, thinned, within

MOST_POINTS = 20_000  # of one tier's memory
_UNLIMITED = 2**62  # bytes: more than any logits

Capacity = Mapping[str, int | None]


def timeline_of(found: Estimate, title: str, capacity: Capacity) -> Timeline:
    """Convert an estimate to a timeline.

    Args:
        found: estimate with a time and a timeline: `estimate(..., hardware=..., timeline=True)`.
        title: title for people.
        capacity: bytes of each tier; None where it has no limit. See `capacity_of`.

    Raises:
        ValueError: the estimate has no time, or no timeline.
    """
    step = found.step
    if step is None or not step.memory:
        raise ValueError("this estimate has no timeline: call estimate() with hardware and with timeline=True.")
    memory = {tier: within(steps, step.seconds) for tier, steps in step.memory.items()}
    return Timeline(
        title=title,
        source="estimated",
        seconds=step.seconds,
        phases=[Phase(cast(PhaseName, name), begin, end) for name, begin, end in step.phases],
        memory={tier: thinned(steps, step.seconds, MOST_POINTS) for tier, steps in memory.items()},
        capacity=dict(capacity),
        holders={
            tier: {part: nbytes for part, nbytes in parts.items() if nbytes > 0} for tier, parts in found.memory.items()
        },
        lanes=clipped(step.lanes, step.seconds),
        exposed=dict(step.exposed),
        moved=dict(found.moved),
        model_flops=step.model_flops,
        hardware_flops=step.hardware_flops,
        peak_flops=step.peak_flops,
        tokens=step.tokens,
        devices=step.devices,
    )


def unchunked_timeline(
    model: PreTrainedModel | MetaModel,
    seq_len: int,
    *,
    title: str,
    hardware: Hardware | str,
    capacity: Capacity | None = None,
    **arguments: Any,
) -> Timeline:
    """Estimate a step with gradient checkpointing and without chunks, and return its timeline.

    The whole sequence is one chunk, backward recomputes each layer from its input, and the loss allocates all logits.

    Args:
        model: model, as `estimate` takes it.
        seq_len: tokens of a row.
        title: title for people.
        hardware: profile, or the name of one.
        capacity: bytes of each tier; None takes `capacity_of` the hardware.
        arguments: other arguments of `estimate`, such as batch_size, documents, parallel_dims, sharding_spec and
            optimizer; no settings of chunks and budgets.

    Raises:
        ValueError: as `estimate` does.
    """
    profile = load(hardware) if isinstance(hardware, str) else hardware
    found = estimate(
        model,
        seq_len,
        hardware=profile,
        timeline=True,
        chunk_size=seq_len,
        keep=(),
        logits_budget=_UNLIMITED,
        **arguments,
    )
    assert found.step is not None
    return timeline_of(found, title, capacity or capacity_of(profile, found.step.devices))


def capacity_of(hardware: Hardware, devices: int = 1) -> dict[str, int | None]:
    """Return one device's bytes of each tier (device, host, disk).

    Host memory is None on a CPU, and where the profile does not know it. The disk is always None.

    Args:
        hardware: profile.
        devices: devices of the step; those of a node share its host memory.
    """
    host = None if hardware.device_type == "cpu" else hardware.host_bytes  # on a CPU host memory is the device
    share = None if host is None else host // min(devices, hardware.devices_per_node)
    return {"device": hardware.memory_bytes, "host": share, "disk": None}
