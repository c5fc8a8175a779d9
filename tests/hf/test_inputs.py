"""Arguments that a streamed forward refuses, each with the setting's name and the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import build
from oracle import tokens

import trunkline


@pytest.fixture(scope="module")
def model() -> Any:
    return trunkline.stream(build("llama", torch.float32), chunk_size=8)


IDS = tokens(2, 20)
ONES = torch.ones_like(IDS)
LEFT = ONES.clone()
LEFT[0, :3] = 0
RIGHT = ONES.clone()
RIGHT[0, -3:] = 0
HOLE = ONES.clone()
HOLE[0, 5] = 0
RESTART = torch.cat([torch.arange(12), torch.arange(8)])[None]
JUMP = torch.cat([torch.arange(12), torch.arange(30, 38)])[None]
COMES_BACK = torch.tensor([0] * 5 + [1] * 5 + [0] * 10)[None]

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no input_ids": ({"input_ids": None}, "input_ids must be token ids of shape"),
    "1-D input_ids": ({"input_ids": IDS[0]}, r"input_ids must be .*got \(20,\)"),
    "empty input_ids": ({"input_ids": IDS[:, :0]}, "at least one each"),
    "float input_ids": ({"input_ids": IDS.float()}, r"input_ids must be .* of an integer dtype; got .* torch.float32"),
    "labels of another shape": ({"labels": IDS[:, 1:]}, r"labels must be whole numbers of the shape .* \(2, 20\), not"),
    "shift_labels of another shape": ({"shift_labels": IDS[0]}, "shift_labels must be whole numbers of the shape"),
    "float labels": ({"labels": IDS.float()}, r"labels must be whole numbers .* not torch.float32"),
    "negative labels": ({"labels": IDS - 50}, "labels must be token ids from 0 to 96 or -100 .ignored.*; -"),
    "labels beyond the vocabulary": ({"labels": IDS + 97}, "labels must be token ids from 0 to 96"),
    "input ids beyond the vocabulary": (
        {"input_ids": IDS + 97},
        "input_ids must be token ids from 0 to 96.*Does the tokenizer belong",
    ),
    "left padding": ({"attention_mask": LEFT}, "padding_side='right'"),
    "mask with a hole": ({"attention_mask": HOLE}, "masks with holes"),
    "4-D mask": ({"attention_mask": torch.ones(2, 1, 20, 20)}, "attention_mask must be of the shape of input_ids"),
    "positions that jump": (
        {"position_ids": JUMP},
        "go from 11 to 30 at token 12: they must rise by 1 .* document_ids",
    ),
    "float positions": ({"position_ids": RESTART.float()}, "position_ids must be whole numbers, not torch.float32"),
    "two that disagree": (
        {"document_ids": RESTART // 12, "seq_idx": JUMP // 30},
        "document_ids and seq_idx say that documents begin at",
    ),
    "planes of positions that differ": (
        {"position_ids": torch.stack([RESTART, RESTART, RESTART + 1])},
        "differ between their planes",
    ),
    "documents that come back": ({"document_ids": COMES_BACK}, "document_ids comes back to a number in row 0"),
    "documents of another shape": ({"document_ids": IDS[:, 1:]}, "document_ids must be whole numbers of shape"),
    "documents as a list": ({"document_ids": [0, 1]}, "document_ids must be .* got list"),
    "documents that disagree": (
        {"document_ids": COMES_BACK.clamp_min(0) * 0, "position_ids": RESTART},
        "from 11 to 0 at token 12: within a document of document_ids",
    ),
    "lengths of one row": (
        {"cu_seq_lens_q": torch.tensor([0, 20])},
        "cu_seq_lens_q is of one row, and input_ids has 2",
    ),
    "lengths that do not end": (
        {"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 12])},
        "cu_seq_lens_q must rise from 0 to 20",
    ),
    "position_ids as a list": ({"position_ids": [0, 1]}, "position_ids must be a tensor of shape .* not list"),
    "router logits": ({"output_router_logits": True}, "output_router_logits .* auxiliary loss"),
    "padding without labels": ({"attention_mask": RIGHT}, "padding, and there are no labels"),
    "no labels in training": ({}, "no labels in training.*label_smoothing_factor"),
    "position_ids of another shape": ({"position_ids": RESTART[:, 1:]}, "position_ids must be of shape"),
    "inputs_embeds": ({"input_ids": None, "inputs_embeds": torch.ones(2, 4, 32)}, "inputs_embeds .* pass input_ids"),
    "a cache in training": ({"use_cache": True}, r"a cache is filled in training mode.*call model\.eval"),
    "a cache and labels": ({"use_cache": True, "labels": IDS}, "labels go without a cache"),
    "hidden states": ({"output_hidden_states": True}, "output_hidden_states"),
    "attention weights": ({"output_attentions": True}, "output_attentions"),
    "a name nearly right": ({"documents_ids": IDS}, "documents_ids is not supported .* did you mean document_ids"),
    "an unknown argument": ({"token_type_ids": IDS}, "token_type_ids is not supported"),
    "logits and labels": ({"labels": IDS, "logits_to_keep": 3}, "logits_to_keep goes without labels"),
    "negative logits_to_keep": ({"logits_to_keep": -1}, "logits_to_keep=-1"),
    "num_items_in_batch of 0": ({"labels": IDS, "num_items_in_batch": 0}, "num_items_in_batch=0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_by_name(model: Any, case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": IDS, **arguments})
    assert torch.isfinite(model(input_ids=IDS, labels=IDS).loss)  # and the model is as usable as before


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"chunk_size": 0}, "chunk_size=0: give a positive whole number of tokens, or 'auto'"),
        ({"chunk_size": -3}, "chunk_size=-3"),
        ({"chunk_size": 2.5}, "chunk_size=2.5"),
        ({"chunk_size": True}, "chunk_size=True"),
        ({"chunk_size": "big"}, "chunk_size='big'"),
        ({"keep": ("attention", "everything")}, "'everything' is unknown; choose out of"),
        ({"keep": "attn"}, "'attn' is unknown"),
        ({"logits_budget": 0}, "logits_budget=0"),
        ({"logits_budget": "0MiB"}, "logits_budget='0MiB': give a positive"),
        ({"logits_budget": "much"}, "logits_budget='much'"),
        ({"keep": None}, "keep=None: give names out of"),
        ({"progress": 3}, "progress=3: give a function"),
        ({"device_budget": 1, "offload_dir": ""}, "offload_dir='': give the path"),
        ({"device_budget": 1, "offload_dir": 3}, "offload_dir=3: give the path"),
        ({"attn_kernel": "fast"}, "attn_kernel='fast': choose one of auto, cpu_flash, cuda_flash, math"),
        ({"attn_strategy": "fast"}, "attn_strategy='fast': choose one of auto, resident, head_groups, streamed"),
        ({"attn_strategy": "streamed"}, "has no effect without a device_budget"),
        ({"device_budget": "many"}, "device_budget='many': give a number of bytes"),
        ({"checkpoint_every": 0}, "checkpoint_every=0"),
        ({"prefetch": 0}, "prefetch=0"),
        ({"offload_dir": "."}, "offload_dir has no effect without a device_budget"),
        ({"device_budget": 1, "offload_dir": "nowhere"}, "offload_dir='nowhere' is not a folder"),
        ({"device_budget": 1, "disk_budget": 1}, "disk_budget has no effect without offload_dir"),
    ],
)
def test_settings_out_of_range(setting: dict[str, Any], message: str) -> None:
    plain = build("llama", torch.float32)
    with pytest.raises(ValueError, match=message):
        trunkline.stream(plain, **setting)
    assert "forward" not in plain.__dict__


def test_a_mask_of_ones_changes_nothing(model: Any) -> None:
    assert float(model(input_ids=IDS, labels=IDS, attention_mask=ONES).loss) == float(
        model(input_ids=IDS, labels=IDS).loss
    )


def test_a_batch_without_targets_has_loss_zero(model: Any) -> None:
    nothing = torch.full_like(IDS, -100)
    for count in (None, 0, 7):
        assert float(model(input_ids=IDS, labels=nothing, num_items_in_batch=count).loss) == 0


def test_auto_sizes() -> None:
    assert (
        trunkline.StreamConfig(logits_budget="2KiB").logits_bytes
        == trunkline.StreamConfig(logits_budget=2048).logits_bytes
    )
    config = trunkline.StreamConfig()
    assert config.chunk_tokens(torch.device("cpu")) == 4096
    assert config.chunk_tokens(torch.device("cuda")) == 16384
    assert trunkline.StreamConfig(chunk_size=7).chunk_tokens(torch.device("cuda")) == 7
