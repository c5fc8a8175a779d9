"""A rehearsal: a step of the real engine on tensors without contents.

The same sweeps, core and placement run on the `meta` device with virtual lanes, so that what they hold in every tier
and send over every lane is what they will hold and send, to the byte.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from trunkline import engine, support
from trunkline.conditions import Conditions, draw_seed
from trunkline.config import StreamConfig
from trunkline.decoder import Batch
from trunkline.huggingface import HuggingFaceDecoder
from trunkline.ranks import Alone
from trunkline.tiers.account import TierName, in_units
from trunkline.tiers.machines import tiers_for


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What a step would do.

    Attributes:
        peaks: most bytes that the engine holds in each tier.
        moved: bytes that go over each lane.
    """

    peaks: dict[TierName, int]
    moved: dict[str, int]

    def __str__(self) -> str:
        """In units for people."""
        held = ", ".join(f"{tier} {in_units(nbytes)}" for tier, nbytes in self.peaks.items() if nbytes)
        moved = ", ".join(f"{lane} {in_units(nbytes)}" for lane, nbytes in self.moved.items() if nbytes)
        return f"holds {held}; moves {moved or 'nothing'}"


def rehearse(
    model: PreTrainedModel,
    seq_len: int,
    *,
    batch_size: int = 1,
    backward: bool = True,
    device: str | torch.device | None = None,
    **settings: Any,
) -> Rehearsal:
    """Run a step of a model without computing anything.

    It takes as long as issuing all the work does: about 5 ms for each chunk of each layer, and more where keys and
    values are streamed.

    Args:
        model: on any device, `meta` included; it is not changed.
        seq_len: tokens of a row.
        batch_size: rows.
        backward: a training step; otherwise a forward without gradients.
        device: the device whose chunk size, budgets and kernels are meant; None is the model's own (a CPU for `meta`).
        settings: of `trunkline.stream`.

    Raises:
        ValueError: seq_len, batch_size or a setting is out of range, the budgets are too small, or the model cannot be
            streamed.
    """
    for name, value in (("seq_len", seq_len), ("batch_size", batch_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: give a positive whole number.")
    config = StreamConfig(**settings)
    device = torch.device(device) if device is not None else model.device
    device = torch.device("cpu") if device.type == "meta" else device
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's wrapper around it
    blank = _without_contents(base)
    decoder = HuggingFaceDecoder(blank)
    support.verify(decoder)
    ids_BS = torch.empty(batch_size, seq_len, dtype=torch.long, device="meta")
    batch = Batch(ids_BS, None, ids_BS[:, 1:], torch.empty((), dtype=torch.long, device="meta"))
    tiers = tiers_for(device, config, virtual=True)
    with support.random_state_kept(torch.device("cpu")), torch.set_grad_enabled(backward):
        conditions = Conditions(blank, ids_BS.device, draw_seed())
        reaches = support.reaches(decoder)
        run, differentiate = engine.forward(decoder, config.on(device), batch, conditions, tiers, Alone(), reaches)
        loss = engine.loss(run, differentiate=differentiate)
    if differentiate:
        engine.backward(run, torch.empty_like(loss))
    meters = tiers.read_meters()
    return Rehearsal(meters.peaks, {lane: traffic.moved for lane, traffic in meters.lanes.items()})


def _without_contents(model: PreTrainedModel) -> PreTrainedModel:
    """A copy on the `meta` device, module by module: adapters, frozen and tied parameters are what they are."""
    memo = {id(x): x.to("meta") for x in model.buffers()}
    parameters = {id(p): torch.nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    blank = copy.deepcopy(model, {**memo, **parameters})
    blank.__dict__.pop("forward", None)
    return blank
