"""The tiled head against plain cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from families import build
from oracle import plain, relative_error, streamed, tokens
from torch import Tensor, nn

import trunkline
from trunkline.api import tiers_of
from trunkline.chunking import split
from trunkline.engine import loss
from trunkline.engine.grads import GradientSums
from trunkline.hf.decoder import HuggingFaceDecoder


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0.0, 1e3])
def test_tile_loss_equals_cross_entropy(dtype: torch.dtype, shift: float) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(2, 7, 11) + shift).to(dtype)
    targets = torch.randint(0, 11, (2, 7))
    targets[0, 3:5] = -100
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    expected.backward()
    total, gradient = loss.tile_loss(logits, targets, gradient=True)
    assert total.dtype == torch.promote_types(dtype, torch.float32)
    assert gradient is not None
    assert gradient.dtype == dtype
    assert relative_error(total, expected.detach()) < max(1e-13, torch.finfo(total.dtype).eps * (8 + shift))
    assert relative_error(gradient, exact.grad) < max(1e-13, torch.finfo(dtype).eps, 1e-7 * shift)
    assert torch.equal(gradient[0, 3:5], torch.zeros(2, 11, dtype=dtype))


def test_ignored_positions_with_impossible_first_token() -> None:
    """A vocabulary entry at minus infinity (masked out by the model) does not turn ignored labels into NaN."""
    logits = torch.randn(1, 3, 5)
    logits[..., 0] = float("-inf")
    total, gradient = loss.tile_loss(logits, torch.tensor([[2, -100, 3]]), gradient=True)
    assert torch.isfinite(total)
    assert gradient is not None
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("tile_tokens", [1, 3, 8, 100])
def test_tiles_cover_every_token_of_the_chunks_once(tile_tokens: int) -> None:
    tiles = loss.cut_tiles(split(37, 8), tile_tokens)
    assert [token for tile in tiles for token in range(tile.start, tile.stop)] == list(range(37))
    assert all(tile.stop - tile.start <= tile_tokens for tile in tiles)
    assert all(0 <= tile.within.start < tile.within.stop <= len(tile.chunk) for tile in tiles)


def test_logits_never_exceed_the_tile_and_tiles_without_targets_are_not_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[int] = []
    head = HuggingFaceDecoder.head

    def counted(decoder: HuggingFaceDecoder, x_BTE: Tensor) -> Tensor:
        computed.append(x_BTE.shape[1])
        return head(decoder, x_BTE)

    model = trunkline.stream(build("llama"), chunk_size=8, logits_budget=97 * 2 * 16 * 3)  # 3 tokens of fp64 logits
    ids = tokens(1, 20)
    labels = torch.full_like(ids, -100)
    labels[0, 9] = 3
    monkeypatch.setattr(HuggingFaceDecoder, "head", counted)
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    assert computed == [3]
    assert float(loss) > 0
    assert [budget.held for budget in tiers_of(model).budgets.values()] == [0, 0, 0]


@pytest.mark.parametrize("logits_budget", [1, 97 * 8 * 3, 10**9])
def test_logits_budget_does_not_change_the_result(logits_budget: int) -> None:
    model = build("llama-tied")
    ids = tokens(2, 37)
    expected = plain(model, ids, ids)
    trunkline.stream(model, chunk_size=8, logits_budget=logits_budget)
    got = streamed(model, ids, ids)
    assert max(relative_error(got[1][name], g) for name, g in expected[1].items()) < 1e-8


def test_gradient_sums_are_fp32_and_rounded_once() -> None:
    """4,096 shares of 1/4096 + 2^-20: a bf16 sum would stop growing at 1/16."""
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    sums = GradientSums()
    share = torch.full((3,), 2**-12, dtype=torch.bfloat16)
    for _ in range(4096):
        sums.add([parameter], [share])
    sums.add([parameter], [None])
    sums.scale_(torch.tensor(0.5))
    kept: list[torch.Tensor | None] = []

    def reduced(parameters: Sequence[nn.Parameter], totals: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        kept.extend(totals)
        return [total.to(torch.bfloat16) for total in totals if total is not None]

    sums.deliver([parameter], reduced)
    assert [total.dtype for total in kept if total is not None] == [torch.float32]
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.bfloat16
    assert torch.equal(parameter.grad, torch.full((3,), 0.5, dtype=torch.bfloat16))


def test_tiles_hold_a_thousand_tokens_on_an_accelerator() -> None:
    """64 MiB would be 42 tokens with a vocabulary of 128K: reading the unembedding so often takes most of the time."""
    sizes = {
        device: loss.tokens_per_tile(None, 2, 128_256, torch.bfloat16, device=torch.device(device))
        for device in ("cpu", "cuda")
    }
    assert sizes == {"cpu": 64 * 2**20 // (2 * 128_256 * 12), "cuda": 512}
    assert loss.tokens_per_tile(None, 1, 97, torch.float32, device=torch.device("cuda")) == 64 * 2**20 // (97 * 16)


def test_loss_of_a_target_with_probability_zero_in_fp32() -> None:
    logits = torch.tensor([[[0.0, 1e4, -1e4], [-300.0, 0.0, -float("inf")]]])
    total, gradient = loss.tile_loss(logits, torch.tensor([[2, 0]]), gradient=True)
    assert float(total) == 2e4 + 300
    assert gradient is not None
    assert gradient.tolist() == [[[0, 1, -1], [-1, 1, 0]]]
