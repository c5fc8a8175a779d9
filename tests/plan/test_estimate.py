"""An estimate equals the real step: every tier's peak and every lane's bytes, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import others_in_soak
from families import build
from oracle import positions, tokens
from peft import LoraConfig, get_peft_model
from plan.profiles import constant

import trunkline
from trunkline.distributed.mesh import ParallelDims
from trunkline.plan.estimate import estimate
from trunkline.plan.meta_model import MetaModel

WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 9}
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}


def case(family: str = "llama", seq_len: int = 37, batch: int = 1, **more: Any) -> dict[str, Any]:
    """Return a step: its model, tokens, changes of the model, and settings of `stream`."""
    return {"family": family, "seq_len": seq_len, "batch": batch, **more}


# Steps that no other test estimates: test_budgets.py varies `keep`, `checkpoint_every` and `prefetch` on a disk.
STEPS = {
    "all on the device": case("gpt2", batch=2, chunk_size=8),
    "a chunk of one token": case(seq_len=9, chunk_size=1, device_budget="8KiB"),
    "one chunk longer than the row": case(seq_len=7, chunk_size=64),
    "nothing kept, all streamed": case(
        seq_len=64, keep=(), chunk_size=4, device_budget="20KiB", attn_strategy="streamed"
    ),
    "head groups": case(seq_len=64, chunk_size=4, device_budget="64KiB", attn_strategy="head_groups"),
    "head groups, nothing kept": case(
        seq_len=64, batch=2, chunk_size=4, keep=(), device_budget="96KiB", attn_strategy="head_groups"
    ),
    "resident beside a full device": case(seq_len=64, chunk_size=4, device_budget="72KiB", attn_strategy="resident"),
    "a short last group of inputs": case(
        "qwen2", num_hidden_layers=5, checkpoint_every=3, chunk_size=4, device_budget="48KiB"
    ),
    "windows": case(
        "mistral", seq_len=64, sliding_window=9, chunk_size=4, device_budget="32KiB", attn_strategy="streamed"
    ),
    "windows of some layers": case("qwen2", seq_len=64, use_sliding_window=True, chunk_size=4, device_budget="64KiB"),
    "documents": case(
        seq_len=64, documents=(5, 30, 1, 28), chunk_size=4, device_budget="32KiB", attn_strategy="streamed"
    ),
    "documents, all on the device": case(seq_len=64, documents=(20, 20, 24), chunk_size=8),
    "adapters": case(seq_len=40, lora=True, chunk_size=4, device_budget="32KiB"),
    "adapters above frozen layers": case(seq_len=40, lora=True, num_hidden_layers=5, above=2, chunk_size=4, keep=()),
    "bf16": case(seq_len=40, batch=2, dtype=torch.bfloat16, chunk_size=4, device_budget="40KiB"),
    "one norm for both branches": case("cohere", chunk_size=4, device_budget="32KiB", keep=("kv",)),
    "math": case(seq_len=40, chunk_size=4, attn_kernel="math", device_budget="40KiB"),
}


def model_of(step: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the model of a step, and its settings of `stream`."""
    given = dict(step)
    family, dtype = given.pop("family"), given.pop("dtype", torch.float32)
    lora, above = given.pop("lora", False), given.pop("above", 0)
    changes = {name: given.pop(name) for name in ("num_hidden_layers", "sliding_window") if name in given}
    if given.pop("use_sliding_window", False):
        changes |= {"use_sliding_window": True, **WINDOWS}
    model = build(family, dtype, **changes)
    if lora:
        layers = list(range(above, model.config.num_hidden_layers))
        model = get_peft_model(model, LoraConfig(**LORA, layers_to_transform=layers))
    return model, {name: value for name, value in given.items() if name not in ("seq_len", "batch", "documents")}


def stepped(model: torch.nn.Module, step: dict[str, Any], settings: dict[str, Any]) -> trunkline.Stats:
    """Run a real step and return its statistics."""
    trunkline.stream(model, **settings)
    ids = tokens(step["batch"], step["seq_len"])
    documents = {"position_ids": positions([step["documents"]] * step["batch"])} if "documents" in step else {}
    trunkline.stats(model)
    model(input_ids=ids, labels=ids, **documents).loss.backward()
    return trunkline.stats(model)


EVERY_RUN = (
    "a chunk of one token", "nothing kept, all streamed", "head groups, nothing kept", "a short last group of inputs",
    "windows of some layers", "documents", "adapters above frozen layers", "bf16", "one norm for both branches",
)  # fmt: skip


