"""The recall example: its questions have the answers it says, its variants see what they say, and it learns."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import total_error

import trunkline

HERE = Path(__file__).parents[2] / "examples" / "recall"
sys.path.insert(0, str(HERE))

import cut  # noqa: E402
import models  # noqa: E402
import recall  # noqa: E402
import task  # noqa: E402
import training  # noqa: E402

LENGTH = 64  # 4 chunks of 16, of which the last asks 8 questions


def samples(length: int = LENGTH, batch: int = 3, seed: int = 0) -> task.Samples:
    return task.draw(batch, length, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", [64, 256, 8192])
def test_a_question_is_answered_by_its_pair_and_by_nothing_else(length: int) -> None:
    drawn = samples(length)
    pairs, body = task.num_pairs(length), length - task.chunk_size_of(length)
    for ids, targets, depths in zip(drawn.ids_BS, drawn.targets_BS, drawn.depth_BP, strict=True):
        assert (targets[:body] == task.IGNORE).all()
        questions = ids[body::2]
        assert len(questions) == len(questions.unique()) == pairs
        for at, key in enumerate(questions.tolist()):
            places = (ids == key).nonzero().flatten().tolist()
            assert places == [round(float(depths[at]) * body), body + 2 * at]  # its pair, and the question itself
            assert ids[places[0] + 1] == targets[body + 2 * at] == ids[body + 2 * at + 1]
            assert task.NUM_KEYS <= ids[places[0] + 1] < task.NUM_KEYS + task.NUM_VALUES
            assert places[0] + 1 < body  # in an earlier chunk than the question


def test_lengths_and_chunks() -> None:
    assert [(task.num_pairs(n), task.chunk_size_of(n)) for n in (256, 1024, 4096, 16384, 65536)] == [
        (32, 64), (128, 256), (512, 1024), (512, 1024), (512, 1024),
    ]  # fmt: skip
    for length in (8, 100):
        with pytest.raises(ValueError, match=f"length={length}"):
            task.num_pairs(length)


def test_depths_are_even() -> None:
    depths = samples(4096, batch=16).depth_BP
    counts = torch.histc(depths, training.NUM_DEPTHS, 0, 1)
    assert counts.sum() == depths.numel()
    mean = depths.numel() / training.NUM_DEPTHS
    assert (counts - mean).abs().max() < 5 * mean**0.5  # five standard deviations of a Poisson count


def gradients(variant: str, ids: torch.Tensor, targets: torch.Tensor, length: int = LENGTH) -> dict[str, torch.Tensor]:
    learner = models.Learner(models.build(seed=0), variant)
    learner.set_length(length)
    learner.loss(ids, targets).backward()
    return {name: p.grad for name, p in learner.model.named_parameters() if p.grad is not None}


def test_without_the_cut_gradients_are_those_of_the_streamed_model(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = samples()
    expected = gradients("full", drawn.ids_BS, drawn.targets_BS)
    with_cut = gradients("cut", drawn.ids_BS, drawn.targets_BS)
    monkeypatch.setattr(models, "register", lambda chunk_size: cut.register(chunk_size, cut=False))
    without = gradients("cut", drawn.ids_BS, drawn.targets_BS)
    assert without.keys() == expected.keys()
    assert total_error(without, expected) < 1e-5  # float32, sums over a few hundred tokens in another order
    # The keys that questions meet lie in earlier chunks: most of their projection's gradient is what the cut takes.
    keys = "model.layers.1.self_attn.k_proj.weight"
    assert with_cut[keys].norm() < 0.5 * expected[keys].norm()


def test_the_cut_takes_exactly_the_gradient_into_earlier_chunks() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 12, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for window in (None, 3, 6):
        whole = cut.in_chunks(q, k, v, 5, cut=False, window=window)
        severed = cut.in_chunks(q, k, v, 5, cut=True, window=window)
        assert torch.equal(whole, severed)
        scores = (q @ k.mT) / 8**0.5
        behind = torch.arange(12)[:, None] - torch.arange(12)
        hidden = (behind < 0) | (behind >= (window or 12))
        expected = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)
        # Queries of the second chunk alone: their own keys get what they always do, those before them nothing.
        of_whole = torch.autograd.grad(whole[:, :, 5:10].square().sum(), (q, k, v), retain_graph=True)
        of_severed = torch.autograd.grad(severed[:, :, 5:10].square().sum(), (q, k, v))
        torch.testing.assert_close(of_severed[0], of_whole[0], rtol=1e-12, atol=1e-12)
        for a, b in zip(of_severed[1:], of_whole[1:], strict=True):
            assert a[:, :, :5].abs().max() == 0 < b[:, :, :5].abs().max()
            torch.testing.assert_close(a[:, :, 5:], b[:, :, 5:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("variant", "sees"), [("full", True), ("cut", True), ("own-chunk", False)])
def test_what_the_last_chunk_sees(variant: str, sees: bool) -> None:
    drawn, learner = samples(batch=1), models.Learner(models.build(seed=0), variant)
    learner.set_length(LENGTH)
    other = drawn.ids_BS.clone()
    other[:, : LENGTH - 16] = task.VOCAB_SIZE - 1  # everything before the last chunk
    with torch.no_grad():
        first, second = (float(learner.loss(ids, drawn.targets_BS)) for ids in (drawn.ids_BS, other))
    assert (first != second) == sees


def test_its_own_chunk_is_seen_as_by_the_whole_model() -> None:
    """In its first chunk the own-chunk variant is the full one: same positions, same attention."""
    drawn = samples()
    targets = torch.full_like(drawn.targets_BS, task.IGNORE)
    targets[:, :16] = drawn.ids_BS[:, 1:17]
    assert total_error(gradients("own-chunk", drawn.ids_BS, targets), gradients("full", drawn.ids_BS, targets)) < 1e-6


def test_wider_chunks_hold_pairs_too() -> None:
    """The chunk that asks sees itself, and nothing before it."""
    drawn, learner = samples(batch=1), models.Learner(models.build(seed=0), "own-chunk", widen=2)
    learner.set_length(LENGTH)
    losses = []
    for upto in (0, 32, 48):  # chunks are of 32 tokens, questions of the last 16
        ids = drawn.ids_BS.clone()
        ids[:, :upto] = task.VOCAB_SIZE - 1
        with torch.no_grad():
            losses.append(float(learner.loss(ids, drawn.targets_BS)))
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("variant", list(models.VARIANTS))
def test_evaluation_asks_the_model_itself(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = models.Learner(models.build(seed=0), variant)
    learner.set_length(LENGTH)
    drawn = samples(batch=1)
    answers = learner.answers(drawn.ids_BS)
    loss = learner.loss(drawn.ids_BS, drawn.targets_BS)
    if variant != "own-chunk":
        if variant == "full":
            trunkline.unstream(learner.model)
        learner.model.set_attn_implementation("eager")
        logits = learner.model(input_ids=drawn.ids_BS, use_cache=False).logits[:, LENGTH - 16 :: 2]
        assert torch.equal(answers, logits.argmax(-1))
        expected = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), drawn.targets_BS[:, LENGTH - 16 :: 2].flatten()
        )
        assert abs(float(loss.detach()) - float(expected.detach())) < 1e-5
    monkeypatch.setattr(models.Learner, "answers", lambda self, ids: ids[:, LENGTH - 15 :: 2])
    result = training.evaluate(learner, LENGTH, sequences=20)
    assert result["accuracy"] == 1
    assert result["questions"] == 160 == sum(result["questions_by_depth"])
    assert result["by_depth"] == [1.0] * training.NUM_DEPTHS


def test_it_learns_and_is_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "QUESTIONS", 128)
    histories = []
    for _ in range(2):
        learner = models.Learner(models.build(seed=0), "full")
        histories.append(training.train(learner, [training.Stage(LENGTH, 20), training.Stage(128, 2)], seed=0))
    losses = histories[0].losses
    assert losses == histories[1].losses
    assert histories[0].lengths == [64] * 20 + [128] * 2
    assert len(histories[0].seconds) == len(histories[0].processor_seconds) == 2
    assert losses[0] > math.log(task.VOCAB_SIZE) - 0.1  # every token as likely as another
    assert losses[19] < losses[0] - 0.5


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "QUESTIONS", 64)
    given = ["--length", "256", "--steps", "3", "--sequences", "1", "--beyond", "--out", str(tmp_path), "--variant"]
    content = recall.main([*given, "full", "--variant", "own-chunk"])
    written: dict[str, Any] = json.loads((tmp_path / "recall.json").read_text())
    assert written == content
    assert list(written["variants"]) == ["full", "own-chunk"]
    assert [each["length"] for each in written["variants"]["full"]["evaluations"]] == [256, 1024]
    assert [each["trained_to"] for each in written["variants"]["full"]["after_stages"]] == [256]
    assert (tmp_path / "recall.png").read_bytes().startswith(b"\x89PNG")
    for refused, named in ((["--length", "1000"], "--length"), (["--length", "1024", "--steps", "5"], "--steps")):
        with pytest.raises(ValueError, match=named):
            recall.main([*refused, "--out", str(tmp_path)])


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="variant='half'"):
        models.Learner(models.build(seed=0), "half")
    with pytest.raises(ValueError, match="widen=0"):
        models.Learner(models.build(seed=0), "full", widen=0)
