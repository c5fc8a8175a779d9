"""The evaluation loop with models whose answers are known: scores, number of forwards, refusals."""

from __future__ import annotations

import pytest
import torch
from evaluators import InductionModel, OracleModel, PlainModel
from families import build

from trunkline.data import make_byte_tokenizer
from trunkline.evaluate import (
    TASKS,
    EvaluateProgress,
    EvaluateSettings,
    NeedleTask,
    PasskeyTask,
    TokenDocument,
    TokenScores,
    evaluate,
)
from trunkline.evaluate.needle_samples import SampleMaker
from trunkline.evaluate.piece_tokenizer import PieceTokenizer
from trunkline.evaluate.prose import prose

TOKENIZER = make_byte_tokenizer()
DEPTHS = (0.0, 0.3, 0.7, 1.0)


def _settings(**changed):
    return EvaluateSettings(**{"lengths": (8192, 6000), "depths": DEPTHS, "samples": 2, **changed})


def _samples(settings):
    maker = SampleMaker(PieceTokenizer(TOKENIZER), prose, settings.depths, settings.seed)
    return [
        maker.make(task, length, index)
        for task in settings.resolved_tasks
        for length in settings.lengths
        for index in range(settings.samples)
    ]


def test_scores_of_both_ways_are_the_answers_the_model_knows():
    settings = _settings()
    samples = _samples(settings)
    model = OracleModel(samples, TOKENIZER, 3500)
    found = evaluate(model, TOKENIZER, settings, continuer=model.continue_)
    expected = {
        (sample.task, sample.length, sample.index, answer.key, answer.text): model.knows(sample, answer)
        for sample in samples
        for answer in sample.answers
    }
    assert 0.2 < sum(expected.values()) / len(expected) < 0.8
    for way in ("forced", "generated"):
        outcomes = [outcome for outcome in found.outcomes if outcome.way == way]
        assert {(o.task, o.length, o.sample, o.key, o.expected): o.retrieved for o in outcomes} == expected
        assert len(outcomes) == len(expected)
    # The fake gives each token the logarithm -1/4, and numbers of 7 digits have 8 tokens with their space.
    needles = [outcome for outcome in found.outcomes if (outcome.way, outcome.task) == ("forced", "needle")]
    assert {(outcome.num_tokens, outcome.log_prob) for outcome in needles} == {(8, -2.0)}


def test_a_sample_costs_one_forward_and_one_prefill_however_many_depths():
    for depths in (DEPTHS, tuple(i / 10 for i in range(11))):
        settings = _settings(depths=depths)
        samples = _samples(settings)
        model = OracleModel(samples, TOKENIZER, 10_000)
        evaluate(model, TOKENIZER, settings, continuer=model.continue_)
        assert sorted(model.forwards) == sorted((1, sample.length) for sample in samples)
        assert sorted(model.prefills) == sorted(sample.prefix_length for sample in samples)


def test_batch_size_does_not_change_scores():
    one, many = _settings(samples=3), _settings(samples=3, batch_size=2)
    samples = _samples(one)
    models = [OracleModel(samples, TOKENIZER, 3500) for _ in range(2)]
    found = [evaluate(model, TOKENIZER, settings) for model, settings in zip(models, (one, many), strict=True)]
    assert found[0].outcomes == found[1].outcomes
    assert {shape[0] for shape in models[0].forwards} == {1}
    # Three samples: two, then the one that is left.
    assert [shape[0] for shape in models[1].forwards] == [2, 1] * 2 * len(TASKS)


@pytest.mark.parametrize("task", [NeedleTask(num_digits=5), PasskeyTask()])
def test_an_induction_head_finds_exactly_the_needles_in_its_window(task):
    """No knowledge of samples here: a longest match over token ids, as an induction head finds it."""
    settings = EvaluateSettings(lengths=(1100,), depths=(0.0, 0.6, 1.0), tasks=(task,), samples=2)
    window = 560
    model = InductionModel(window)
    found = evaluate(model, TOKENIZER, settings, continuer=model.continue_)
    # A question repeats its needle, so each token of the answer is as far from its like as the question is.
    distances = {
        (sample.index, question.answers[0].key): question.start - question.answers[0].evidence[0]
        for sample in _samples(settings)
        for question in sample.questions
    }
    expected = {which: distance <= window for which, distance in distances.items()}
    assert len(set(expected.values())) == 2
    outcomes = {way: {(o.sample, o.key): o.retrieved for o in found.outcomes if o.way == way} for way in found.ways}
    assert outcomes["forced"] == expected
    # Behind the prefix a question comes at once, so generated answers are nearer than teacher-forced ones.
    assert all(outcomes["generated"][which] for which, retrieved in outcomes["forced"].items() if retrieved)
    assert not all(outcomes["generated"].values())


