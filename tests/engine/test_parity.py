"""The streamed model against plain autograd: loss and every gradient."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable

import pytest
import torch
from families import FAMILIES, build
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import check, collect, cross_entropy, plain, relative_error, streamed, tokens, total_error
from peft import LoraConfig, get_peft_model
from torch import nn

import trunkline
from trunkline.attention import kv_spans

KEEPS = [(), ("attention",), ("kv",), ("attention", "kv")]
FP64 = torch.float64


@pytest.mark.parametrize("keep", KEEPS, ids=["nothing", "attention", "kv", "both"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_fp64(family: str, keep: tuple[str, ...]) -> None:
    model = build(family)
    ids = tokens(2, 37)
    labels = ids.clone()
    labels[0, 3:9] = -100
    expected = plain(model, ids, labels)
    trunkline.stream(model, chunk_size=8, keep=keep)
    check(streamed(model, ids, labels), expected, FP64, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_fp32(family: str) -> None:
    model = build(family, torch.float32)
    ids = tokens(1, 130)
    expected = plain(copy.deepcopy(model).double(), ids, ids)
    trunkline.stream(model, chunk_size=32)
    check(streamed(model, ids, ids), expected, torch.float32)


_models = {family: build(family) for family in ("llama", "gpt2", "cohere")}


@settings(max_examples=30, deadline=None)
@given(
    family=st.sampled_from(sorted(_models)),
    batch=st.integers(1, 3),
    seq_len=st.integers(1, 40),
    chunk_size=st.integers(1, 48),
    keep=st.sets(st.sampled_from(["attention", "kv"])),
    tile=st.integers(1, 12),
    ignored=st.floats(0, 1),
    kernel=st.sampled_from(["auto", "math"]),
    seed=st.integers(0, 2**16),
)
def test_any_batch_length_chunk_and_tile(
    family: str, batch: int, seq_len: int, chunk_size: int, keep: Iterable[str], tile: int, ignored: float,
    kernel: str, seed: int,
) -> None:  # fmt: skip
    """Any length, batch, chunk, tile and share of ignored labels, also a row or a tile without a target."""
    model = _models[family]
    ids = tokens(batch, seq_len, seed=seed)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < ignored, -100)
    expected = plain(model, ids, labels)
    trunkline.stream(model, chunk_size=chunk_size, keep=keep, logits_budget=batch * 97 * 8 * tile, attn_kernel=kernel)
    try:
        got = streamed(model, ids, labels)
    finally:
        trunkline.unstream(model)
    assert all(torch.isfinite(g).all() for g in got[1].values())
    if bool((labels[:, 1:] != -100).any()):
        check(got, expected, FP64, family)
    else:
        assert float(got[0]) == 0
        assert all(float(g.norm()) == 0 for g in got[1].values())


@pytest.mark.parametrize("span", [1, 5, 16, 64])
def test_backward_in_spans_of_any_length(span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys taken in several kernel calls a chunk give the same gradients."""

    model = build("llama")
    ids = tokens(1, 37)
    expected = plain(model, ids, ids)
    monkeypatch.setattr(kv_spans, "SPAN", span)
    trunkline.stream(model, chunk_size=8)
    check(streamed(model, ids, ids), expected, FP64)


