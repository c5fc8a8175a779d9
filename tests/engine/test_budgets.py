"""Streamed models whose stores are spread over tiers: the same gradients, within the budgets, whatever the lanes do."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from adversary import AdversaryBackend
from cases import all_pairs, others_in_soak
from families import build
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import Operators
from oracle import alone, check, collect, packed, plain, positions, relative_error, streamed, tokens
from transformers import LlamaConfig, LlamaForCausalLM

import trunkline
from trunkline.offload.placement import FitHints, Placement, StoreRequest, _in_flight_bytes
from trunkline.offload.storage import TierError
from trunkline.offload.stores import Stores, Tiers
from trunkline.plan.estimate import Estimate, estimate

FP64 = torch.float64
KEEPS = [(), ("attention",), ("kv",), ("attention", "kv")]
_models = {family: build(family) for family in ("llama", "gpt2", "cohere", "mistral")}


def tiers_of(model: torch.nn.Module) -> Tiers:
    return model.forward.tiers


def with_adversary(model: torch.nn.Module, seed: int, device: int, host: int, prefetch: int) -> Tiers:
    """Give a streamed model the tiers of the adversary, with a large disk."""
    budgets = {"device": device, "host": host, "disk": 2**24}
    return put_tiers(model, Tiers(budgets, AdversaryBackend(seed), prefetch))


def put_tiers(model: torch.nn.Module, tiers: Tiers) -> Tiers:
    model.forward._tiers, model.forward._tiers_device = tiers, torch.device("cpu")
    return tiers


ANYTHING: dict[str, Any] = {
    "family": st.sampled_from(sorted(_models)),
    "batch": st.integers(1, 2),
    "seq_len": st.integers(1, 40),
    "chunk_size": st.integers(1, 12),
    "keep": st.sets(st.sampled_from(["attention", "kv"])),
    "checkpoint_every": st.integers(1, 4),
    "prefetch": st.integers(1, 4),
    "share": st.floats(0, 1.1),
    "host": st.integers(0, 20_000),
    "attn_kernel": st.sampled_from(["auto", "math"]),
    "attn_strategy": st.sampled_from(["auto", "head_groups", "streamed"]),
    "seed": st.integers(0, 2**16),
    "window": st.none() | st.integers(1, 20),  # of one of the families
    "cuts": st.lists(st.sets(st.integers(1, 39), max_size=4), min_size=2, max_size=2),  # between documents
}


@settings(max_examples=20, deadline=None)  # many more in test_soak.py
@given(**ANYTHING)
def test_gradients_are_exact_within_any_budget_and_any_order_of_transfers(**choice: Any) -> None:
    """Gradients are the same, and no budget is exceeded, from the smallest budget to one that keeps everything."""
    check_any_budget(**choice)


def check_any_budget(
    family: str, batch: int, seq_len: int, chunk_size: int, keep: Iterable[str], checkpoint_every: int, prefetch: int,
    share: float, host: int, attn_kernel: str, attn_strategy: Any, seed: int, window: int | None, cuts: list[set[int]],
) -> None:  # fmt: skip
    model = _models[family]
    if family == "mistral":
        model.config.sliding_window = window
    ids = tokens(batch, seq_len, seed=seed)
    ends = [[*sorted(cut for cut in row if cut < seq_len), seq_len] for row in cuts[:batch]]
    lengths = [[b - a for a, b in pairwise([0, *row])] for row in ends]
    if all(n == 1 for row in lengths for n in row):
        return
    expected = alone(model, ids, lengths)
    settings = {"attn_kernel": attn_kernel, "checkpoint_every": checkpoint_every, "prefetch": prefetch}
    settings |= {"attn_strategy": attn_strategy, "device_budget": 2**40}
    trunkline.stream(model, chunk_size=chunk_size, keep=keep, **settings)
    try:
        least, everything = sizes(model, ids, prefetch, position_ids=positions(lengths))
        device = int(least + share * max(everything - least, 0))
        tiers = with_adversary(model, seed, device, host, prefetch)
        with nothing_left():
            got = packed(model, ids, position_ids=positions(lengths))
    finally:
        trunkline.unstream(model)
    if seq_len > 1:
        # In two halves Cohere's one norm for both branches, in fp32 as transformers computes it, is gone through twice.
        twice = family == "cohere" and attn_strategy != "streamed"
        check(got, expected, FP64, family, tolerance=1e-6 if twice else None)
    for account in tiers.budgets.values():
        assert account.budget is not None
        assert account.peak <= account.budget
        assert account.held == 0


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Check that a step has released everything by itself before its stores are closed."""
    left, close = [], Stores.close

    def look(stores: Stores) -> None:
        stores.flush_all()
        left.append(stores.held)
        close(stores)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stores, "close", look)
        yield
    assert left
    assert not any(left), left


