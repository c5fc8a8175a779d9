"""Settings of an evaluation, documents that are measured, and the folder that is written."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from trunkline.cli.evaluate import evaluate as evaluate_command
from trunkline.data import Document, load_encoder
from trunkline.evaluate import (
    EvaluateSettings,
    Evaluation,
    PerplexityMeter,
    even_depths,
    token_documents,
    write_folder,
)
from trunkline.evaluate.evaluation_settings import DEFAULT_THRESHOLD
from trunkline.units import parse_tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4096", 4096), (4096, 4096), ("4K", 4096), ("4k", 4096), (" 1M ", 2**20), ("1.5K", 1536), ("32_768", 32768),
     ("32,768", 32768)],
)  # fmt: skip
def test_lengths_are_parsed(text: int | str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "K", "4X", "0", "-4K", "1.0001K", "1.5", True, "1e3"])
def test_invalid_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of tokens: write 4096, 4K or 1M"):
        parse_tokens(text)


def test_even_depths_and_defaults() -> None:
    assert even_depths(1) == (0.5,)
    assert even_depths(3) == (0.0, 0.5, 1.0)
    assert even_depths(11) == EvaluateSettings((4096,)).depths
    assert inspect.signature(evaluate_command).parameters["threshold"].default == DEFAULT_THRESHOLD


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lengths": 4096}, r"lengths: 4096\. Set a tuple of whole numbers"),
        ({"lengths": ("4K",)}, r"lengths: \('4K',\)\. Set a tuple of whole numbers"),
        ({"depths": 11}, r"depths: 11\. Set a tuple of numbers, such as even_depths\(11\)"),
        ({"tasks": "needle"}, "tasks: 'needle'. Set a tuple of tasks or their names"),
    ],
)
def test_a_single_value_instead_of_a_tuple_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvaluateSettings(**{"lengths": (4096,), **given})


def test_documents_are_cut_as_for_training_and_no_token_is_dropped() -> None:
    encoder = load_encoder("bytes")
    documents = [Document("a", "x" * 20), Document("b", "y" * 7), Document("c", "z" * 8)]
    found = token_documents(documents, encoder, most_tokens=8)
    # With the token that ends a text: 21, 8 and 9, and the ninth of the last would be alone.
    assert [(d.name, len(d.ids)) for d in found] == [
        ("a (1 of 3)", 8), ("a (2 of 3)", 8), ("a (3 of 3)", 5), ("b", 8), ("c (1 of 2)", 8),
    ]  # fmt: skip
    assert found[3].ids.tolist() == [*b"yyyyyyy", encoder.tokenizer.eos_token_id]
    assert found[0].ids.dtype == torch.int64
    assert [len(d.ids) for d in token_documents(documents, encoder)] == [21, 8, 9]


def losses() -> Evaluation:
    meter = PerplexityMeter()
    meter.add("a", torch.tensor([0.0, -1.0, -2.0, -3.0]))
    meter.add("b", torch.tensor([0.0, -6.0]))
    meter.add("c", torch.tensor([0.0]))
    return Evaluation(EvaluateSettings((), ()), (), tuple(meter.by_position()), tuple(meter.by_document()))


def test_mean_loss_is_over_tokens() -> None:
    mean = losses().mean_loss
    assert mean is not None
    assert (mean.num_tokens, mean.loss) == (4, 3.0)
    assert mean.perplexity == pytest.approx(math.exp(3))
    assert Evaluation(EvaluateSettings((), ()), ()).mean_loss is None


def test_folder_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "deep" / "out"
    written = write_folder(losses(), folder)
    assert sorted(written.files) == ["perplexity.csv", "perplexity.png", "results.json", "table.txt"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(written.files)
    with pytest.raises(ValueError, match=r"--output: the folder '.*out' exists\. Give another one, or --overwrite"):
        write_folder(losses(), folder)

    def fail(self: Evaluation) -> str:
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "to_json", fail)
        with pytest.raises(OSError, match="full"):
            write_folder(losses(), folder, overwrite=True)
    assert (folder / "results.json").exists()
    write_folder(Evaluation(EvaluateSettings((), ()), ()), folder, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == ["results.json", "table.txt"]
    assert [path.name for path in folder.parent.iterdir()] == ["out"]
    (folder / "mine.txt").write_text("")
    with pytest.raises(ValueError, match=r"holds 'mine\.txt', which is no part of an evaluation"):
        write_folder(losses(), folder, overwrite=True)
    with pytest.raises(ValueError, match="is a file"):
        write_folder(losses(), folder / "mine.txt")
