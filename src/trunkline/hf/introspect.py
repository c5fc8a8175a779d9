"""Structure of a transformers model: its decoder layers, and the parameters outside them."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.nn import Parameter
from transformers import PreTrainedModel

SHARDING = "_trunkline_sharding"  # attribute that `shard` sets on a model


class UnsupportedModelError(ValueError):
    """Error: the model computes something that cannot be streamed exactly."""


def parameters_outside(model: nn.Module, layers: nn.ModuleList) -> list[Parameter]:
    """Return the parameters of a model that are in none of its layers, tied ones once."""
    inside = {p for layer in layers for p in layer.parameters()}
    return [p for p in model.parameters() if p not in inside]


def find_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers of a model: its one list of modules with attention that is as long as the config says.

    Raises:
        UnsupportedModelError: there is no such list, or more than one. Or the model has an encoder, cross-attention, no
            language-model head, layers without attention, or a forward without `inputs_embeds` or `position_ids`.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise UnsupportedModelError(
            f"{name} has an encoder or cross-attention: only decoder-only models can be streamed."
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no language-model head: load it with AutoModelForCausalLM.")
    taken = inspect.signature(type(model).forward).parameters
    missing = [needed for needed in ("inputs_embeds", "position_ids") if needed not in taken]
    if missing:
        raise UnsupportedModelError(f"{name}.forward takes no {missing[0]}, so that its chunks cannot be placed.")
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == config.num_hidden_layers]
    attending = [m for m in lists if any(_attends(layer) for layer in m)]
    without = [layer for m in attending or lists for layer in m if not _attends(layer)]
    if len(lists) == 1 and without:
        raise UnsupportedModelError(
            f"{name} has layers without attention ({type(without[0]).__name__}), such as state-space, recurrent or "
            "linear-attention layers: they carry a state from token to token, and cannot be streamed."
        )
    lists = attending
    if len(lists) != 1:
        raise UnsupportedModelError(
            f"{name} has {len(lists)} lists of {config.num_hidden_layers} decoder layers instead of one."
        )
    return lists[0]


def _attends(layer: nn.Module) -> bool:
    names = [type(part).__name__.lower() for part in layer.modules()]
    return any("attention" in each and "linear" not in each for each in names)


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model itself, without PEFT's wrappers.

    Raises:
        ValueError: it is not a transformers model, is wrapped in DistributedDataParallel, or was compiled as a whole.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, whose reduction runs before a streamed backward is done: "
            "pass the model itself, and trunkline.stream(model, mesh=trunkline.init_mesh()) for several ranks."
        )
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "the model was compiled as a whole by torch.compile: pass the model itself, and compile=True to have its "
            "layers compiled."
        )
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not isinstance(base, PreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} is not a transformers model: give a causal language model from transformers, or a "
            "PEFT model around one."
        )
    return base
