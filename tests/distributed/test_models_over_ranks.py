"""Models over ranks: offloading, micro-batches, precision, adapters, dropout, evaluation, saving."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from oracle import Gradients, collect, cross_entropy, plain, relative_error, tokens, total_error
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import trunkline
from distributed.processes import run


def whole(gradients: Gradients) -> Gradients:
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in gradients.items()}


def worst(got: Gradients, expected: Gradients) -> float:
    assert got.keys() == expected.keys()
    floor = 1e-6 * sum(float(g.norm()) ** 2 for g in expected.values()) ** 0.5
    found = whole(got)
    return max(float((found[name] - g).norm()) / max(float(g.norm()), floor) for name, g in expected.items())


def streamed(
    parallel_dims: dict[str, int], zero: int | None = 3, model: nn.Module | None = None, **settings: Any
) -> nn.Module:
    mesh = trunkline.init_mesh(**parallel_dims)

    if zero is not None:
        trunkline.shard(model, mesh, zero=zero)
    return trunkline.stream(model, mesh=mesh, **{"chunk_size": 8, **settings})


# -- tiers -----------------------------------------------------------------------------------------------------------


def with_tiers(parallel_dims: dict[str, int], folder: str, cases: list[dict[str, Any]]) -> list[float]:
    errors = []
    model = build("llama", num_attention_heads=8, num_key_value_heads=4, head_dim=4)
    ids = tokens(2, 93)
    expected = plain(copy.deepcopy(model), ids, ids, 184)[1]
    mesh = trunkline.init_mesh(**parallel_dims)
    trunkline.shard(model, mesh)
    for case in cases:
        trunkline.stream(model, mesh=mesh, chunk_size=8, offload_dir=folder, **case)
        model(input_ids=ids, labels=ids).loss.backward()
        errors.append(worst(collect(model), expected))
        meters = trunkline.stats(model)
        assert meters.peaks["device"] <= case["device_budget"]
        assert meters.peaks["disk"] > 0
        assert meters.lanes["comm"].moved > 0
    return errors


OFFLOADED: list[dict[str, Any]] = [
    {"attn_strategy": strategy, "device_budget": budget, "keep": keep, "checkpoint_every": every}
    for strategy, budget in (("streamed", 90_000), ("head_groups", 110_000), ("auto", 130_000))
    for keep, every in ((("attention",), 1), ((), 3), (("attention", "kv"), 2))
]


@pytest.mark.parametrize(
    ("parallel_dims", "cases"),
    [
        pytest.param({"sp": 2}, OFFLOADED[::8], id="sp"),
        pytest.param({"cp": 2}, OFFLOADED[4:5], id="cp"),
        pytest.param({"sp": 2}, OFFLOADED, id="sp-all", marks=pytest.mark.soak),
        pytest.param({"cp": 2}, OFFLOADED, id="cp-all", marks=pytest.mark.soak),
    ],
)
def test_gradients_and_budgets_with_offloading(
    parallel_dims: dict[str, int], cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    for errors in run(2, with_tiers, parallel_dims, str(tmp_path), cases):
        assert max(errors) < 1e-8, dict(zip(map(str, cases), errors, strict=True))
    assert not list(tmp_path.iterdir())


# -- micro-batches and forwards that are outstanding -----------------------------------------------------------------


def micro_batches(zero: int) -> float:
    model = build("llama")
    rank = None
    parts = [[tokens(1, n + 3 * r, seed=n + r) for n in (30, 12, 21)] for r in range(2)]
    exact = copy.deepcopy(model)
    for part in parts:
        for ids in part:
            (cross_entropy(exact(input_ids=ids).logits, ids) / 71).backward()
    model = streamed({"dp": 2}, zero or None, model)
    rank = torch.distributed.get_rank()
    for number, ids in enumerate(parts[rank]):
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=71).loss
        if number < 2:
            with trunkline.no_sync(model):
                loss.backward()
            assert all(p.grad is None for p in model.parameters())
        else:
            loss.backward()
    return worst(collect(model), collect(exact))


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_micro_batches_are_reduced_together(zero: int) -> None:
    assert max(run(2, micro_batches, zero)) < 1e-8


def outstanding() -> float:
    model = build("llama")
    first, second = tokens(1, 37), tokens(1, 21, seed=5)
    exact = copy.deepcopy(model)
    losses = [cross_entropy(exact(input_ids=ids).logits, ids) / (ids.shape[1] - 1) for ids in (first, second)]
    (losses[0] - 3 * losses[1]).backward()
    model = streamed({"sp": 2}, 2, model)
    a, b = (model(input_ids=ids, labels=ids).loss for ids in (first, second))
    (a - 3 * b).backward()
    return worst(collect(model), collect(exact))


def test_two_forwards_before_one_backward() -> None:
    # Scaled by -3 after the head has divided: transformers' norms, fp32 inside, round otherwise.
    assert max(run(2, outstanding)) < 1e-6


# -- precision -------------------------------------------------------------------------------------------------------


def precision() -> tuple[list[float], bool]:
    """Return gradient errors of fp32 shards gathered in bf16, divided by those of transformers in bf16."""
    ratios = []
    mesh = trunkline.init_mesh(sp=2)
    good = True
    for seed in range(8):
        model = build("llama", torch.float32, seed=seed)
        rounded = copy.deepcopy(model).bfloat16()
        ids = tokens(1, 128, seed=seed)
        exact = plain(copy.deepcopy(rounded).double(), ids, ids, 127)[1]
        own = total_error(plain(rounded, ids, ids, 127)[1], exact)
        trunkline.shard(model, mesh, param_dtype=torch.bfloat16)
        trunkline.stream(model, mesh=mesh, chunk_size=16)
        model(input_ids=ids, labels=ids).loss.backward()
        gradients = collect(model)
        good = good and all(isinstance(g, DTensor) and g.dtype == torch.float32 for g in gradients.values())
        ratios.append(total_error(whole(gradients), exact) / own)
    return ratios, good


@pytest.mark.soak
def test_bf16_compute_of_fp32_shards_is_no_worse_than_transformers() -> None:
    for ratios, good in run(2, precision):
        assert good
        logs = torch.tensor(ratios).log()
        # The mean of so many draws, within two standard errors of being no larger.
        assert float(logs.mean()) <= 2 * float(logs.std()) / len(ratios) ** 0.5, ratios


# -- adapters and frozen layers --------------------------------------------------------------------------------------


def adapted(parallel_dims: dict[str, int], zero: int | None) -> float:
    torch.manual_seed(3)
    model: nn.Module = get_peft_model(build("llama"), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)
    model = model.double()
    ids = tokens(2, 37)
    expected = plain(copy.deepcopy(model), ids, ids, 72)[1]
    model = streamed(parallel_dims, zero, model)
    model(input_ids=ids, labels=ids).loss.backward()
    return worst(collect(model), expected)


@pytest.mark.parametrize(("parallel_dims", "zero"), [({"sp": 2}, 3), ({"cp": 2}, 2), ({"sp": 2}, None)])
def test_lora_gradients(parallel_dims: dict[str, int], zero: int | None) -> None:
    assert max(run(2, adapted, parallel_dims, zero)) < 1e-8


def frozen() -> float:
    model = build("llama-tied")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".layers.1." in name)
    ids = tokens(1, 37)
    expected = plain(copy.deepcopy(model), ids, ids, 36)[1]
    model = streamed({"sp": 2}, 3, model)
    model(input_ids=ids, labels=ids).loss.backward()
    error = worst(collect(model), expected)
    for parameter in model.parameters():  # another choice, after shard
        parameter.requires_grad_(True)
    exact = build("llama-tied")
    expected = plain(exact, ids, ids, 36)[1]
    model(input_ids=ids, labels=ids).loss.backward()
    return max(error, worst(collect(model), expected))


def test_frozen_layers_may_change_after_shard() -> None:
    assert max(run(2, frozen)) < 1e-8


# -- dropout ---------------------------------------------------------------------------------------------------------


def dropout() -> tuple[float, float]:
    """Return the slope of the loss by autograd and by finite differences, under dropout."""
    model = build("gpt2", resid_pdrop=0.3, embd_pdrop=0.1)
    model = streamed({"sp": 2}, None, model)
    ids = tokens(1, 24)
    parameter = dict(model.named_parameters())["transformer.h.1.mlp.c_fc.bias"]

    def loss() -> torch.Tensor:
        torch.manual_seed(5)
        return model(input_ids=ids, labels=ids).loss

    loss().backward()
    assert parameter.grad is not None
    direction = torch.ones_like(parameter)
    slope = float((parameter.grad * direction).sum())
    values = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
            values.append(float(loss()))
            parameter.add_(direction, alpha=-step)
    return slope, (values[0] - values[1]) / 2e-5


def test_dropout_mask_is_the_same_in_replay() -> None:
    for slope, difference in run(2, dropout):
        assert slope == pytest.approx(difference, rel=1e-5)


def autocast() -> list[tuple[str, str]]:
    model = streamed({"sp": 2}, None, build("llama", torch.float32))
    ids = tokens(1, 40)
    found: list[tuple[str, str]] = []
    sweep = ""

    def note(module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        found.append((sweep, str(output.dtype)))

    for name in ("self_attn.q_proj", "mlp.down_proj"):
        model.get_submodule(f"model.layers.1.{name}").register_forward_hook(note)
    with torch.autocast("cpu", torch.bfloat16):
        sweep = "forward"
        loss = model(input_ids=ids, labels=ids).loss
    sweep = "backward"
    loss.backward()
    return found


def test_autocast_holds_in_a_replay_that_starts_inside_a_backward() -> None:
    found = run(2, autocast)[0]
    assert {sweep for sweep, _ in found} == {"forward", "backward"}
    assert {dtype for _, dtype in found} == {"torch.bfloat16"}


def seed_offset(parallel_dims: dict[str, int]) -> int:
    from trunkline.distributed.mesh_ranks import MeshRanks

    return MeshRanks(trunkline.init_mesh(**parallel_dims)).seed_offset


def test_seed_differs_between_ranks_with_different_tokens() -> None:
    for parallel_dims in ({"sp": 2}, {"cp": 2}, {"dp": 2}):
        assert len(set(run(2, seed_offset, parallel_dims))) == 2
    assert (
        len(set(run(2, seed_offset, {"tp": 2}))) == 1
    )  # the same tokens: dropped alike, or the ranks would drift apart


def stale(zero: int) -> float:
    """Return the error of a loss after an optimizer step that follows a forward without backward."""
    model = build("llama")
    ids = tokens(1, 37)
    changed = copy.deepcopy(model)
    model = streamed({"sp": 2}, zero, model)
    parameters = list(model.parameters())  # as an optimizer has them
    model(input_ids=ids, labels=ids)
    with torch.no_grad():
        for mine, theirs in zip(parameters, changed.parameters(), strict=True):
            mine.mul_(0.9)
            theirs.mul_(0.9)
    expected = cross_entropy(changed(input_ids=ids).logits, ids) / 36
    return abs(float(model(input_ids=ids, labels=ids).loss.detach() - expected.detach()))


@pytest.mark.parametrize("zero", [2, 3])
def test_weights_are_gathered_again_after_an_optimizer_step(zero: int) -> None:
    assert max(run(2, stale, zero)) < 1e-12


# -- evaluation ------------------------------------------------------------------------------------------------------


def evaluation(parallel_dims: dict[str, int]) -> list[float]:
    model = build("granite").eval()
    ids = tokens(2, 37)
    logits = model(input_ids=ids).logits
    model = streamed(parallel_dims, 3, model)
    errors = []
    with torch.no_grad():
        errors.append(abs(float(model(input_ids=ids, labels=ids).loss) - float(cross_entropy(logits, ids)) / 72))
        for keep in (0, 11, 99):
            got = model(input_ids=ids, logits_to_keep=keep).logits
            errors.append(relative_error(got, logits[:, -max(keep, 1) :]))
    trunkline.unstream(model)  # FSDP2's own again
    with torch.no_grad():
        errors.append(relative_error(model(input_ids=ids).logits, logits))
    return errors


@pytest.mark.parametrize("parallel_dims", [{"sp": 2}, {"cp": 2}], ids=["sp", "cp"])
def test_evaluation_logits_and_unstream(parallel_dims: dict[str, int]) -> None:
    for errors in run(2, evaluation, parallel_dims):
        assert max(errors) < 1e-6


# -- copies, adapters put on late, hooks of tensor parallelism -------------------------------------------------------


def copies_and_late_adapters() -> list[float]:
    mesh = trunkline.init_mesh(sp=2)
    ids = tokens(1, 37)
    model = trunkline.stream(build("llama"), mesh=mesh, chunk_size=8)
    exact = build("llama")
    expected = plain(exact, ids, ids, 36)[1]
    copied = copy.deepcopy(model)
    copied(input_ids=ids, labels=ids).loss.backward()
    errors = [worst(collect(copied), expected)]
    assert all(p.grad is None for p in model.parameters())
    torch.manual_seed(3)
    late = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])).double()
    torch.manual_seed(3)
    exact = get_peft_model(exact, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])).double()
    expected = plain(exact, ids, ids, 36)[1]
    late(input_ids=ids, labels=ids).loss.backward()
    return [*errors, worst(collect(late), expected)]


def test_copied_models_and_adapters_added_after_stream() -> None:
    for errors in run(2, copies_and_late_adapters):
        assert max(errors) < 1e-8


def late_adapters_that_differ() -> str:
    mesh = trunkline.init_mesh(sp=2)
    model = trunkline.stream(build("llama"), mesh=mesh, chunk_size=8)
    torch.manual_seed(torch.distributed.get_rank())
    late = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])).double()
    ids = tokens(1, 20)
    try:
        late(input_ids=ids, labels=ids)
    except ValueError as error:
        return str(error)
    return ""


def test_adapters_that_differ_between_ranks_are_refused() -> None:
    assert all("holds other weights than the other ranks" in text for text in run(2, late_adapters_that_differ))


def saved(parallel_dims: dict[str, int], zero: int, folder: str) -> list[bool]:
    """Return for each saved weight, of a model and of adapters, whether it equals the original."""
    found = []
    for adapters in (False, True):
        model = build("llama", num_attention_heads=8, num_key_value_heads=4, head_dim=4)
        if adapters and "tp" in parallel_dims:
            continue
        if adapters:
            torch.manual_seed(3)
            model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        expected = {name: x.clone() for name, x in model.state_dict().items()}
        streamed(parallel_dims, zero, model)
        model.save_pretrained(f"{folder}/{adapters}")
        again: Any = build("llama", num_attention_heads=8, num_key_value_heads=4, head_dim=4)
        if adapters:
            again = PeftModel.from_pretrained(again, f"{folder}/{adapters}")
        else:
            again = AutoModelForCausalLM.from_pretrained(f"{folder}/{adapters}", dtype="auto")
        found += [bool(torch.equal(x, expected[name])) for name, x in again.state_dict().items()]
        assert len(again.state_dict()) == len(expected)
    return found


@pytest.mark.parametrize(
    ("parallel_dims", "zero"),
    [({"sp": 2}, 3), ({"dp": 2}, 2), ({"cp": 2}, 0), ({"tp": 2}, 0)],
    ids=["3", "2", "0", "tp"],
)
def test_save_pretrained_writes_unsharded_weights(parallel_dims: dict[str, int], zero: int, tmp_path: Path) -> None:
    for found in run(2, saved, parallel_dims, zero, str(tmp_path)):
        assert found
        assert all(found)
    assert json.loads((tmp_path / "False/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def norms_of_heads() -> list[float]:
    """Return gradient errors before, during and after streaming, and of two backward passes into one gradient."""
    mesh = trunkline.init_mesh(tp=2)
    ids = tokens(1, 37)
    exact = build("qwen3")
    expected = plain(exact, ids, ids, 36)[1]
    model = trunkline.shard(build("qwen3"), mesh, zero=0)
    errors = [worst(plain(model, ids, ids, 36)[1], expected)]
    for _ in range(2):
        trunkline.stream(model, mesh=mesh, chunk_size=8)
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
        errors.append(worst(collect(model), {name: 2 * g for name, g in expected.items()}))
        trunkline.unstream(model)
        errors.append(worst(plain(model, ids, ids, 36)[1], expected))
    return errors


def test_norms_of_queries_and_keys_are_reduced_once_over_tp() -> None:
    for errors in run(2, norms_of_heads):
        assert max(errors) < 1e-6, errors
