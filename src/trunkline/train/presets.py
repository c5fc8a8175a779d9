"""Architectures to train from scratch, by name.

The GPT presets are the GPT-2 architecture (learned positions, multi-head attention, biases) at the sizes the FPDT paper
(arXiv 2408.16978) measures: 1.2B and 7B have the widths of GPT-3 XL and GPT-3 6.7B, 30B is 40 layers deep. Sizes are
named as there, without the two embedding tables; the position table grows with the context (E times context
parameters).

The vocabulary (the tokenizer's) and the number of positions (the context) are not in a preset: they follow from the
recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Preset:
    """Architecture of a model.

    Attributes:
        model_type: `model_type` of the Hugging Face config class.
        fields: fields that differ from the defaults of this class.
        summary: description in one line.
    """

    model_type: str
    fields: MappingProxyType[str, Any]
    summary: str

    @property
    def has_position_table(self) -> bool:
        """Whether positions are learned: then the number of positions is the context."""
        return self.model_type == "gpt2"


def _gpt(num_layers: int, hidden_size: int, num_heads: int, summary: str) -> Preset:
    fields = {
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
    return Preset("gpt2", MappingProxyType(fields), summary)


def _llama(model_type: str, shape: tuple[int, int, int, int, int], summary: str, **more: Any) -> Preset:
    num_layers, hidden_size, intermediate_size, num_heads, num_key_value_heads = shape
    fields = {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_key_value_heads,
        "rms_norm_eps": 1e-5,
        **more,
    }
    return Preset(model_type, MappingProxyType(fields), summary)


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


_LLAMA_3 = {"rope_parameters": _rope(500_000.0), "tie_word_embeddings": False}
_LLAMA_32 = {"rope_parameters": _rope(500_000.0), "tie_word_embeddings": True}
_QWEN = {"rope_parameters": _rope(1_000_000.0), "rms_norm_eps": 1e-6}

PRESETS: MappingProxyType[str, Preset] = MappingProxyType(
    {
        "tiny-llama": _llama(
            "llama",
            (2, 128, 384, 2, 1),
            "a Llama for a laptop",
            head_dim=32,
            tie_word_embeddings=True,
            rope_parameters=_rope(500_000.0),
        ),
        "gpt-1.2b": _gpt(24, 2048, 16, "GPT of the FPDT paper, 1.2B"),
        "gpt-2.7b": _gpt(32, 2560, 32, "GPT of the FPDT paper, 2.7B"),
        "gpt-7b": _gpt(32, 4096, 32, "GPT of the FPDT paper, 6.7B"),
        "gpt-13b": _gpt(40, 5120, 40, "GPT of the FPDT paper, 13B"),
        # 64 heads: up to 64 devices can share a sequence by heads.
        "gpt-30b": _gpt(40, 7680, 64, "GPT of the FPDT paper, 30B, 40 layers"),
        "llama-3.2-1b": _llama("llama", (16, 2048, 8192, 32, 8), "Llama 3.2 1B", head_dim=64, **_LLAMA_32),
        "llama-3.2-3b": _llama("llama", (28, 3072, 8192, 24, 8), "Llama 3.2 3B", head_dim=128, **_LLAMA_32),
        "llama-3-8b": _llama("llama", (32, 4096, 14336, 32, 8), "Llama 3 8B", **_LLAMA_3),
        "llama-3-70b": _llama("llama", (80, 8192, 28672, 64, 8), "Llama 3 70B", **_LLAMA_3),
        "qwen2.5-0.5b": _llama("qwen2", (24, 896, 4864, 14, 2), "Qwen 2.5 0.5B", tie_word_embeddings=True, **_QWEN),
        "qwen2.5-7b": _llama("qwen2", (28, 3584, 18944, 28, 4), "Qwen 2.5 7B", tie_word_embeddings=False, **_QWEN),
        "qwen3-0.6b": _llama(
            "qwen3", (28, 1024, 3072, 16, 8), "Qwen 3 0.6B", head_dim=128, tie_word_embeddings=True, **_QWEN
        ),
        "qwen3-8b": _llama(
            "qwen3", (36, 4096, 12288, 32, 8), "Qwen 3 8B", head_dim=128, tie_word_embeddings=False, **_QWEN
        ),
    }
)
