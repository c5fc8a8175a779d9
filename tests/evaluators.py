"""Models for evaluation: one of transformers, unstreamed, and fakes whose answers are known beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trunkline.evaluate import TokenScores
from trunkline.evaluate.needle_samples import Answer, Sample


class PlainModel:
    """Transformers model as scorer and continuer, all logits at once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()

    @torch.no_grad()
    def __call__(self, input_ids: Tensor) -> TokenScores:
        logits = self.model(input_ids=input_ids, use_cache=False).logits[:, :-1]
        targets = input_ids[:, 1:]
        log_probs = logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        return TokenScores(
            torch.nn.functional.pad(log_probs, (1, 0)),
            torch.nn.functional.pad(logits.argmax(-1) == targets, (1, 0)),
        )

    @torch.no_grad()
    def continue_(self, prefix_ids: Tensor, continuations: Sequence[Tensor], max_new_tokens: int) -> list[list[int]]:
        found = []
        for continuation in continuations:
            ids = torch.cat([prefix_ids, continuation[None]], dim=1)
            start = ids.shape[1]
            for _ in range(max_new_tokens):
                ids = torch.cat([ids, self.model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)[:, None]], 1)
            found.append(ids[0, start:].tolist())
        return found


class OracleModel:
    """Model that retrieves every answer whose statement begins at most `window` tokens before it, and no other.

    It must know the samples: it finds them by their ids.
    """

    def __init__(self, samples: Iterable[Sample], tokenizer: Any, window: int) -> None:
        self.samples = {tuple(sample.ids.tolist()): sample for sample in samples}
        self.by_prefix = {ids[: sample.prefix_length]: sample for ids, sample in self.samples.items()}
        self.tokenizer, self.window = tokenizer, window
        self.forwards, self.prefills = [], []

    def knows(self, sample: Sample, answer: Answer) -> bool:
        return answer.start - answer.evidence[0] <= self.window

    def __call__(self, input_ids: Tensor) -> TokenScores:
        self.forwards.append(tuple(input_ids.shape))
        log_probs = torch.full(input_ids.shape, -0.25)
        log_probs[:, 0] = 0
        is_greedy = torch.zeros(input_ids.shape, dtype=torch.bool)
        for row, ids in enumerate(input_ids.tolist()):
            sample = self.samples[tuple(ids)]
            for answer in sample.answers:
                is_greedy[row, answer.start : answer.stop] = True
                # All tokens but one are right: an answer is retrieved whole or not at all.
                is_greedy[row, answer.stop - 1] = self.knows(sample, answer)
        return TokenScores(log_probs, is_greedy)

    def continue_(self, prefix_ids: Tensor, continuations: Sequence[Tensor], max_new_tokens: int) -> list[list[int]]:
        sample = self.by_prefix[tuple(prefix_ids[0].tolist())]
        self.prefills.append(prefix_ids.shape[1])
        assert [c.tolist() for c in continuations] == [c.tolist() for c in sample.continuations]
        found = []
        for question in sample.questions:
            words = [answer.text if self.knows(sample, answer) else "unknown" for answer in question.answers]
            ids = self.tokenizer(f" {' and '.join(reversed(words))}.", add_special_tokens=False)["input_ids"]
            found.append(ids[:max_new_tokens])
        return found


class InductionModel:
    """Model that predicts what followed the longest earlier occurrence of what is before a token, within a window.

    It knows nothing of tasks: it reads token ids, as an induction head does. Needles it finds exactly where they are in
    its window, since a question repeats its needle's words.
    """

    def __init__(self, window: int) -> None:
        self.window = window

    def predictions(self, ids: list[int]) -> list[int]:
        """Return the likeliest next token after each token."""
        tokens = np.array(ids)
        lengths = np.zeros(len(tokens) + 1, dtype=np.int64)
        found = []
        for place, token in enumerate(tokens):
            # How many tokens up to each place are those up to this one.
            lengths[1:] = np.where(tokens == token, lengths[:-1] + 1, 0)
            first = max(0, place - self.window)
            earlier = lengths[first + 1 : place + 1][::-1]
            found.append(int(tokens[place - earlier.argmax()]) if earlier.any() else -1)
        return found

    def __call__(self, input_ids: Tensor) -> TokenScores:
        is_greedy = [[False, *np.equal(self.predictions(row)[:-1], row[1:])] for row in input_ids.tolist()]
        return TokenScores(torch.zeros(input_ids.shape), torch.tensor(is_greedy))

    def continue_(self, prefix_ids: Tensor, continuations: Sequence[Tensor], max_new_tokens: int) -> list[list[int]]:
        found = []
        for continuation in continuations:
            ids = prefix_ids[0].tolist() + continuation.tolist()
            for _ in range(max_new_tokens):
                ids.append(self.predictions(ids)[-1])
            found.append(ids[-max_new_tokens:])
        return found
