"""Interfaces of evaluation to a model (`Scorer`, `Continuer`), implemented for streamed models.

Over ranks, every rank calls them alike, with the same tokens, and all get the same result. The model's mode and the
random state are restored, so an evaluation between two training steps changes neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from trunkline.api import streamed_forward
from trunkline.generation.prefill import prefill
from trunkline.hf import probe
from trunkline.kv_cache.cache import StreamedCache


@dataclass(frozen=True)
class TokenScores:
    """Predictions of each token of given sequences.

    Attributes:
        log_probs: (B, S) fp32 natural logarithm of the probability of each token given earlier ones; 0 for the first.
        is_greedy: (B, S) bool, whether the token was the most likely one; False for the first.
    """

    log_probs: Tensor
    is_greedy: Tensor


# A function of input_ids (B, S) int64 on the CPU, rows of one length without padding; scores are on any device.
Scorer = Callable[[Tensor], TokenScores]

# A function of (prefix_ids (1, S) int64 on the CPU, continuations, each (n,) int64 with n >= 1, max_new_tokens). It
# reads the prefix once and returns the greedy tokens behind each continuation alone; fewer than max_new_tokens where
# the model ends its text or has no positions left.
Continuer = Callable[[Tensor, Sequence[Tensor], int], list[list[int]]]


class StreamedScorer:
    """Scorer of a streamed model: one forward sweep a call.

    Args:
        model: a streamed model, in training or evaluation mode.

    Raises:
        ValueError: the model is not streamed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._forward = model, streamed_forward(model, "evaluate")

    def __call__(self, input_ids: Tensor) -> TokenScores:
        """Return the scores of sequences; see `Scorer`."""
        if input_ids.shape[1] < 2:  # there is nothing to predict
            return TokenScores(torch.zeros(input_ids.shape), torch.zeros(input_ids.shape, dtype=torch.bool))
        ids = input_ids.to(self._forward.decoder.device)
        with evaluating(self._model):
            log_probs, is_greedy = self._forward.score(input_ids=ids, labels=ids)
        # `score` puts the score of a token at the position that predicts it: shift right by one.
        return TokenScores(pad(log_probs[:, :-1], (1, 0)), pad(is_greedy[:, :-1] > 0, (1, 0)))


class StreamedContinuer:
    """Continuer of a streamed model: it reads the prefix once a call, and decodes questions of one length together.

    It holds keys and values of all layers.

    Args:
        model: a streamed model, in training or evaluation mode.
        stop: token ids that end a text; None for those of the model's generation config.

    Raises:
        ValueError: the model is not streamed.
    """

    def __init__(self, model: nn.Module, stop: Collection[int] | None = None) -> None:
        self._model, self._forward = model, streamed_forward(model, "evaluate")
        if stop is None:
            config = getattr(self._forward.decoder.model, "generation_config", None)
            eos = getattr(config, "eos_token_id", None)
            stop = [] if eos is None else [eos] if isinstance(eos, int) else eos
        self._stop = frozenset(stop)

    def __call__(self, prefix_ids: Tensor, continuations: Sequence[Tensor], max_new_tokens: int) -> list[list[int]]:
        """Return the greedy tokens behind each continuation; see `Continuer`."""
        generated: list[list[int]] = [[] for _ in continuations]
        with evaluating(self._model):
            cache = prefill(self._model, prefix_ids.to(self._forward.decoder.device))
            for length in sorted({len(ids) for ids in continuations}):
                numbers = [number for number, ids in enumerate(continuations) if len(ids) == length]
                rows = self._decode(cache.fork(), torch.stack([continuations[n] for n in numbers]), max_new_tokens)
                for number, row in zip(numbers, rows, strict=True):
                    generated[number] = row
        return generated

    def _decode(self, cache: StreamedCache, ids_BS: Tensor, max_new_tokens: int) -> list[list[int]]:
        # A plain greedy loop: a generation config may hold penalties, which are not the model.
        rows: list[list[int]] = [[] for _ in ids_BS]
        ended = torch.zeros(len(rows), dtype=torch.bool)
        new_BS = ids_BS.to(self._forward.decoder.device)
        most = probe.most_tokens(
            self._forward.decoder
        )  # of a table of positions; the last new token is not read itself
        room = max_new_tokens if most is None else max(1, most - cache.length - ids_BS.shape[1] + 1)
        for _ in range(min(max_new_tokens, room)):
            prefill(self._model, new_BS, cache=cache)
            assert cache.logits is not None
            new_BS = cache.logits[:, -1:].argmax(-1)
            for number, token in enumerate(new_BS[:, 0].tolist()):
                ended[number] |= token in self._stop
                if not ended[number]:
                    rows[number].append(token)
            if bool(ended.all()):
                break
        return rows


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode without gradients; restore every module's mode and the random state on exit."""
    device = streamed_forward(model, "evaluate").decoder.device
    with torch.no_grad(), probe.random_state_restored(device), probe.in_eval_mode(model):
        yield