@pytest.mark.parametrize("name", others_in_soak(STEPS, EVERY_RUN))
def test_peaks_and_moved_bytes_equal_those_of_the_step(name: str, tmp_path: Path) -> None:
    step = STEPS[name]
    model, settings = model_of(step)
    if "device_budget" in settings:
        settings["offload_dir"] = tmp_path
    found = estimate(
        model, step["seq_len"], batch_size=step["batch"], documents=step.get("documents"), **settings
    )  # fmt: skip
    real = stepped(model, step, settings)
    assert found.peaks == real.peaks
    assert found.moved == {lane: traffic.moved for lane, traffic in real.lanes.items()}
    assert (found.moved["stash"] > 0) == (found.peaks["disk"] > 0) == ("device_budget" in settings)
    assert found.step is None


@pytest.mark.parametrize("budget", [None, "32KiB"])
def test_a_forward_without_gradients_equals_the_real_one(budget: str | None, tmp_path: Path) -> None:
    model = build("llama", torch.float32)
    settings = {"chunk_size": 4, **({"device_budget": budget, "offload_dir": tmp_path} if budget else {})}
    found = estimate(model, 64, backward=False, **settings)
    trunkline.stream(model, **settings)
    with torch.no_grad():
        model(input_ids=tokens(1, 64), labels=tokens(1, 64))
    real = trunkline.stats(model)
    assert found.peaks == real.peaks
    assert found.moved == {lane: traffic.moved for lane, traffic in real.lanes.items()}
    assert 2 * found.peaks["device"] < estimate(model, 64, chunk_size=4).peaks["device"]


def test_the_model_is_not_changed() -> None:
    """Also while it is streamed: its tiers and forward are not touched."""
    model = build("llama", torch.float32)
    trunkline.stream(model, chunk_size=8)
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = torch.random.get_rng_state()
    estimate(model, 64, chunk_size=16, hardware=constant("cpu"))
    assert torch.equal(state, torch.random.get_rng_state())
    assert trunkline.stats(model).peaks["device"] == 0
    assert all(p.device.type == "cpu" and p.grad is None for p in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_one_meta_model_serves_many_estimates() -> None:
    """One estimate does not change the next: parameters are sharded in one, and whole in the other."""
    model = build("llama", torch.float32)
    meta_model = MetaModel.from_model(model)
    sharding_spec = estimate(meta_model, 32, chunk_size=8, parallel_dims=ParallelDims(dp=2))
    assert sharding_spec.memory["device"]["gathered parameters"] > 0
    for _ in range(2):
        assert estimate(meta_model, 32, chunk_size=8) == estimate(model, 32, chunk_size=8)


def test_bad_arguments_are_refused() -> None:
    model = build("llama", torch.float32)

    def refused(match: str, seq_len: Any = 8, **given: Any) -> None:
        with pytest.raises(ValueError, match=match):
            estimate(model, seq_len, **given)

    for wrong in (0, -1, 8.0, True, "1M"):
        refused(f"seq_len={wrong!r}: give a positive whole number", wrong)
    refused("batch_size=0", batch_size=0)
    for documents in ((3, 4), (3, 6), (8, 0), (9, -1), ()):
        refused("lengths of at least 1 token that sum to 8", documents=documents)
    refused("sp=3 does not divide 4 query and 2 key/value heads", parallel_dims=ParallelDims(sp=3))
    refused("dp=0: give a positive whole number", parallel_dims=ParallelDims(dp=0))
    refused("hardware='a100-80': no such profile; there are a100-80g,", hardware="a100-80")
    refused(
        "collectives within a node, which 2 ranks need", parallel_dims=ParallelDims(sp=2), hardware=constant(intra=None)
    )
    refused("device_budget leaves 4.0 KiB", 64, device_budget="4KiB", chunk_size=4)
    refused("device_budget='lots'", device_budget="lots")
    refused(r"chunksize is not a setting of stream\(\): did you mean chunk_size", chunksize=4)
    refused("mesh: an estimate needs no ranks", mesh={"sp": 2})
    refused("parallel_dims={'sp': 2}: give trunkline.ParallelDims", parallel_dims={"sp": 2})


def test_a_dtype_without_figures_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'made-up' has no figures of .* for torch.float64, only for bf16, fp32"):
        estimate(build("llama", torch.float64), 8, hardware=constant())
