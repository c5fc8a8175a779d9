"""Model FLOPs of one training step: what the mathematics needs, not what the machine did.

The convention is the strict one: matrix products and the lower triangle of causal attention are counted, forward and
backward; recomputation, the embedding lookup, norms and element-wise work are not. Figures that count the full
attention square, or a recomputed forward, are larger for the same run (docs/train.md says by how much).

Products are counted from the modules, so biases, grouped queries, odd widths and tied heads need no formula per family.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

_LOOKUPS = (nn.Embedding,)


class UncountedModuleError(ValueError):
    """A module holds matrices that are not plain linear layers, so its FLOPs are unknown (mixtures of experts)."""


def linear_flops_per_token(model: nn.Module) -> int:
    """FLOPs of all linear layers for one token, forward and backward.

    A product with a weight of n elements costs 2n forward, 2n for the gradient of its input and 2n for the gradient of
    the weight; the last is left out where the weight is frozen. A head tied to the embedding is a linear layer of its
    own and counts; the embedding lookup does not.

    Args:
        model: A decoder model, on any device, `meta` included.

    Returns:
        FLOPs per token.

    Raises:
        UncountedModuleError: A parameter of two or more dimensions belongs to a module that is neither a linear layer
            nor an embedding.
    """
    total = 0
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            weight = module.weight
            total += (6 if weight.requires_grad else 4) * weight.numel()
        elif not isinstance(module, _LOOKUPS):
            for parameter_name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim >= 2:
                    raise UncountedModuleError(
                        f"cannot count the FLOPs of '{name}' ({type(module).__name__}): its parameter "
                        f"'{parameter_name}' of shape {tuple(parameter.shape)} is not a linear layer's weight."
                    )
    return total


def causal_pairs(seq_len: int, window: int | None = None) -> int:
    """Number of (query, key) pairs of causal attention, the diagonal included.

    Args:
        seq_len: Tokens of the sequence.
        window: Keys a query sees at most, itself included; None for all earlier ones.

    Returns:
        S(S+1)/2 without a window.
    """
    full = seq_len * (seq_len + 1) // 2
    if window is None or window >= seq_len:
        return full
    beyond = seq_len - window
    return full - beyond * (beyond + 1) // 2


def attention_flops(model: nn.Module, *, seq_len: int) -> int:
    """FLOPs of causal attention over one sequence in all layers, forward and backward.

    One pair costs 4·H·D forward (the score, and the weighted value) and twice that backward; the scores that a flash
    kernel recomputes in its backward are not counted.

    Args:
        model: A Hugging Face decoder model.
        seq_len: Tokens of the sequence.

    Returns:
        12·H·D times the pairs, summed over the layers, each with its own window.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    num_layers = int(config.num_hidden_layers)
    num_heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // num_heads)
    sliding = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    pairs = sum(causal_pairs(seq_len, sliding if kind == "sliding_attention" else None) for kind in layer_types)
    return 12 * num_heads * head_dim * pairs


def model_flops(model: nn.Module, *, seq_len: int, batch_size: int = 1) -> int:
    """FLOPs of one forward and backward pass over `batch_size` sequences of `seq_len` tokens.

    Args:
        model: A Hugging Face decoder model, on any device, `meta` included.
        seq_len: Tokens of each sequence (global: all ranks together).
        batch_size: Sequences.

    Returns:
        FLOPs, recomputation not counted. Divide by seconds for model FLOP/s; the forward alone is a third.

    Raises:
        ValueError: `seq_len` or `batch_size` is not positive.
        UncountedModuleError: See `linear_flops_per_token`.
    """
    if seq_len < 1 or batch_size < 1:
        raise ValueError(f"seq_len and batch_size must be positive; got seq_len={seq_len}, batch_size={batch_size}.")
    return batch_size * (seq_len * linear_flops_per_token(model) + attention_flops(model, seq_len=seq_len))