@pytest.mark.parametrize("kernel", ["auto", "math"])
def test_forward_spans_where_a_kernel_takes_fewer_elements(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:

    model = build("llama")
    ids = tokens(1, 37)
    expected = plain(model, ids, ids)
    trunkline.stream(model, chunk_size=8, attn_kernel=kernel)
    monkeypatch.setattr(kv_spans, "MAX_ELEMENTS", 4 * 8 * (8 + 5))  # heads x head dim x (chunk + 5 keys)
    check(streamed(model, ids, ids), expected, FP64)
    monkeypatch.setattr(kv_spans, "MAX_ELEMENTS", 4 * 8 * 8)
    with pytest.raises(ValueError, match="smaller chunk_size"):
        model(input_ids=ids, labels=ids)


# A gradient in bf16 is a draw: its error depends on how the roundings of the forward fall. Over models it must be no
# larger than transformers' own, and it must not grow with the number of chunks.
BF16_MODELS = 8


@pytest.mark.soak
@pytest.mark.parametrize("family", ["llama", "qwen3", "granite"])
def test_bf16_is_no_worse_than_transformers(family: str) -> None:
    ratios: dict[int, list[float]] = {512: [], 128: [], 16: []}
    for seed in range(BF16_MODELS):
        model = build(family, torch.bfloat16, seed=seed)
        ids = tokens(1, 512, seed=seed)
        _, exact = plain(copy.deepcopy(model).double(), ids, ids, 512)
        _, own = plain(model, ids, ids, 512)
        for chunk_size, found in ratios.items():
            trunkline.stream(model, chunk_size=chunk_size)
            _, got = streamed(model, ids, ids, 512)
            trunkline.unstream(model)
            assert all(g.dtype == torch.bfloat16 for g in got.values())
            found.append(total_error(got, exact) / total_error(own, exact))
    logs = {size: torch.tensor(found).log() for size, found in ratios.items()}
    means = {size: float(log.mean()) for size, log in logs.items()}
    # The mean of so many draws, within two standard errors of being no larger.
    assert all(means[size] <= 2 * float(logs[size].std()) / BF16_MODELS**0.5 for size in ratios), means
    assert max(means.values()) <= 0.02, means
    assert means[16] <= means[512] + 0.02, means


def test_weight_gradients_are_summed_in_fp32() -> None:
    """With 256 chunks, the error of a bf16 weight's gradient is that of one rounding, not of 256."""
    model = build("gpt2", torch.bfloat16)
    ids = tokens(1, 512)
    _, exact = plain(copy.deepcopy(model).double(), ids, ids, 512)
    trunkline.stream(model, chunk_size=2)
    _, got = streamed(model, ids, ids, 512)
    # The last layer's norm bias: a sum over all tokens of a gradient that has passed the head only.
    name = "transformer.ln_f.bias"
    # One rounding of the sum (2^-9) and one of each token's gradient (2^-9, averaged over 512 of them).
    assert relative_error(got[name], exact[name]) < 1.5 * 2**-9


def test_fp16_gradients_survive_a_million_tokens() -> None:
    """Divided by 2^20 and multiplied by a loss scale of 2^20, nothing underflows on the way: same as without both."""
    model = build("gpt2", torch.float16)
    ids = tokens(1, 64)
    _, exact = plain(copy.deepcopy(model).double(), ids, ids, 1)
    trunkline.stream(model, chunk_size=16)
    loss = model(input_ids=ids, labels=ids, num_items_in_batch=2**20).loss
    (loss * 2**20).backward()
    assert total_error(collect(model), exact) < 4e-3  # 2^-11 a rounding, a few roundings deep


@pytest.mark.parametrize("factor", [0.5, -3.0, 1e-4])
def test_loss_may_be_scaled_and_added(factor: float) -> None:
    model = build("llama", torch.float32)
    ids, other = tokens(1, 37), tokens(1, 21, seed=5)
    exact = copy.deepcopy(model).double()
    (
        factor * cross_entropy(exact(input_ids=ids).logits, ids) / 36
        + cross_entropy(exact(input_ids=other).logits, other) / 20
    ).backward()
    expected = collect(exact)
    trunkline.stream(model, chunk_size=8)
    first = model(input_ids=ids, labels=ids).loss  # two forwards are outstanding before the backward
    second = model(input_ids=other, labels=other).loss
    (factor * first + second).backward()
    got = collect(model)
    assert max(relative_error(got[name], g) for name, g in expected.items()) < 1e-5


def test_gradients_accumulate_over_micro_batches() -> None:
    model = build("llama-tied")
    parts = [tokens(1, n, seed=n) for n in (30, 12)]
    expected = [plain(model, ids, ids) for ids in parts]
    trunkline.stream(model, chunk_size=8)
    for ids in parts:
        model(input_ids=ids, labels=ids, num_items_in_batch=71).loss.backward()
    got = collect(model)
    for name in got:
        assert relative_error(got[name], expected[0][1][name] + expected[1][1][name]) < 1e-8


FREEZES = {
    "all but one layer": lambda name: ".layers.1." in name,
    "all but the head": lambda name: name == "lm_head.weight",
    "the embedding": lambda name: "embed_tokens" not in name,
    "all but the embedding": lambda name: "embed_tokens" in name,
    "all but the final norm": lambda name: name == "model.norm.weight",
    "all but one projection": lambda name: name == "model.layers.0.self_attn.o_proj.weight",
    "all but the values of the lowest layer": lambda name: name == "model.layers.0.self_attn.v_proj.weight",
}


@pytest.mark.parametrize("keep", KEEPS, ids=["nothing", "attention", "kv", "both"])
@pytest.mark.parametrize("freeze", FREEZES)
def test_frozen_parameters_get_no_gradient(freeze: str, keep: tuple[str, ...]) -> None:
    model = build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(FREEZES[freeze](name))
    ids = tokens(2, 37)
    expected = plain(model, ids, ids)
    assert expected[1]
    trunkline.stream(model, chunk_size=8, keep=keep)
    check(streamed(model, ids, ids), expected, FP64)


def test_a_frozen_model_has_a_loss_without_a_graph() -> None:
    model = build("llama").requires_grad_(False)
    ids = tokens(1, 20)
    expected = cross_entropy(model(input_ids=ids).logits, ids) / 19
    trunkline.stream(model, chunk_size=8)
    loss = model(input_ids=ids, labels=ids).loss
    assert not loss.requires_grad
    assert abs(float(loss - expected)) < 1e-12


@pytest.mark.parametrize(
    ("before", "targets"),
    list(itertools.product([True, False], [["q_proj", "v_proj"], ["k_proj", "down_proj"], "all-linear"])),
)
def test_lora_added_before_or_after_stream(before: bool, targets: list[str] | str) -> None:
    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets, lora_dropout=0.0))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zero at first: the gradient of A would be zero, too
                parameter.data.normal_(0, 0.1)
        return adapted.double()

    ids = tokens(2, 37)
    expected = plain(adapted(build("llama")), ids, ids)
    model = build("llama")
    if before:
        model = adapted(model)
        trunkline.stream(model, chunk_size=8)
    else:
        trunkline.stream(model, chunk_size=8)
        model = adapted(model)
    got = streamed(model, ids, ids)
    assert all("lora" in name for name in got[1])
    check(got, expected, FP64)


