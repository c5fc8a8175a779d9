"""Packed documents: what each of them alone would give, however they are packed and however that is said."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from operators import Operators
from oracle import alone, check, packed, positions, tokens, total_error
from torch import Tensor
from transformers import Trainer, TrainingArguments

import trunkline

LENGTHS = [[5, 1, 17, 9, 8], [12, 28]]  # of the documents in each row, 40 tokens


def numbers(lengths: list[list[int]]) -> Tensor:
    return torch.stack([torch.cat([torch.full((n,), 7 - i) for i, n in enumerate(row)]) for row in lengths])


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64])
@pytest.mark.parametrize("keep", [(), ("attention",), ("attention", "kv")], ids=["nothing", "attention", "both"])
def test_packed_documents_equal_each_document_alone(chunk_size: int, keep: tuple[str, ...]) -> None:
    model, ids = build("llama"), tokens(2, 40)
    expected = alone(model, ids, LENGTHS)
    trunkline.stream(model, chunk_size=chunk_size, keep=keep)
    check(packed(model, ids, position_ids=positions(LENGTHS)), expected, torch.float64)
    check(packed(model, ids, document_ids=numbers(LENGTHS)), expected, torch.float64)


@pytest.mark.parametrize(
    "settings",
    [
        {"attn_strategy": "streamed", "device_budget": "200KiB"},
        {"attn_strategy": "head_groups", "device_budget": "8MiB"},
        {"checkpoint_every": 2, "keep": ()}, {"attn_kernel": "math"},
    ],
    ids=["streamed", "head groups", "every second", "math"],
)  # fmt: skip
def test_packed_documents_in_every_attention_strategy(settings: dict[str, Any], tmp_path: Path) -> None:
    model, ids = build("qwen3"), tokens(2, 40)
    expected = alone(model, ids, LENGTHS)
    trunkline.stream(model, chunk_size=8, offload_dir=tmp_path if "attn_strategy" in settings else None, **settings)
    check(packed(model, ids, position_ids=positions(LENGTHS)), expected, torch.float64)


@pytest.mark.parametrize("family", ["gpt2", "gpt-neox", "mistral"])
def test_packed_documents_with_other_kinds_of_positions(family: str) -> None:
    model, ids = build(family), tokens(2, 40)
    expected = alone(model, ids, LENGTHS)
    trunkline.stream(model, chunk_size=8)
    check(packed(model, ids, position_ids=positions(LENGTHS)), expected, torch.float64)


@pytest.mark.parametrize("window", [1, 2, 3, 6, 20])
def test_packed_documents_with_a_sliding_window(window: int) -> None:
    model, ids = build("mistral", sliding_window=window), tokens(2, 40)
    expected = alone(model, ids, LENGTHS)
    trunkline.stream(model, chunk_size=8)
    check(packed(model, ids, position_ids=positions(LENGTHS)), expected, torch.float64)


def test_arguments_of_packing_collators() -> None:
    model, ids = build("llama"), tokens(1, 40)
    expected = alone(model, ids, LENGTHS[:1])
    trunkline.stream(model, chunk_size=8)
    ends = torch.tensor([0, 5, 6, 23, 32, 40], dtype=torch.int32)
    flash = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 17, "max_length_k": 17}
    rows = positions(LENGTHS[:1])
    for given in (flash, {**flash, "position_ids": rows}, {"seq_idx": numbers(LENGTHS[:1]).int()},
                  {"position_ids": rows.expand(3, 1, -1)}, {"position_ids": rows[0]}):  # fmt: skip
        check(packed(model, ids, **given), expected, torch.float64)


def test_document_ids_with_positions_that_continue_across_documents() -> None:
    """With document_ids positions may be anything: rotary positions are relative."""
    model, ids = build("llama"), tokens(2, 40)
    lengths = [[25, 15], [25, 15]]
    expected = alone(model, ids, lengths)
    trunkline.stream(model, chunk_size=8)
    got = packed(model, ids, document_ids=numbers(lengths), position_ids=torch.arange(40).expand(2, -1))
    assert abs(float(got[0]) / float(expected[0]) - 1) < 1e-6  # cos and sin of other angles, in fp32
    assert total_error(got[1], expected[1]) < 1e-5


def test_document_ids_with_positions_that_begin_anywhere() -> None:
    """As a trainer of cut documents has them; padding has any."""
    model, ids = build("llama"), tokens(2, 40)
    lengths = [[25, 10], [7, 33]]
    expected = alone(model, ids, lengths)
    trunkline.stream(model, chunk_size=8)
    mask = (torch.arange(40) < torch.tensor([[35], [40]])).long()
    rows = positions([[25, 10, 5], [7, 33]]) + 3
    rows[0, 35:] = 999
    got = packed(model, ids, document_ids=numbers([[25, 10, 5], [7, 33]]), position_ids=rows, attention_mask=mask)
    assert abs(float(got[0]) / float(expected[0]) - 1) < 1e-6
    assert total_error(got[1], expected[1]) < 1e-5


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_positions_of_padding_are_ignored(family: str) -> None:
    """Beyond the learned ones; and rows with one document each are one kernel call, as without positions."""
    model, ids = build(family), tokens(2, 40)
    mask = (torch.arange(40) < torch.tensor([[35], [40]])).long()
    rows = torch.arange(40).repeat(2, 1)
    rows[0, 35:] = 9999
    trunkline.stream(model, chunk_size=8)
    expected = packed(model, ids, attention_mask=mask)
    with Operators() as counted:
        got = packed(model, ids, attention_mask=mask, position_ids=rows)
    check(got, expected, torch.float64)
    with Operators() as without:
        packed(model, ids, attention_mask=mask)
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    assert counted.counts[flash] == without.counts[flash]


@pytest.mark.parametrize("name", ["position_ids", "document_ids"])
def test_padding_and_packing_together(name: str) -> None:
    """The same loss as neither; whatever positions padding has."""
    model, ids = build("llama"), tokens(2, 40)
    lengths = [[5, 1, 17], [12, 20]]
    expected = alone(model, ids, lengths)
    trunkline.stream(model, chunk_size=8)
    mask = torch.zeros(2, 40, dtype=torch.long)
    given = torch.full((2, 40), 3)
    for row, each in enumerate(lengths):
        mask[row, : sum(each)] = 1
        given[row, : sum(each)] = (positions if name == "position_ids" else numbers)([each])[0]
    check(packed(model, ids, attention_mask=mask, **{name: given}), expected, torch.float64)


def test_ignored_labels_and_shift_labels_in_packed_documents() -> None:
    model, ids = build("llama"), tokens(1, 40)
    labels = ids.clone()
    labels[0, [0, 5, 6, 23, 32]] = -100  # as collators do it, first tokens of documents
    trunkline.stream(model, chunk_size=8)
    rows = positions(LENGTHS[:1])
    expected = packed(model, ids, position_ids=rows)
    loss = model(input_ids=ids, labels=labels, position_ids=rows).loss
    assert loss == expected[0]
    shifted = torch.cat([labels[:, 1:], torch.full((1, 1), -100)], 1)
    assert model(input_ids=ids, shift_labels=shifted, position_ids=rows).loss == expected[0]
    whole = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
    assert model(input_ids=ids, shift_labels=whole, position_ids=rows).loss != expected[0]  # taken as they are


def test_last_logits_see_the_last_document_only() -> None:
    model, ids = build("llama").eval(), tokens(1, 40)
    expected = model(input_ids=ids[:, 32:]).logits[:, -3:]
    trunkline.stream(model, chunk_size=16)
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions(LENGTHS[:1]), logits_to_keep=3).logits
    torch.testing.assert_close(logits, expected)


def test_any_documents_in_any_chunks() -> None:
    """Random lengths, chunk sizes, windows and batches."""
    chance = random.Random(0)
    for _ in range(12):
        seq_len, batch = chance.randint(2, 48), chance.randint(1, 3)
        lengths = []
        for _ in range(batch):
            cuts = sorted(chance.sample(range(1, seq_len), min(chance.randint(0, 8), seq_len - 1)))
            lengths.append([b - a for a, b in zip([0, *cuts], [*cuts, seq_len], strict=True)])
        if all(n == 1 for row in lengths for n in row):
            continue
        model = build("mistral", sliding_window=chance.choice([None, 1, 3, 7, 30]))
        ids = tokens(batch, seq_len)
        expected = alone(model, ids, lengths)
        keep = chance.choice([(), ("attention",), ("kv",)])
        trunkline.stream(model, chunk_size=chance.randint(1, 50), keep=keep, checkpoint_every=chance.choice([1, 2]))
        check(packed(model, ids, position_ids=positions(lengths)), expected, torch.float64)


def test_trainer_passes_documents_on(tmp_path: Path) -> None:
    """Columns that are no argument of a model are dropped by transformers' Trainer: document_ids is one."""
    model = trunkline.stream(build("llama", torch.float32), chunk_size=16)
    labels = tokens(1, 40)[0]
    labels[[0, 5, 6, 23, 32]] = -100  # Trainer counts the targets itself
    row = {"input_ids": tokens(1, 40)[0], "labels": labels, "document_ids": numbers(LENGTHS[:1])[0]}
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
    evaluated = Trainer(model, arguments, eval_dataset=[row]).evaluate()["eval_loss"]
    expected, _ = packed(model, row["input_ids"][None], document_ids=row["document_ids"][None])
    assert evaluated == pytest.approx(float(expected), rel=1e-5)


def test_a_warning_where_every_token_is_a_document() -> None:
    model = trunkline.stream(build("llama", torch.float32), chunk_size=16)
    ids = tokens(1, 20)
    with pytest.warns(UserWarning, match="every token is a document of its own"):
        assert model(input_ids=ids, labels=ids, position_ids=torch.zeros_like(ids)).loss == 0
