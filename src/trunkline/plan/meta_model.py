"""Model on the `meta` device, made once for many estimates."""

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
    """Model on the `meta` device that is known to be streamable.

    Attributes:
        model: the model; its tensors have shapes and dtypes, and no contents.
        decoder: decoder over the model.
        attention_spans: span that each layer's attention sees.
        device: device of the model that it was made from.
        full_model: the unsharded model, where `model` is one rank's tensor-parallel shard; else None.
    """

    model: PreTrainedModel
    decoder: HuggingFaceDecoder
    attention_spans: Sequence[AttentionSpan]
    device: torch.device
    full_model: PreTrainedModel | None = None

    @staticmethod
    def from_model(model: PreTrainedModel) -> MetaModel:
        """Copy a model, or the one inside a PEFT model, to the `meta` device; the original is not changed.

        Raises:
            UnsupportedModelError: a ValueError: the model cannot be streamed.
        """
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        meta = _copy_to_meta(base)
        for config in (meta.config, meta.config.get_text_config()):
            config.pad_token_id = None  # some models search input_ids for it, and these ids have no contents
        decoder = HuggingFaceDecoder(meta)
        try:
            probe.verify(decoder)
            spans = probe.attention_spans(decoder)
        except (TypeError, RuntimeError, AttributeError) as error:
            raise UnsupportedModelError(
                f"{type(base).__name__} does not run on the meta device, so no step of it can be estimated: {error}"
            ) from error
        return MetaModel(meta, decoder, spans, model.device)


def _copy_to_meta(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model to the `meta` device with its adapters, and its frozen and tied parameters."""
    memo = {id(x): x.to("meta") for x in model.buffers()}
    parameters = {id(p): torch.nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    meta = copy.deepcopy(model, {**memo, **parameters})
    meta.__dict__.pop("forward", None)  # a streamed model's own forward
    return meta
