"""Variants of training to compare: one model prepared for each variant, and the step that all of them run."""

from __future__ import annotations

import copy
import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import trunkline

PLAIN = "plain"
BASELINE = "checkpointing"
KEEPS: dict[str, tuple[str, ...]] = {
    "none": (),
    "attention": ("attention",),
    "kv": ("kv",),
    "attention+kv": ("attention", "kv"),
}
OFFLOADED = "offloaded"
STREAMED = (*KEEPS, OFFLOADED)
VARIANTS = (PLAIN, BASELINE, *STREAMED)
LABELS = {
    PLAIN: "Hugging Face, plain",
    BASELINE: "Hugging Face, checkpointing",
    **{name: f"Trunkline, keep={{{', '.join(keep)}}}" for name, keep in KEEPS.items()},
    OFFLOADED: "Trunkline, 48 MiB on the device, the rest on disk",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Setup:
    """Setup that all variants of a run share.

    Attributes:
        layers: number of decoder layers.
        vocab_size: size of the vocabulary.
        chunk_size: tokens per chunk for Trunkline, or `auto`.
        threads: threads of PyTorch within an operator.
        hidden_size: E.
        heads: number of query heads, H.
        kv_heads: number of key/value heads, K.
        head_dim: D.
        intermediate_size: hidden size of the MLP.
        seed: random seed of weights and tokens.
    """

    layers: int
    vocab_size: int
    chunk_size: int | str
    threads: int
    hidden_size: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 704
    seed: int = 0


def build(setup: Setup, dtype: str) -> PreTrainedModel:
    """Build the model in training mode; its weights depend only on setup and dtype."""
    config = LlamaConfig(
        vocab_size=setup.vocab_size,
        hidden_size=setup.hidden_size,
        intermediate_size=setup.intermediate_size,
        num_hidden_layers=setup.layers,
        num_attention_heads=setup.heads,
        num_key_value_heads=setup.kv_heads,
        head_dim=setup.head_dim,
        max_position_embeddings=2**20,
        use_cache=False,  # training never reads the cache, so its cost would be unfair to Hugging Face
        attn_implementation="sdpa",
        dtype=DTYPES[dtype],
    )
    torch.manual_seed(setup.seed)
    model: PreTrainedModel = LlamaForCausalLM._from_config(config, dtype=DTYPES[dtype])
    return model.train()


def prepare(model: PreTrainedModel, variant: str, setup: Setup, **stream_options: Any) -> PreTrainedModel:
    """Return a copy of `model`, set up for `variant`."""
    model = copy.deepcopy(model)
    if variant == BASELINE:
        # Older releases of transformers have only the second name. Both are non-reentrant by default.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    elif variant == OFFLOADED:
        budget: Any = {"device_budget": "48MiB", "offload_dir": Path(__file__).parent}
        # Small chunks, so that those in flight fit the budget.
        trunkline.stream(model, **{"chunk_size": 1_024, **budget, **stream_options})
    elif variant in KEEPS:
        trunkline.stream(model, chunk_size=setup.chunk_size, keep=KEEPS[variant], **stream_options)  # type: ignore[arg-type]
    return model


def tokens(setup: Setup, length: int) -> Tensor:
    """Return token ids (1, S); they are the same for every variant."""
    generator = torch.Generator().manual_seed(setup.seed + 1)
    return torch.randint(setup.vocab_size, (1, length), generator=generator)


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one training step.

    Attributes:
        seconds: wall time.
        cores: CPU time divided by wall time; far below the number of threads, the machine was shared.
        loss: loss of the step.
        grad_norm: norm of all gradients.
    """

    seconds: float
    cores: float
    loss: float
    grad_norm: float


def step(model: PreTrainedModel, ids_BS: Tensor, *, keep_grads: bool = False) -> Step:
    """Time a forward and a backward; reset gradients to None first, unless `keep_grads`."""
    if not keep_grads:
        model.zero_grad(set_to_none=True)
    gc.collect()
    start, busy = time.perf_counter(), time.process_time()
    loss = model(input_ids=ids_BS, labels=ids_BS).loss
    loss.backward()
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    norms = [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
    return Step(seconds, busy / seconds, float(loss.detach()), float(torch.stack(norms).norm()))


def check_same(variant: str, got: Step, expected: Step, dtype: str) -> None:
    """Check that two steps have the same results, before their times are compared.

    Raises:
        RuntimeError: loss or gradient norm differ by more than rounding.
    """
    # Rounding only: fp32 sums over S tokens have another order, and in bf16 Hugging Face rounds every intermediate.
    tolerance = 1e-4 if dtype == "fp32" else 2e-2
    for name in ("loss", "grad_norm"):
        a, b = getattr(got, name), getattr(expected, name)
        if not abs(a - b) <= tolerance * abs(b):
            raise RuntimeError(f"{variant} has {name} {a:.6g} and {BASELINE} has {b:.6g}: their computations differ.")