def test_log_probs_are_those_of_the_models_logits():
    """A tiny transformers model, unstreamed: log probabilities of answers equal those of its softmax in fp64."""
    model = build("llama", torch.float32, vocab_size=260, max_position_embeddings=4096)
    settings = EvaluateSettings(lengths=(1200,), depths=(0.0, 1.0), tasks=("needle",), samples=1)
    plain = PlainModel(model)
    (sample,) = _samples(settings)
    found = evaluate(plain, TOKENIZER, settings, continuer=plain.continue_)
    with torch.no_grad():
        logits = model.double()(input_ids=sample.ids[None]).logits[0]
    for outcome, answer in zip(found.outcomes[:2], sample.answers, strict=True):
        places = torch.arange(answer.start, answer.stop)
        expected = logits.log_softmax(-1)[places - 1, sample.ids[places]].sum()
        # fp32 logits of a few units, 8 tokens: 8 * 10 * 2^-23 with room for the network's own rounding.
        assert outcome.log_prob == pytest.approx(float(expected), abs=1e-3)
        assert outcome.retrieved == bool((logits[places - 1].argmax(-1) == sample.ids[places]).all())
    assert [len(outcome.text) > 0 for outcome in found.outcomes[2:]] == [True, True]


def test_perplexity_needs_no_tasks():
    def uniform(input_ids):
        log_probs = torch.full(input_ids.shape, -torch.log(torch.tensor(256.0)))
        log_probs[:, 0] = 0
        return TokenScores(log_probs, torch.zeros(input_ids.shape, dtype=torch.bool))

    documents = [TokenDocument("one", torch.arange(100)), TokenDocument("two", torch.arange(10))]
    found = evaluate(uniform, TOKENIZER, EvaluateSettings(lengths=(), tasks=()), documents=documents)
    assert found.outcomes == ()
    assert [(loss.name, loss.num_tokens) for loss in found.by_document] == [("one", 99), ("two", 9)]
    assert all(loss.perplexity == pytest.approx(256, rel=1e-6) for loss in (*found.by_document, *found.by_position))
    with pytest.raises(ValueError, match="scorer: documents need one"):
        evaluate(None, TOKENIZER, _settings(), continuer=lambda *_: [], documents=documents)


def test_progress_counts_to_its_total():
    settings = _settings(tasks=("needle", "variables"), samples=3, batch_size=2)
    model = OracleModel(_samples(settings), TOKENIZER, 3500)
    seen: list[EvaluateProgress] = []
    evaluate(model, TOKENIZER, settings, continuer=model.continue_, progress=seen.append)
    assert {progress.total for progress in seen} == {24}
    assert [progress.done for progress in seen] == sorted({progress.done for progress in seen})
    assert (seen[0].done, seen[0].what, seen[0].length) == (0, "needle", 6000)
    assert (seen[-1].done, seen[-1].what) == (24, "")


def test_short_lengths_are_refused_before_the_first_forward():
    calls = []
    message = r"lengths: 600 tokens are too short for task 'passkey', which takes at least 9\d\d "
    with pytest.raises(ValueError, match=message):
        evaluate(calls.append, TOKENIZER, _settings(lengths=(8192, 600)))
    assert calls == []


def test_results_of_a_wrong_shape_are_refused():
    def short(input_ids):
        shape = (input_ids.shape[0], input_ids.shape[1] - 1)
        return TokenScores(torch.zeros(shape), torch.zeros(shape, dtype=torch.bool))

    with pytest.raises(ValueError, match=r"scorer: it gave log_probs of shape \(1, 5999\)"):
        evaluate(short, TOKENIZER, _settings())
    with pytest.raises(ValueError, match="continuer: 1 results for 4 continuations"):
        evaluate(None, TOKENIZER, _settings(tasks=("needle",)), continuer=lambda *_: [[1]])
    with pytest.raises(ValueError, match="scorer: "):
        evaluate(None, TOKENIZER, _settings())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tasks": ("needle", "hay")}, "tasks: there is no 'hay'"),
        ({"tasks": ("needle", NeedleTask(num_digits=3))}, "tasks: one is named twice"),
        ({"lengths": (4096, 4096)}, "lengths: one is named twice"),
        ({"lengths": (0,)}, "lengths: .0,. is out of range. Set numbers of tokens above 0"),
        ({"depths": (0.5, 1.5)}, "depths: "),
        ({"depths": ()}, "depths: "),
        ({"samples": 0}, "samples: 0"),
        ({"batch_size": 0}, "batch_size: 0"),
        ({"threshold": 0.0}, "threshold: 0.0"),
        ({"bin_width": 0}, "bin_width: 0"),
    ],
)
def test_invalid_settings_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        _settings(**changed)
