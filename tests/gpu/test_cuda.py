"""Parity on CUDA: the flash kernels (bf16, fp16) and math (fp32) against plain autograd in fp64."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import build
from oracle import alone, packed, plain, positions, streamed, tokens, total_error
from support_matrix import ROWS

import trunkline

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("keep", [(), ("attention",), ("kv",), ("attention", "kv")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_worse_than_transformers(family: str, dtype: torch.dtype, keep: tuple[str, ...]) -> None:
    heads = {"head_dim": 32} if family == "llama" else {"n_embd": 128}
    model = build(family, dtype, **heads).cuda()
    ids = tokens(2, 300).cuda()
    _, exact = plain(copy.deepcopy(model).double(), ids, ids, 512)
    _, own = plain(model, ids, ids, 512)
    trunkline.stream(model, chunk_size=64, keep=keep)
    _, got = streamed(model, ids, ids, 512)
    floor = 1e-5 if dtype == torch.float32 else 0.0
    assert total_error(got, exact) <= 1.2 * total_error(own, exact) + floor


LENGTHS = [[70, 1, 129, 100], [40, 260]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["Mistral", "Gemma 2", "gpt-oss", "DeepSeek V3 and R1", "Llama 4 (text)"])
def test_documents_windows_and_sinks(family: str, dtype: torch.dtype) -> None:
    (row,) = (row for row in ROWS if row.family == family)
    heads = {} if "DeepSeek" in family else {"head_dim": 32}
    model = replace(row, settings={**row.settings, **heads}).build(dtype=dtype).cuda()
    lengths = LENGTHS[: row.rows]
    ids = tokens(row.rows, 300).cuda()
    _, exact = alone(copy.deepcopy(model).float(), ids, lengths)
    _, own = alone(model, ids, lengths)
    trunkline.stream(model, chunk_size=64)
    _, got = packed(model, ids, position_ids=positions(lengths).cuda())
    floor = 1e-5 if dtype == torch.float32 else 0.0
    assert total_error(got, exact) <= 1.2 * total_error(own, exact) + floor


def test_liger_kernels() -> None:
    """Its norms, MLPs and rotary positions run in the layers; its fused loss is not asked."""
    liger = pytest.importorskip("liger_kernel.transformers")
    model = build("llama", torch.bfloat16, head_dim=32).cuda()
    ids = tokens(2, 300).cuda()
    _, exact = plain(copy.deepcopy(model).double(), ids, ids, 512)
    _, own = plain(model, ids, ids, 512)
    liger.apply_liger_kernel_to_llama(model=model)
    trunkline.stream(model, chunk_size=64)
    _, got = streamed(model, ids, ids, 512)
    assert total_error(got, exact) <= 1.3 * total_error(own, exact)


def test_4_bit_weights_below_adapters() -> None:
    bitsandbytes, peft = pytest.importorskip("bitsandbytes"), pytest.importorskip("peft")
    model = build("llama", torch.bfloat16, hidden_size=64, head_dim=32).cuda()
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = getattr(layer.mlp, name)
            quantised = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, bias=False)
            quantised.load_state_dict(linear.state_dict())
            setattr(layer.mlp, name, quantised.cuda())
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    ids = tokens(2, 300).cuda()
    _, expected = plain(adapted, ids, ids, 512)
    trunkline.stream(adapted, chunk_size=64)
    _, got = streamed(adapted, ids, ids, 512)
    assert total_error(got, expected) < 0.05  # both round in bf16


BUDGETS = [
    {"device_budget": "1MiB", "host_budget": "64MiB"},
    {"device_budget": "1MiB", "host_budget": "1MiB", "offload_dir": "/tmp"},
    {"device_budget": "1MiB", "offload_dir": "/tmp", "attn_strategy": "streamed"},
    {"device_budget": "2MiB", "host_budget": "64MiB", "attn_strategy": "head_groups", "checkpoint_every": 2},
]


@pytest.mark.parametrize("prefetch", [1, 2, 3])
@pytest.mark.parametrize("budgets", BUDGETS, ids=["host", "host and disk", "disk, streamed", "head groups"])
@pytest.mark.parametrize("keep", [(), ("attention",)])
def test_budgets_change_no_gradient_and_are_kept(keep: tuple[str, ...], budgets: dict[str, Any], prefetch: int) -> None:
    model = build("llama", torch.bfloat16, head_dim=32).cuda()
    ids = tokens(2, 700).cuda()
    trunkline.stream(model, chunk_size=64, keep=keep)
    _, resident = streamed(model, ids, ids, 512)
    _, exact = plain(copy.deepcopy(trunkline.unstream(model)).double(), ids, ids, 512)
    trunkline.stream(model, chunk_size=64, keep=keep, prefetch=prefetch, **budgets)
    for _ in range(3):  # the second and third step reuse every block
        _, got = streamed(model, ids, ids, 512)
        assert total_error(got, exact) <= 1.2 * total_error(resident, exact)
    meters = trunkline.stats(model)
    assert meters.moved > 0
    accounts = model.forward.tiers.budgets
    assert all(meters.peaks[tier] <= (account.budget or 0) for tier, account in accounts.items())
    before = torch.cuda.memory_allocated()
    trunkline.unstream(model)
    assert torch.cuda.memory_allocated() <= before


def test_fetches_run_under_compute() -> None:
    """In a profiler's trace copies into the device overlap kernels, and no sweep waits for the device."""
    model = build("llama", torch.bfloat16, head_dim=64, hidden_size=512, intermediate_size=2048).cuda()
    ids = tokens(1, 32_768).cuda()
    trunkline.stream(model, chunk_size=4_096, device_budget="80MiB", host_budget="2GiB", attn_strategy="streamed")
    streamed(model, ids, ids)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        streamed(model, ids, ids)
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    copies = [e.time_range for e in events if "HtoD" in e.name and e.time_range.elapsed_us() > 20]
    kernels = sorted((e.time_range.start, e.time_range.end) for e in events if "emcpy" not in e.name)
    assert copies
    hidden = sum(any(start < c.end and c.start < end for start, end in kernels) for c in copies)
    assert hidden / len(copies) > 0.9
    meters = trunkline.stats(model)
    assert meters.lanes["fetch"].exposed < meters.lanes["fetch"].busy


def test_a_host_slab_is_exact_and_given_back() -> None:
    model = build("llama", torch.bfloat16, head_dim=32).cuda()
    ids = tokens(1, 700).cuda()
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    trunkline.stream(model, chunk_size=64, device_budget="2MiB", host_budget="33MiB")
    streamed(model, ids, ids)
    slab = model.forward.tiers.storage("host")
    assert slab.memory.numel() == 33 * 2**20
    # Nothing of the caching allocator, which rounds up to powers of two.
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == pinned
    assert slab.memory.is_pinned()
