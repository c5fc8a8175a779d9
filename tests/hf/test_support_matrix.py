"""Every row of docs/support.md."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import others_in_soak
from oracle import alone, check, packed, plain, positions, streamed, tokens
from support_matrix import PAGE, REFUSALS, ROWS, Refusal, Row, page

import trunkline
from trunkline.hf.probe import attention_spans

LENGTHS = [[5, 1, 17, 17], [12, 28]]
EXPERTS = ["eager", "batched_mm", "grouped_mm"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.family)
def test_each_family_equals_plain_autograd(row: Row) -> None:
    model, ids = row.build(), tokens(2, 40)
    expected = plain(model, ids, ids)
    for settings in ({"chunk_size": 7}, {"chunk_size": 16, "keep": ()}):
        trunkline.stream(model, **settings)
        check(streamed(model, ids, ids), expected, row.dtype, tolerance=row.tolerance)
        trunkline.unstream(model)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.family)
def test_packed_documents_of_each_family_equal_each_document_alone(row: Row) -> None:
    model, lengths = row.build(), LENGTHS[: row.rows]
    ids = tokens(row.rows, 40)
    expected = alone(model, ids, lengths)
    trunkline.stream(model, chunk_size=11)
    check(packed(model, ids, position_ids=positions(lengths)), expected, row.dtype, tolerance=row.tolerance)


def test_layers_that_take_one_position_for_all_rows() -> None:
    (row,) = (row for row in ROWS if row.rows == 1)
    model = trunkline.stream(row.build(), chunk_size=11)
    with pytest.raises(ValueError, match="pack documents in one row at a time"):
        packed(model, tokens(2, 40), position_ids=positions(LENGTHS))


MIXTURES = [row for row in ROWS if row.experts]


@pytest.mark.parametrize(
    ("row", "experts"),
    others_in_soak(itertools.product(MIXTURES, EXPERTS), list(zip(MIXTURES, itertools.cycle(EXPERTS), strict=False))),
    ids=lambda value: value.family if isinstance(value, Row) else value,
)
def test_every_implementation_of_experts(row: Row, experts: str) -> None:
    model, ids = row.build(experts, torch.float32), tokens(2, 40)
    expected = plain(model, ids, ids)
    trunkline.stream(model, chunk_size=7)
    check(streamed(model, ids, ids), expected, torch.float32)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.family)
def test_each_refused_family_is_refused_with_its_reason(refusal: Refusal) -> None:
    model = refusal.build()
    with pytest.raises(ValueError, match=refusal.message):
        trunkline.stream(model)
    assert "forward" not in model.__dict__


def test_docs_support_md_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python tests/support_matrix.py"


@pytest.mark.parametrize("strategy", ["resident", "head_groups", "streamed"])
@pytest.mark.parametrize("trained", [["sinks"], ["sinks", "o_proj"], ["sinks", "norm"]], ids=str)
def test_sinks_alone_are_trained(trained: list[str], strategy: str, tmp_path: Path) -> None:
    """Sinks get their gradient, also if queries, keys and values need none."""
    (row,) = (row for row in ROWS if row.family == "gpt-oss")
    model, ids = row.build(), tokens(2, 40)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    expected = plain(model, ids, ids)
    budget = (
        {}
        if strategy == "resident"
        else {"device_budget": "400KiB", "offload_dir": tmp_path, "attn_strategy": strategy}
    )
    trunkline.stream(model, chunk_size=8, **budget)
    check(streamed(model, ids, ids), expected, torch.float32)


def test_a_meta_model_is_verified_once_it_has_weights() -> None:
    """On the meta device there are no values to compare, nor is there what a layer makes of its positions."""
    (row,) = (row for row in ROWS if row.family.startswith("Llama 4"))
    exact, ids = row.build(), tokens(1, 40)
    expected = plain(exact, ids, ids)
    model = copy.deepcopy(exact).to("meta")
    trunkline.stream(model, chunk_size=8)
    model = model.to_empty(device="cpu")
    model.load_state_dict(exact.state_dict())
    for mine, theirs in zip(model.buffers(), exact.buffers(), strict=True):  # frequencies, which no state has
        mine.copy_(theirs)
    check(streamed(model, ids, ids), expected, torch.float32)


@pytest.mark.parametrize("window", [2**21 + 2, 3 * 2**20, 2**29])
def test_very_long_windows_are_read_from_the_mask(window: int) -> None:
    (row,) = (row for row in ROWS if row.family == "Mistral")
    model = replace(row, settings={"sliding_window": window}).build()
    assert attention_spans(trunkline.stream(model).forward.decoder)[0].window == window
