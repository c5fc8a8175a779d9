"""Optimizer: schedule, decay groups, fp32 masters, clipping, gradient norm."""

import itertools
import math

import pytest
import torch
from torch import nn

from trunkline.distributed.grad_norm import total_norm
from trunkline.train.optimizer import Optimizer, clip_scale, learning_rate
from trunkline.train.recipe import OptimizerSection


def test_schedule_warms_up_and_decays_to_its_floor():
    settings = OptimizerSection(lr=2.0, warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(step, steps=13, settings=settings) for step in range(13)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    # Half way down the cosine lies half way between top and floor.
    assert rates[8] == pytest.approx((2.0 + 0.2) / 2)
    assert rates[12] == pytest.approx(0.2)
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))


def test_schedule_of_short_runs():
    settings = OptimizerSection(lr=1.0)
    assert learning_rate(0, steps=1, settings=settings) == 1.0
    assert [learning_rate(i, steps=2, settings=OptimizerSection(lr=1.0, warmup_steps=2)) for i in (0, 1)] == [0.5, 1.0]
    constant = OptimizerSection(lr=1.0, min_lr_ratio=1.0)
    assert {learning_rate(i, steps=9, settings=constant) for i in range(9)} == {1.0}


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).to(dtype)


def test_only_matrices_decay():
    model = model_of(torch.float32)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = Optimizer(model, OptimizerSection(lr=0.5, weight_decay=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert float(optimizer.collect()) == 0.0
    optimizer.step(lr=0.5, scale=1.0)
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, old * (0.95 if old.ndim == 2 else 1.0))
        assert parameter.grad is None


def test_one_step_equals_adamw_on_clipped_gradients():
    ours, theirs = model_of(torch.float32), model_of(torch.float32)
    optimizer = Optimizer(ours, OptimizerSection(lr=0.1, weight_decay=0.2, eps=1e-3))
    for model in (ours, theirs):
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 2.0 + index)
    norm = float(optimizer.collect())
    reference = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    assert norm == pytest.approx(float(reference), rel=1e-6)
    optimizer.step(lr=0.1, scale=clip_scale(norm, 0.5))
    decayed = [p for p in theirs.parameters() if p.ndim == 2]
    rest = [p for p in theirs.parameters() if p.ndim == 1]
    torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.9, 0.95),
        eps=1e-3,
    ).step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("fp32_master", "moved"), [(True, True), (False, False)])
def test_masters_keep_updates_that_bfloat16_would_round_away(fp32_master, moved):
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = Optimizer(model, OptimizerSection(lr=1e-3, weight_decay=0.0, fp32_master=fp32_master))
    assert optimizer.has_masters is fp32_master
    # Ten steps of 0.001 are 0.01 in all; one is below the 0.0039 (half of it: 0.002) that bfloat16 tells from 1.
    for _ in range(10):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.collect()
        optimizer.step(lr=1e-3, scale=1.0)
    assert model.weight.dtype == torch.bfloat16
    assert float(model.weight.detach()) == (pytest.approx(0.99, abs=0.003) if moved else 1.0)


def test_float32_models_have_no_masters():
    model = model_of(torch.float32)
    optimizer = Optimizer(model, OptimizerSection(fp32_master=True))
    assert not optimizer.has_masters
    assert optimizer.optimised[0].data_ptr() == model[0].weight.data_ptr()


def test_norm_is_float32_and_not_finite_if_a_gradient_is_not():
    gradients = [torch.full((300, 300), 0.1, dtype=torch.bfloat16), torch.tensor([3.0])]
    value = float(torch.tensor(0.1, dtype=torch.bfloat16))
    # A float32 sum of n squares is off by at most sqrt(n) roundings here; a bfloat16 result would be off by 2e-3.
    expected = math.sqrt(90_000 * value**2 + 9)
    assert float(total_norm(gradients)) == pytest.approx(expected, rel=300 * 2**-24 * 5)
    assert not math.isfinite(float(total_norm([torch.tensor([1.0, math.nan])])))


def test_clipping():
    assert clip_scale(4.0, 1.0) == 0.25
    assert clip_scale(0.5, 1.0) == 1.0
    assert clip_scale(1e9, None) == 1.0


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="no parameter is trainable"):
        Optimizer(nn.Linear(2, 2).requires_grad_(False), OptimizerSection())


def test_micro_batches_are_summed_in_the_masters_type():
    """512 gradients of 2^-9 add up to 1; summed in bfloat16 they would stop at 1/2."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    optimizer = Optimizer(model, OptimizerSection(fp32_master=True))
    for _ in range(512):
        model.weight.grad = torch.full_like(model.weight, 2**-9)
        norm = optimizer.collect()
    assert float(norm) == 1.0
    assert model.weight.grad is None