def sizes(model: torch.nn.Module, ids: torch.Tensor, prefetch: int, **given: Any) -> tuple[int, int]:
    """Return the smallest device budget that fits a batch, and the smallest that keeps everything on the device."""

    class Asking(Tiers):
        def place(self, requests: Sequence[StoreRequest], advice: FitHints | None = None) -> Placement:
            asked.extend(requests)
            return super().place(requests, advice)

    asked: list[StoreRequest] = []
    put_tiers(model, Asking({"device": 2**40, "host": None, "disk": 2**24}, AdversaryBackend(0), prefetch))
    packed(model, ids, **given)
    everything = sum(request.nbytes for request in asked)
    inner = sum(request.nbytes for request in asked if request.group == "inner")
    least = inner + _in_flight_bytes([request for request in asked if request.group != "inner"])
    return min(least, everything) if all(request.allow_resident for request in asked) else least, everything


@pytest.mark.parametrize(
    ("keep", "checkpoint_every"),
    others_in_soak(itertools.product(KEEPS, (1, 2, 3)), list(zip(KEEPS, (3, 2, 1, 2), strict=True))),
)
def test_offloading_to_disk_changes_nothing(keep: tuple[str, ...], checkpoint_every: int, tmp_path: Path) -> None:
    """Loss and gradients differ by the order of sums only, dropout included."""
    ids = tokens(2, 37)
    gradients = []
    for disk in (None, tmp_path):
        model = build("gpt2", torch.float32, resid_pdrop=0.3, embd_pdrop=0.2, n_layer=5)
        trunkline.stream(model, chunk_size=4, keep=keep, checkpoint_every=checkpoint_every)
        if disk is not None:
            least, everything = sizes(model, ids, 2)
            budget = (least + everything) // 2
            trunkline.stream(
                model,
                chunk_size=4,
                keep=keep,
                checkpoint_every=checkpoint_every,
                device_budget=budget,
                offload_dir=disk,
            )
        torch.manual_seed(5)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients.append((loss.detach(), collect(model)))
    assert tiers_of(model).budgets["disk"].peak > 0
    assert float(gradients[0][0]) == pytest.approx(float(gradients[1][0]), rel=1e-6)
    for name, expected in gradients[0][1].items():
        assert relative_error(gradients[1][1][name], expected) < 2e-6


@pytest.mark.parametrize("keep", KEEPS, ids=["nothing", "attention", "kv", "both"])
def test_checkpoint_every_is_bitwise(keep: tuple[str, ...]) -> None:
    """Inputs that are computed again are the same inputs, dropout and all."""
    ids = tokens(2, 37)
    gradients = []
    for checkpoint_every in (1, 2, 4, 7):
        model = build("gpt2", torch.float32, resid_pdrop=0.3, embd_pdrop=0.2, n_layer=5)
        trunkline.stream(model, chunk_size=8, keep=keep, checkpoint_every=checkpoint_every)
        torch.manual_seed(5)
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append(collect(model))
    for got in gradients[1:]:
        assert all(torch.equal(got[name], expected) for name, expected in gradients[0].items())


def test_threads_share_a_budget_one_after_another(tmp_path: Path) -> None:
    model = build("llama")
    trunkline.stream(model, chunk_size=4, device_budget="48KiB", offload_dir=tmp_path)
    ids = [tokens(1, 37, seed=seed) for seed in range(4)]

    def loss(x: torch.Tensor) -> float:
        with torch.no_grad():
            return float(model(input_ids=x, labels=x).loss)

    expected = [loss(x) for x in ids]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(loss, ids * 3)) == expected * 3


def test_several_forwards_may_wait_for_their_backward(tmp_path: Path) -> None:
    model = build("llama")
    batches = [tokens(1, 37, seed=1), tokens(1, 21, seed=2)]
    expected = [plain(model, ids, ids) for ids in batches]
    trunkline.stream(model, chunk_size=4, device_budget="64KiB", offload_dir=tmp_path)
    first, second = (model(input_ids=ids, labels=ids, num_items_in_batch=71).loss for ids in batches)
    second.backward()
    first.backward()
    got = collect(model)
    for name, gradient in got.items():
        assert relative_error(gradient, expected[0][1][name] + expected[1][1][name]) < 1e-8
    assert [account.held for account in tiers_of(model).budgets.values()] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


