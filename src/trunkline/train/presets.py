"""Architectures to train from scratch, by name.

The GPT presets are the GPT-2 architecture (learned positions, multi-head attention, biases) at the sizes the FPDT paper
(arXiv 2408.16978) measures: 1.2B and 7B have the widths of GPT-3 XL and GPT-3 6.7B, 30B is 40 layers deep. Sizes are
named as there, without the two embedding tables; the position table grows with the context (E times context
parameters).

The vocabulary (the tokenizer's) and the number of positions (the context) are not in a preset: they follow from the
recipe.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any


def _gpt(num_layers: int, hidden_size: int, num_heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_layer": num_layers,
        "n_embd": hidden_size,
        "n_head": num_heads,
        # Attention dropout cannot be streamed, and pre-training for one epoch needs no dropout.
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        # sqrt(1 / (3 E)): the standard deviation of initial weights falls with the width.
        "initializer_range": round((1 / (3 * hidden_size)) ** 0.5, 4),
    }


def _llama(model_type: str, shape: tuple[int, int, int, int, int], **more: Any) -> dict[str, Any]:
    num_layers, hidden_size, intermediate_size, num_heads, num_key_value_heads = shape
    return {
        "model_type": model_type,
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_key_value_heads,
        "rms_norm_eps": 1e-5,
        **more,
    }


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


_LLAMA_3 = {"rope_parameters": _rope(500_000.0), "tie_word_embeddings": False}
_LLAMA_32 = {"rope_parameters": _rope(500_000.0), "tie_word_embeddings": True}
_QWEN = {"rope_parameters": _rope(1_000_000.0), "rms_norm_eps": 1e-6}

# Fields of a Hugging Face config that differ from the defaults of its `model_type`.
PRESETS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "tiny-llama": _llama("llama", (2, 128, 384, 2, 1), head_dim=32, **_LLAMA_32),
        "gpt-1.2b": _gpt(24, 2048, 16),
        "gpt-2.7b": _gpt(32, 2560, 32),
        "gpt-7b": _gpt(32, 4096, 32),
        "gpt-13b": _gpt(40, 5120, 40),
        # 64 heads: up to 64 devices can share a sequence by heads.
        "gpt-30b": _gpt(40, 7680, 64),
        "llama-3.2-1b": _llama("llama", (16, 2048, 8192, 32, 8), head_dim=64, **_LLAMA_32),
        "llama-3.2-3b": _llama("llama", (28, 3072, 8192, 24, 8), head_dim=128, **_LLAMA_32),
        "llama-3-8b": _llama("llama", (32, 4096, 14336, 32, 8), **_LLAMA_3),
        "llama-3-70b": _llama("llama", (80, 8192, 28672, 64, 8), **_LLAMA_3),
        "qwen2.5-0.5b": _llama("qwen2", (24, 896, 4864, 14, 2), tie_word_embeddings=True, **_QWEN),
        "qwen2.5-7b": _llama("qwen2", (28, 3584, 18944, 28, 4), tie_word_embeddings=False, **_QWEN),
        "qwen3-0.6b": _llama("qwen3", (28, 1024, 3072, 16, 8), head_dim=128, tie_word_embeddings=True, **_QWEN),
        "qwen3-8b": _llama("qwen3", (36, 4096, 12288, 32, 8), head_dim=128, tie_word_embeddings=False, **_QWEN),
    }
)
