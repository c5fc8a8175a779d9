"""Streamed scorers: results of the plain model, one forward a sample, and state that is restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from evaluators import PlainModel
from families import build
from torch import Tensor

import trunkline
from trunkline import forward
from trunkline.data.tokenizers import make_byte_tokenizer
from trunkline.engine import sweeps
from trunkline.evaluate import EvaluateSettings, StreamedContinuer, StreamedScorer, evaluate, even_depths

VOCABULARY = 260  # of the byte tokenizer, and a few more


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


def byte_model(**more: Any) -> Any:
    return build("llama", torch.float32, vocab_size=VOCABULARY, max_position_embeddings=4096, **more)


@pytest.mark.parametrize("budget", [None, "100KiB"])
@pytest.mark.parametrize("shape", [(1, 70), (3, 33), (2, 2), (1, 16)])
def test_scores_are_those_of_the_plain_model(shape: tuple[int, int], budget: str | None, tmp_path: Any) -> None:
    model, ids = build("llama"), tokens(*shape)
    expected = PlainModel(model)(ids)
    trunkline.stream(model, chunk_size=16, device_budget=budget, offload_dir=None if budget is None else tmp_path)
    found = StreamedScorer(model)(ids)
    # Both round to fp32 at the end: half a unit in the last place of a number below 16.
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=2e-6)
    assert found.is_greedy.dtype == torch.bool
    assert found.is_greedy.equal(expected.is_greedy)
    assert found.log_probs[:, 0].tolist() == [0.0] * len(ids)
    assert not found.is_greedy[:, 0].any()


def test_a_single_token_has_no_score() -> None:
    model = trunkline.stream(build("llama"), chunk_size=16)
    found = StreamedScorer(model)(tokens(2, 1))
    assert found.log_probs.tolist() == [[0.0], [0.0]]
    assert found.is_greedy.tolist() == [[False], [False]]


@pytest.mark.parametrize("lengths", [(5, 7, 5, 4, 7), (6, 6), (3,)])
def test_continuations_are_greedy_and_independent(lengths: tuple[int, ...]) -> None:
    model, prefix = build("llama"), tokens(1, 61)
    questions = [tokens(length, seed=length + number) for number, length in enumerate(lengths)]
    expected = PlainModel(model).continue_(prefix, questions, 9)
    trunkline.stream(model, chunk_size=16)
    assert StreamedContinuer(model, stop=())(prefix, questions, 9) == expected
    # A text ends before the token that ends it, and the others go on.
    end = expected[0][3]
    stopped = [row[: row.index(end)] if end in row else row for row in expected]
    assert StreamedContinuer(model, stop=[end])(prefix, questions, 9) == stopped
    model.generation_config.eos_token_id = [end, 96]
    cut = [row[: row.index(96)] if 96 in row else row for row in stopped]
    assert StreamedContinuer(model)(prefix, questions, 9) == cut


@pytest.mark.parametrize("depths", [1, 3, 11])
def test_one_forward_scores_all_depths(depths: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trunkline.stream(byte_model(), chunk_size=512)
    read: list[int] = []
    original = sweeps.forward

    def counted(run: Any, **given: Any) -> None:
        read.append(run.batch.seq_len)
        original(run, **given)

    monkeypatch.setattr(sweeps, "forward", counted)
    settings = EvaluateSettings((1500,), ("needle",), even_depths(depths), samples=2)
    found = evaluate(StreamedScorer(model), make_byte_tokenizer(), settings)
    assert read == [1500, 1500]
    assert len(found.outcomes) == 2 * depths


def test_one_prefill_serves_all_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trunkline.stream(byte_model(), chunk_size=512)
    read: list[tuple[int, int, int]] = []
    original = forward.extend

    def counted(*given: Any) -> Tensor:
        cache, new = given[-2:]
        ids = new.batch.input_ids_BS
        read.append((cache.length, *ids.shape))
        return original(*given)

    monkeypatch.setattr(forward, "extend", counted)
    settings = EvaluateSettings((1500,), ("needle",), even_depths(5), samples=1)
    found = evaluate(None, make_byte_tokenizer(), settings, continuer=StreamedContinuer(model, stop=()))
    prefix = [each for each in read if each[0] == 0]
    assert len(prefix) == 1
    length = prefix[0][2]
    # Questions stand behind the prefix, as many at once as are of one length; then one token of each at a time.
    questions = [each for each in read if each[0] == length]
    assert sum(rows for _, rows, _ in questions) == 5
    assert len({count for *_, count in questions}) == len(questions)
    assert {count for at, _, count in read if at not in (0, length)} == {1}
    assert len(found.outcomes) == 5


def test_mode_gradients_and_random_state_are_restored() -> None:
    model = build("llama")
    trunkline.stream(model, chunk_size=16)
    frozen = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
    frozen.eval()
    modes = [module.training for module in model.modules()]
    assert set(modes) == {True, False}
    torch.manual_seed(7)
    state = torch.get_rng_state()
    StreamedScorer(model)(tokens(1, 40))
    StreamedContinuer(model)(tokens(1, 40), [tokens(3)], 2)
    with pytest.raises(ValueError, match="must be token ids"):
        StreamedScorer(model)(tokens(1, 40) + 1000)
    assert [module.training for module in model.modules()] == modes
    assert torch.get_rng_state().equal(state)
    assert torch.is_grad_enabled()
    loss = model(input_ids=tokens(1, 40), labels=tokens(1, 40)).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_model_that_is_not_streamed_is_refused() -> None:
    for kind in (StreamedScorer, StreamedContinuer):
        with pytest.raises(ValueError, match="is not streamed"):
            kind(build("llama"))
