"""Tiny randomly initialised models of each family, as transformers builds them."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T
from transformers import PreTrainedModel

_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_NEOX = {key: value for key, value in _COMMON.items() if key != "num_key_value_heads"}
_GPT2 = {
    "vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512, "bos_token_id": 1, "eos_token_id": 2,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip

FAMILIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "llama": (T.LlamaConfig, _COMMON),
    "llama-tied": (T.LlamaConfig, {**_COMMON, "tie_word_embeddings": True}),
    "qwen2": (T.Qwen2Config, _COMMON),
    "qwen3": (T.Qwen3Config, {**_COMMON, "head_dim": 16}),
    "mistral": (T.MistralConfig, {**_COMMON, "sliding_window": None}),
    "gpt2": (T.GPT2Config, _GPT2),
    "gpt-neox": (T.GPTNeoXConfig, {**_NEOX, "use_parallel_residual": True}),
    "gpt-neox-sequential": (T.GPTNeoXConfig, {**_NEOX, "use_parallel_residual": False}),
    "cohere": (T.CohereConfig, _COMMON),
    "gemma": (T.GemmaConfig, {**_COMMON, "head_dim": 8}),
    "granite": (
        T.GraniteConfig,
        {
            **_COMMON, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
    ),
}  # fmt: skip


def build(family: str, dtype: torch.dtype = torch.float64, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model of a family, in training mode, with weights large enough for gradients to matter."""
    config_class, settings = FAMILIES[family]
    torch.manual_seed(seed)
    config = config_class(**{**settings, **overrides})
    model = T.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return scatter(model).to(dtype).train()


def scatter(model: PreTrainedModel) -> PreTrainedModel:
    """Weights large enough for gradients to matter; norms' weights and biases off their initial ones and zeros."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.15 if parameter.ndim > 1 else 0.3
            centre = parameter.mean() if parameter.ndim == 1 and "bias" not in name else 0.0
            parameter.copy_(centre + scale * torch.randn_like(parameter))
    return model
