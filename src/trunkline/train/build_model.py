"""Model of a recipe: fresh weights of a preset, or a local Hugging Face folder.

The context is checked here, before training: a context longer than the positions of a model is an error, never a silent
extrapolation.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from trunkline.data.tokenizers import BYTES, Encoder
from trunkline.train.load_recipe import RecipeError
from trunkline.train.presets import PRESETS
from trunkline.train.recipe import Recipe
from trunkline.utils.error_text import first_line


def tokenizer_spec(recipe: Recipe) -> str:
    """Return the tokenizer to load: the setting, else the one of the model folder, else bytes.

    Raises:
        RecipeError: `model.path` is no model folder.
    """
    if recipe.model.path is not None:
        _model_folder(recipe.model.path)
    if recipe.data.tokenizer is not None:
        return recipe.data.tokenizer
    return BYTES if recipe.model.path is None else recipe.model.path


def build_config(recipe: Recipe, encoder: Encoder) -> Any:
    """Build the Hugging Face config of the recipe's model, checked against context and tokenizer.

    Args:
        recipe: the recipe.
        encoder: its tokenizer; fresh models take vocabulary and special ids from it.

    Returns:
        A `PretrainedConfig`.

    Raises:
        RecipeError: no model folder, an override that the config does not have, positions or vocabulary too small.
    """
    config = _fresh_config(recipe, encoder) if recipe.model.preset is not None else _stored_config(recipe)
    _check_positions(config, recipe)
    if config.get_text_config().vocab_size < encoder.vocab_size:
        raise RecipeError(
            f"data.tokenizer: its largest id is {encoder.vocab_size - 1:,}, but the model has a vocabulary of "
            f"{config.get_text_config().vocab_size:,}. Use the tokenizer the model was trained with (leave "
            "data.tokenizer out)."
        )
    return config


def build_model(recipe: Recipe, config: Any, device: torch.device) -> nn.Module:
    """Build the model on its device, in training mode, from fresh or stored weights.

    Fresh weights are drawn from the recipe's seed, which seeds PyTorch's global generators.

    Args:
        recipe: the recipe.
        config: config of `build_config`.
        device: device of the parameters.

    Returns:
        A Hugging Face causal language model in `model.dtype`.

    Raises:
        RecipeError: no model can be made with the overrides, or the folder's weights are missing or do not fit.
    """
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, recipe.model.dtype)
    model: nn.Module
    if recipe.model.path is None:
        torch.manual_seed(recipe.seed)
        try:
            with device:
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        except (ValueError, TypeError, KeyError, RuntimeError, ZeroDivisionError) as error:
            raise RecipeError(
                f"model.overrides: a {config.model_type} model cannot be made with them ({first_line(error)}). "
                "Check that sizes are whole numbers and divide by the number of heads."
            ) from error
    else:
        folder = Path(recipe.model.path).expanduser()
        try:
            model, loading = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise RecipeError(
                f"model.path: the weights in '{folder}' cannot be loaded ({first_line(error)}). The folder must hold "
                "a causal language model as save_pretrained writes it, and model.overrides must not change its shapes."
            ) from error
        if loading["missing_keys"]:
            missing = sorted(loading["missing_keys"])
            raise RecipeError(
                f"model.path: '{folder}' has no weights for {len(missing)} parameters of its model ({missing[0]}, …). "
                "Give the folder of the complete model."
            )
        model = model.to(device)
    return model.train()


def _fresh_config(recipe: Recipe, encoder: Encoder) -> Any:
    from transformers import AutoConfig

    assert recipe.model.preset is not None
    preset = PRESETS[recipe.model.preset]
    tokenizer = encoder.tokenizer
    config = AutoConfig.for_model(
        **preset,
        vocab_size=encoder.vocab_size,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # A learned table is as long as the context. Rotary positions have no table; the number only tells servers how far
    # to go.
    config.max_position_embeddings = (
        recipe.context if preset["model_type"] == "gpt2" else max(recipe.context, config.max_position_embeddings)
    )
    return _override(config, recipe.model.overrides)


def _stored_config(recipe: Recipe) -> Any:
    from transformers import AutoConfig

    assert recipe.model.path is not None
    folder = _model_folder(recipe.model.path)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise RecipeError(
            f"model.path: '{folder}/config.json' is of no model that transformers knows ({first_line(error)})."
        ) from error
    stored = getattr(config.get_text_config(), "max_position_embeddings", None)
    config = _override(config, recipe.model.overrides)
    text = config.get_text_config()
    if not hasattr(text, "rope_parameters") and getattr(text, "max_position_embeddings", None) != stored:
        raise RecipeError(
            f"model.overrides: '{folder}' has a learned table of {stored:,} positions, which cannot be lengthened. "
            f"Set context to {stored} or less, or train a model.preset from scratch."
        )
    return config


def _model_folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise RecipeError(
            f"model.path: '{folder}' is not a Hugging Face model folder (no config.json there). Give a local folder as "
            "save_pretrained writes it; names on the Hub are not downloaded. For fresh weights set model.preset."
        )
    return folder


def _override(config: Any, overrides: dict[str, Any]) -> Any:
    """Return a config with fields replaced; its class derives dependent fields (head_dim, layer_types) again."""
    if not overrides:
        return config
    fields = config.to_dict()
    known = [name for name in [*fields, *config.attribute_map] if not name.startswith("_")]
    for name in overrides:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean '{near[0]}'?" if near else "See the config.json of a model of this kind."
            raise RecipeError(f"model.overrides.{name}: a {config.model_type} config has no such field. {hint}")
    changed = {config.attribute_map.get(name, name): value for name, value in overrides.items()}
    if isinstance(changed.get("rope_parameters"), dict):
        changed["rope_parameters"] = _merge_rope(fields, changed["rope_parameters"])
    # A head dim that the model sets apart from E / H is the user's to change.
    derived = fields.get("hidden_size", 0) // (fields.get("num_attention_heads") or 1)
    if {"hidden_size", "num_attention_heads"} & changed.keys() and fields.get("head_dim") == derived:
        fields.pop("head_dim", None)
    if "num_hidden_layers" in changed:
        fields.pop("layer_types", None)
    try:
        return type(config).from_dict({**fields, **changed})
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        problem = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip().rstrip(".")
        raise RecipeError(f"model.overrides: {problem}. Correct that field of model.overrides.") from error


def _merge_rope(fields: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """Merge changed rope settings into the config's; scaled ones also get the length before scaling."""
    merged = {**(fields.get("rope_parameters") or {}), **changed}
    if merged.get("rope_type", "default") != "default":
        merged.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
    return merged


def _check_positions(config: Any, recipe: Recipe) -> None:
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is None or recipe.context <= positions:
        return
    fix = f"Set context to {positions} or less"
    if hasattr(config.get_text_config(), "rope_parameters"):
        fix += (
            f", or set model.overrides.max_position_embeddings to {recipe.context} (and "
            "model.overrides.rope_parameters, "
            "for example {rope_type: yarn, factor: 4.0}, to scale the rotary positions); both are saved with the model"
        )
    raise RecipeError(
        f"context: {recipe.context:,} tokens (global) is more than the {positions:,} positions this model is made for. "
        f"{fix}."
    )
