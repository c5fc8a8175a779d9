"""A rehearsed step as the record that a report draws, and what it is compared with: the same model without chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from transformers import PreTrainedModel

from trunkline.plan.estimate import Estimate, estimate
from trunkline.plan.hardware import Hardware, load
from trunkline.plan.meta_model import MetaModel
from trunkline.report.timeline import Phase, PhaseName, Timeline, clipped, thinned, within

MOST_POINTS = 20_000  # of one tier's memory
_UNBOUNDED = 2**62  # bytes: no logits are this large

Capacity = Mapping[str, int | None]


def timeline_of(rehearsal: Estimate, title: str, capacity: Capacity) -> Timeline:
    """Return a rehearsed step as a timeline.

    Args:
        rehearsal: with a time and drawn: `estimate(..., hardware=..., timeline=True)`.
        title: what was rehearsed, for people.
        capacity: bytes of each tier; None where there is no limit. See `capacity_of`.

    Raises:
        ValueError: the rehearsal has no time, or was not drawn.
    """
    step = rehearsal.step
    if step is None or not step.memory:
        raise ValueError("this rehearsal has nothing to draw: call rehearse with hardware and with drawn=True.")
    memory = {tier: within(steps, step.seconds) for tier, steps in step.memory.items()}
    return Timeline(
        title=title,
        source="rehearsed",
        seconds=step.seconds,
        phases=[Phase(cast(PhaseName, name), begin, end) for name, begin, end in step.phases],
        memory={tier: thinned(steps, step.seconds, MOST_POINTS) for tier, steps in memory.items()},
        capacity=dict(capacity),
        holders={
            tier: {part: nbytes for part, nbytes in parts.items() if nbytes > 0}
            for tier, parts in rehearsal.memory.items()
        },
        lanes=clipped(step.lanes, step.seconds),
        exposed=dict(step.exposed),
        moved=dict(rehearsal.moved),
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
    """Return the step without chunks: the whole sequence at once, each layer computed again in backward.

    That is what gradient checkpointing does, with a loss whose logits exist as a whole.

    Args:
        model: as `estimate` takes it.
        seq_len: likewise.
        title: what is rehearsed, for people.
        hardware: a profile, or the name of one.
        capacity: bytes of each tier; None for those of the hardware.
        arguments: others of `estimate`, such as batch_size, documents, degrees, spread, optimizer; no settings of
            chunks and budgets.

    Raises:
        ValueError: as `estimate`.
    """
    machine = load(hardware) if isinstance(hardware, str) else hardware
    rehearsal = estimate(
        model,
        seq_len,
        hardware=machine,
        timeline=True,
        chunk_size=seq_len,
        keep=(),
        logits_budget=_UNBOUNDED,
        **arguments,
    )
    assert rehearsal.step is not None
    return timeline_of(rehearsal, title, capacity or capacity_of(machine, rehearsal.step.devices))


def capacity_of(hardware: Hardware, devices: int = 1) -> dict[str, int | None]:
    """Return the bytes that one device has of each tier.

    Args:
        hardware: a profile.
        devices: that take part; those on one node share its host memory.
    """
    host = hardware.host_bytes
    sharing = min(devices, hardware.devices_per_node)
    if hardware.device_type == "cpu":  # host memory is the device
        return {"device": hardware.memory_bytes, "host": None, "disk": None}
    return {"device": hardware.memory_bytes, "host": None if host is None else host // sharing, "disk": None}