def test_evaluation_and_last_logits_within_a_budget(tmp_path: Path) -> None:
    model = build("granite").eval()
    ids = tokens(2, 37)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        trunkline.stream(model, chunk_size=4, device_budget="24KiB", offload_dir=tmp_path)
        torch.testing.assert_close(model(input_ids=ids, logits_to_keep=11).logits, logits[:, -11:])
        got = model(input_ids=ids, labels=ids).loss
        trunkline.stream(model, chunk_size=4)
        assert abs(float(got - model(input_ids=ids, labels=ids).loss)) < 1e-12


def test_a_full_disk_leaves_the_model_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    ids = tokens(1, 37)
    expected = plain(model, ids, ids)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trunkline.stream(model, chunk_size=4, device_budget="40KiB", offload_dir=tmp_path)
    real, calls = os.pwrite, []

    def filling(*args: Any) -> int:
        calls.append(1)
        if len(calls) == 12:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", filling)
    with pytest.raises(TierError, match="No space left on device"):
        streamed(model, ids, ids)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert [account.held for account in tiers_of(model).budgets.values()] == [0, 0, 0]
    gc.collect()
    for _ in range(2):
        model.zero_grad()
        check(streamed(model, ids, ids), expected, FP64)
        assert [account.held for account in tiers_of(model).budgets.values()] == [0, 0, 0]


def test_budgets_that_are_too_small() -> None:
    model = build("llama")
    trunkline.stream(model, chunk_size=8, device_budget=1_000)
    with pytest.raises(ValueError, match="use chunk_size below 8 or prefetch=1, or raise device_budget"):
        model(input_ids=tokens(1, 37), labels=tokens(1, 37))
    trunkline.stream(model, chunk_size=1, device_budget=20_000)
    with pytest.raises(ValueError, match="a step does not fit"):
        model(input_ids=tokens(1, 99), labels=tokens(1, 99))


@pytest.mark.parametrize(
    ("keep", "checkpoint_every", "prefetch"),
    others_in_soak(
        itertools.product(KEEPS, (1, 2), (1, 2, 3)), list(zip(KEEPS, (2, 1, 2, 1), (1, 2, 3, 1), strict=True))
    ),
)
def test_an_estimate_equals_the_step_to_the_byte(
    keep: tuple[str, ...], checkpoint_every: int, prefetch: int, tmp_path: Path
) -> None:
    model = build("qwen3", torch.float32)
    ids = tokens(2, 37)
    choice: dict[str, Any] = {
        "chunk_size": 4,
        "keep": keep,
        "checkpoint_every": checkpoint_every,
        "prefetch": prefetch,
        "device_budget": "72KiB",
        "offload_dir": tmp_path,
    }
    trunkline.stream(model, **choice)
    streamed(model, ids, ids)
    tiers = tiers_of(model)
    expected = estimate(model, 37, batch_size=2, **choice)
    assert expected.peaks == {tier: account.peak for tier, account in tiers.budgets.items()}
    assert expected.moved == {lane: traffic.moved for lane, traffic in tiers.lanes.traffic.items()}
    assert expected.moved["stash"] > 0
    with torch.no_grad():
        model(input_ids=ids, labels=ids)
    assert estimate(model, 37, batch_size=2, backward=False, **choice).peaks["disk"] < expected.peaks["disk"]


def test_an_estimate_refuses_bad_lengths_and_prints_one_line() -> None:
    model = build("llama")
    for wrong in ({"seq_len": 0}, {"seq_len": "1M"}, {"seq_len": 8, "batch_size": 0}):
        with pytest.raises(ValueError, match="give a positive whole number"):
            estimate(model, **wrong)
    assert str(Estimate({"device": 3 * 2**29, "host": 0}, {"stash": 0})) == "holds device 1.5 GiB; moves nothing"
    assert str(estimate(model, 8)).endswith("moves nothing")


