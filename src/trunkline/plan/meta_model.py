"""A model without contents, made once for many rehearsals."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from trunkline.attention.mask import AttentionSpan
from trunkline.hf import probe
from trunkline.hf.decoder import HuggingFaceDecoder
from trunkline.hf.introspect import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class MetaModel:
    """A model on the `meta` device, known to be one that can be streamed.

    Attributes:
        model: it.
        decoder: in the pieces that sweeps need.
        reaches: of each layer's attention.
        device: where the model is that it was made of.
        whole: the model as all ranks have it together, where this is one rank's part of its matrices.
    """

    model: PreTrainedModel
    decoder: HuggingFaceDecoder
    attention_spans: Sequence[AttentionSpan]
    device: torch.device
    whole: PreTrainedModel | None = None

    @staticmethod
    def from_model(model: PreTrainedModel) -> MetaModel:
        """Of a model on any device, or a PEFT model around one; it is not changed.

        Raises:
            ValueError: it cannot be streamed.
        """
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's wrapper around it
        meta_model = _without_contents(base)
        for config in (meta_model.config, meta_model.config.get_text_config()):
            config.pad_token_id = None  # some models look for it among ids that have no contents
        decoder = HuggingFaceDecoder(meta_model)
        try:
            probe.verify(decoder)
            reaches = probe.attention_spans(decoder)
        except (TypeError, RuntimeError, AttributeError) as error:
            raise UnsupportedModelError(
                f"{type(base).__name__} does not run on tensors without contents ({error}), so it cannot be rehearsed."
            ) from error
        return MetaModel(meta_model, decoder, reaches, model.device)


def _without_contents(model: PreTrainedModel) -> PreTrainedModel:
    """A copy on the `meta` device, module by module: adapters, frozen and tied parameters are what they are."""
    memo = {id(x): x.to("meta") for x in model.buffers()}
    parameters = {id(p): torch.nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    meta_model = copy.deepcopy(model, {**memo, **parameters})
    meta_model.__dict__.pop("forward", None)
    return meta_model
