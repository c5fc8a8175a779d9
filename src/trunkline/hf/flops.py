"""Model FLOPs of one training step: the operations that the mathematics needs, without recomputation.

The convention is the strict one: matrix products and the lower triangle of causal attention are counted, forward and
backward; recomputation, the embedding lookup, norms and element-wise work are not. Figures that count the full
attention square, or a recomputed forward, are larger for the same run (docs/train.md says by how much).

Products are counted from the modules, so biases, grouped queries, odd widths and tied heads need no formula per family.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from trunkline.attention.mask import AttentionSpan

_LOOKUPS = (nn.Embedding,)


class UncountedModuleError(ValueError):
    """Error: a module holds matrices that are neither linear layers nor experts, so its FLOPs are unknown."""


def linear_flops_per_token(model: nn.Module) -> int:
    """Return the FLOPs of all linear layers for one token, forward and backward.

    A product with a weight of n elements costs 2n forward, 2n for the gradient of its input and 2n for the gradient of
    the weight; the last is left out where the weight is frozen. A head tied to the embedding is a linear layer of its
    own and counts; the embedding lookup does not. Of experts, stacked in one parameter, only those count that a token
    is routed to, by the config's numbers.

    Args:
        model: A decoder model that holds whole matrices, on any device, `meta` included.

    Returns:
        FLOPs per token.

    Raises:
        UncountedModuleError: A parameter of two or more dimensions belongs to a module that is neither a linear layer,
            nor an embedding, nor experts with their router.
    """
    total = 0
    num_experts, active = _experts(model)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            weight = module.weight
            total += (6 if weight.requires_grad else 4) * weight.numel()
        elif not isinstance(module, _LOOKUPS):
            own = dict(module.named_parameters(recurse=False))
            stacked = num_experts and any(p.ndim == 3 and p.shape[0] == num_experts for p in own.values())
            for parameter_name, parameter in own.items():
                cost = 6 if parameter.requires_grad else 4
                if stacked and parameter.shape[0] == num_experts:
                    total += cost * parameter.numel() * active // num_experts if parameter.ndim == 3 else 0
                elif num_experts and parameter.ndim == 2 and parameter.shape[0] == num_experts:  # a router
                    total += cost * parameter.numel()
                elif parameter.ndim >= 2:
                    raise UncountedModuleError(
                        f"cannot count the FLOPs of '{name}' ({type(module).__name__}): its parameter "
                        f"'{parameter_name}' of shape {tuple(parameter.shape)} is not a linear layer's weight."
                    )
    return total


def _experts(model: nn.Module) -> tuple[int, int]:
    """Return the number of experts of a layer, and how many a token is routed to; 0, 0 without experts."""
    if not hasattr(model, "config"):
        return 0, 0
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    counts = [getattr(config, name, None) for name in ("num_local_experts", "n_routed_experts", "num_experts")]
    active = [getattr(config, name, None) for name in ("num_experts_per_tok", "moe_topk")]
    count, per_token = (next((x for x in found if isinstance(x, int) and x > 0), 0) for found in (counts, active))
    return (count, per_token) if count and per_token else (0, 0)


def _attention_spans(config: Any) -> list[AttentionSpan]:
    """Return how far back each layer attends, according to the config."""
    num_layers = int(config.num_hidden_layers)
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    everywhere = window is not None and getattr(config, "use_sliding_window", True)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if everywhere else ""] * num_layers
    return [
        AttentionSpan(window if kind == "sliding_attention" else None, chunk if kind == "chunked_attention" else None)
        for kind in kinds
    ]


def attention_flops(model: nn.Module, *, seq_len: int, documents: Sequence[int] | None = None) -> int:
    """Return the FLOPs of causal attention over one sequence in all layers, forward and backward.

    One pair costs 2·H·D for the score and 2·H·Dv for the weighted value forward, and twice that backward; the scores
    that a flash kernel recomputes in its backward are not counted. The backward is always counted, also of frozen
    layers.

    Args:
        model: A Hugging Face decoder model. Only its config is read.
        seq_len: Tokens of the sequence (global: all ranks together).
        documents: Tokens of each document packed in it, `seq_len` together; None for one.

    Returns:
        6·H·(D + Dv) times the pairs of tokens of which the second sees the first, summed over the layers, each with its
        own window or attention chunks.

    Raises:
        ValueError: `documents` do not add up to `seq_len`, or one is empty.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    lengths = [seq_len] if documents is None else list(documents)
    if sum(lengths) != seq_len or min(lengths) < 1:
        raise ValueError(f"documents={documents!r}: give lengths of at least 1 token that are {seq_len:,} together.")
    num_heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // num_heads)
    head_dim = int(getattr(config, "qk_head_dim", None) or head_dim)
    value_dim = int(getattr(config, "v_head_dim", None) or head_dim)
    starts = (0, *accumulate(lengths[:-1]))
    masks = (mask for span in _attention_spans(config) for mask in span.row_masks([starts], seq_len))
    pairs = sum(mask.num_pairs(seq_len) for mask in masks)
    return 6 * num_heads * (head_dim + value_dim) * pairs


def model_flops(model: nn.Module, *, seq_len: int, batch_size: int = 1, documents: Sequence[int] | None = None) -> int:
    """Return the FLOPs of one forward and backward pass over `batch_size` sequences of `seq_len` tokens.

    Args:
        model: A Hugging Face decoder model, on any device, `meta` included.
        seq_len: Tokens of each sequence (global: all ranks together).
        batch_size: Sequences.
        documents: Tokens of each document packed in a sequence, alike in all; None for one.

    Returns:
        FLOPs of all ranks together, recomputation not counted. Divide by seconds for model FLOP/s. The forward alone is
        a third if no weight is frozen.

    Raises:
        ValueError: `seq_len` or `batch_size` is not positive, or `documents` do not make up a sequence.
        UncountedModuleError: See `linear_flops_per_token`.
    """
    if seq_len < 1 or batch_size < 1:
        raise ValueError(f"seq_len and batch_size must be positive; got seq_len={seq_len}, batch_size={batch_size}.")
    attention = attention_flops(model, seq_len=seq_len, documents=documents)
    return batch_size * (seq_len * linear_flops_per_token(model) + attention)
