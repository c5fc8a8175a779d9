"""Plain autograd: the oracle of every parity test, and the tolerances, written down once.

Tolerances are relative to the norm of the expected tensor; those of fp32 and fp64 allow for sums over a few hundred
tokens in another order. transformers' RMSNorm computes in fp32 whatever the dtype, so an fp64 gradient is exact only as
long as both sides feed it the same fp32 roundings.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOSS_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
GRADIENT_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-5}
NUM_ITEMS = 71  # not a power of two: a division at another place would round otherwise, and be seen

Gradients = dict[str, Tensor]


def tokens(batch: int, seq_len: int, *, seed: int = 1, vocab: int = 97) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (batch, seq_len), generator=generator)


def collect(model: nn.Module) -> Gradients:
    """Gradients by name, taken off the model."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Sum of the token losses, shifted, in the dtype of the logits but fp32 at least."""
    wide = torch.promote_types(logits_BSV.dtype, torch.float32)
    return F.cross_entropy(
        logits_BSV[:, :-1].flatten(0, 1).to(wide), labels_BS[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )


def plain(
    model: nn.Module, ids_BS: Tensor, labels_BS: Tensor, num_items: float = NUM_ITEMS
) -> tuple[Tensor, Gradients]:
    """Loss and gradients by plain autograd."""
    loss = cross_entropy(model(input_ids=ids_BS, use_cache=False).logits, labels_BS) / num_items
    loss.backward()
    return loss.detach(), collect(model)


def streamed(
    model: nn.Module, ids_BS: Tensor, labels_BS: Tensor, num_items: float = NUM_ITEMS
) -> tuple[Tensor, Gradients]:
    """The same through a streamed model."""
    loss = model(input_ids=ids_BS, labels=labels_BS, num_items_in_batch=num_items).loss
    loss.backward()
    return loss.detach(), collect(model)


def alone(model: nn.Module, ids_BS: Tensor, lengths: list[list[int]]) -> tuple[Tensor, Gradients]:
    """The token-weighted mean of the losses of documents, each computed alone, and its gradients."""
    count = sum(length - 1 for row in lengths for length in row)
    total = torch.zeros((), dtype=torch.float64)
    for ids, row in zip(ids_BS, lengths, strict=True):
        for document in ids[: sum(row)].split(row):
            loss = cross_entropy(model(input_ids=document[None], use_cache=False).logits, document[None])
            (loss / count).backward()
            total += loss.detach()
    return total / count, collect(model)


def packed(model: nn.Module, ids_BS: Tensor, **given: Any) -> tuple[Tensor, Gradients]:
    loss = model(input_ids=ids_BS, labels=ids_BS, **given).loss
    loss.backward()
    return loss.detach(), collect(model)


def positions(lengths: list[list[int]]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


def relative_error(got: Tensor, expected: Tensor) -> float:
    norm = expected.double().norm().item()
    difference = (got.double() - expected.double()).norm().item()
    return difference / norm if norm > 0 else difference


def total_error(got: Gradients, expected: Gradients) -> float:
    """Relative error of all gradients as one vector."""
    difference = sum(float((got[name].double() - g.double()).square().sum()) for name, g in expected.items())
    return (difference / sum(float(g.double().square().sum()) for g in expected.values())) ** 0.5


def check(
    got: tuple[Tensor, Gradients], expected: tuple[Tensor, Gradients], dtype: torch.dtype, family: str = "",
    tolerance: float | None = None,
) -> None:  # fmt: skip
    """Loss and every gradient are the oracle's."""
    assert got[0].dtype == torch.promote_types(dtype, torch.float32)
    assert abs(float(got[0]) - float(expected[0])) <= LOSS_TOLERANCE[dtype] * abs(float(expected[0]))
    assert got[1].keys() == expected[1].keys()
    # A gradient that is zero but for rounding (of a query that has one key only) has no relative error.
    floor = 1e-6 * sum(float(g.double().square().sum()) for g in expected[1].values()) ** 0.5
    errors = {
        name: float((got[1][name].double() - g.double()).norm()) / max(float(g.double().norm()), floor)
        for name, g in expected[1].items()
    }
    if family in ("cohere", "gemma"):  # norms that cast their weight to fp32: plain autograd sums its gradient in fp32
        norms = [name for name in errors if "norm" in name]
        assert all(errors.pop(name) <= 1e-6 for name in norms)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= (tolerance or GRADIENT_TOLERANCE[dtype]), f"{worst}: {errors[worst]:.1e}"