def test_padding_on_the_right_counts_for_nothing() -> None:
    model = build("llama")
    rows = [tokens(1, n, seed=n) for n in (29, 13, 5)]
    parts = [plain(model, ids, ids) for ids in rows]
    batch = tokens(3, 40, seed=9)  # the padding is arbitrary tokens, labels and all
    mask = torch.zeros_like(batch)
    for i, ids in enumerate(rows):
        batch[i, : ids.shape[1]] = ids[0]
        mask[i, : ids.shape[1]] = 1
    trunkline.stream(model, chunk_size=8)
    loss = model(input_ids=batch, labels=batch, attention_mask=mask, num_items_in_batch=71).loss
    loss.backward()
    assert abs(float(loss.detach() - sum(part[0] for part in parts))) < 1e-12
    got = collect(model)
    for name, gradient in got.items():
        assert relative_error(gradient, sum(part[1][name] for part in parts)) < 1e-8
    mean = model(input_ids=batch, labels=batch, attention_mask=mask).loss
    assert abs(float(mean.detach()) - float(loss.detach()) * 71 / (28 + 12 + 4)) < 1e-12


def test_shift_labels_and_positions_that_do_not_start_at_zero() -> None:
    model = build("llama")
    ids = tokens(2, 37)
    targets = tokens(2, 37, seed=4)
    targets[:, 5] = -100
    positions = torch.arange(100, 137)[None]
    logits = model(input_ids=ids, position_ids=positions).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    trunkline.stream(model, chunk_size=8)
    got = model(input_ids=ids, shift_labels=targets, position_ids=positions).loss
    assert abs(float(got - loss)) < 1e-12


def test_evaluation_returns_last_logits() -> None:
    """Without gradients the loss is that of training; without labels the last logits are transformers' own."""
    model = build("granite").eval()
    ids = tokens(2, 37)
    logits = model(input_ids=ids).logits
    loss = cross_entropy(logits, ids) / 72
    trunkline.stream(model, chunk_size=8)
    with torch.no_grad():
        evaluated = model(input_ids=ids, labels=ids).loss
        assert not evaluated.requires_grad
        torch.testing.assert_close(model(input_ids=ids).logits, logits[:, -1:])
        torch.testing.assert_close(model(input_ids=ids, logits_to_keep=11).logits, logits[:, -11:])
        torch.testing.assert_close(model(input_ids=ids, logits_to_keep=99).logits, logits)
    trained = model(input_ids=ids, labels=ids).loss
    assert abs(float(evaluated - loss)) < 1e-12
    assert float(trained) == float(evaluated)
    assert model(ids, labels=ids, return_dict=False)[0] == evaluated