def test_a_model_too_large_for_this_machine_is_estimated() -> None:
    """Eight billion parameters, a million tokens: everything kept, and the least."""
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=2**20, dtype=torch.bfloat16)
        ).to(torch.bfloat16)  # fmt: skip
    tokens_ = 2**18
    kept = estimate(model, tokens_, device="cuda", chunk_size=2**16)
    # o (8 KiB), lse (128 B) and input (8 KiB) of 32 layers; K/V (4 KiB), fp32 dK/dV (8 KiB) and dy (8 KiB) of one.
    assert kept.peaks["device"] / tokens_ == pytest.approx(32 * (8192 + 128 + 8192) + 4096 + 8192 + 8192, rel=0.01)
    assert kept.moved == {"fetch": 0, "stash": 0}
    least = estimate(model, tokens_, device="cuda", chunk_size=2**16, keep=(), checkpoint_every=4)
    assert least.peaks["device"] / tokens_ < 150 * 1024


@pytest.mark.parametrize(
    ("strategy", "keep", "freeze"),
    all_pairs(
        ["head_groups", "streamed"],
        KEEPS,
        ["all but the first layer's output projection", "all but the middle layer"],
    ),
)
def test_strategies_with_frozen_parameters(strategy: Any, keep: Any, freeze: str, tmp_path: Path) -> None:
    model = build("llama")
    wanted = "layers.0.self_attn.o_proj" if "first" in freeze else "layers.1."
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(wanted in name)
    ids = tokens(2, 37)
    expected = plain(model, ids, ids)
    trunkline.stream(
        model, chunk_size=4, keep=keep, attn_strategy=strategy, device_budget="96KiB", offload_dir=tmp_path
    )
    check(streamed(model, ids, ids), expected, FP64)
    assert [account.held for account in tiers_of(model).budgets.values()] == [0, 0, 0]


def test_auto_takes_the_first_strategy_that_fits(tmp_path: Path) -> None:
    """The first that fits: all heads at once, some heads at a time, chunk by chunk."""
    model = build("gpt2", n_head=4, n_embd=32)
    ids = tokens(1, 64)
    moved = {}
    for budget in ("1MiB", "60KiB", "20KiB"):
        trunkline.stream(model, chunk_size=2, device_budget=budget, offload_dir=tmp_path)
        streamed(model, ids, ids)
        moved[budget] = trunkline.stats(model).moved
    assert moved["1MiB"] == 0
    assert moved["60KiB"] < moved["20KiB"] / 3  # linear in the number of chunks, and quadratic


@pytest.mark.parametrize(("strategy", "what"), [("resident", "a layer"), ("head_groups", "one head")])
def test_a_strategy_that_does_not_fit_is_refused(strategy: Any, what: str, tmp_path: Path) -> None:
    model = build("llama")
    trunkline.stream(model, chunk_size=2, attn_strategy=strategy, device_budget="24KiB", offload_dir=tmp_path)
    ids = tokens(1, 120)
    with pytest.raises(ValueError, match=f"attn_strategy='{strategy}': .* of {what} do not fit in device_budget"):
        model(input_ids=ids, labels=ids)
    trunkline.stream(model, chunk_size=2, device_budget="24KiB", offload_dir=tmp_path)  # auto finds one that does
    model(input_ids=ids, labels=ids)


def test_recomputed_inputs_with_kept_attention_call_no_kernel() -> None:
    """With attention kept, inputs that are computed again cost no attention; without, one forward of it."""
    ids = tokens(1, 32)
    calls = {}
    for keep in ((), ("attention",)):
        for checkpoint_every in (1, 4):
            model = build("gpt2", torch.float32, n_layer=4)
            trunkline.stream(model, chunk_size=8, keep=keep, checkpoint_every=checkpoint_every)
            loss = model(input_ids=ids, labels=ids).loss
            with Operators() as backward:
                loss.backward()
            calls[keep, checkpoint_every] = backward.counts["_scaled_dot_product_flash_attention_for_cpu"]
    # 4 chunks: 7 calls a layer. Without attention each layer computes it once, in its group's replay or its own.
    assert calls == {((), 1): 28, ((), 4): 28, (("attention",), 1): 0, (("attention",), 4): 0}


def test_disk_and_checkpoint_every_fit_longer_sequences_in_the_same_memory(tmp_path: Path) -> None:
    """The device's peak does not depend on the length: twice as many tokens, the same peak."""
    model = build("llama", torch.float32)
    peaks = []
    for length in (96, 192):
        trunkline.stream(model, chunk_size=8, device_budget="32KiB", offload_dir=tmp_path, checkpoint_every=2)
        streamed(model, tokens(1, length), tokens(1, length))
        peaks.append(trunkline.stats(model).peaks["device"])
    assert max(peaks) <= 32 * 1024
