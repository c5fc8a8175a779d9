"""A streamed model as what evaluation asks of one: one forward scores a sequence, one prefill serves all questions.

Over ranks every rank calls both alike, with the same tokens, and all get the same. Nothing of the model is other
afterwards, nor is the random state: an evaluation between two training steps changes neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from trunkline.api import streamed_forward
from trunkline.evaluate.models import TokenScores
from trunkline.generation.prefill import prefill
from trunkline.hf.probe import most_tokens
from trunkline.kv_cache.cache import StreamedCache


class StreamedScorer:
    """See `trunkline.evaluate.Scorer`: one forward sweep a call.

    Args:
        model: streamed, in either mode.

    Raises:
        ValueError: the model is not streamed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._forward = model, streamed_forward(model, "evaluate")

    def __call__(self, input_ids: Tensor) -> TokenScores:
        """See `Scorer`."""
        if input_ids.shape[1] < 2:  # there is nothing to predict
            return TokenScores(torch.zeros(input_ids.shape), torch.zeros(input_ids.shape, dtype=torch.bool))
        ids = input_ids.to(self._forward.decoder.device)
        with evaluating(self._model):
            log_probs, is_greedy = self._forward.score(input_ids=ids, labels=ids)
        # There a position has what is said of the token after it, and the last one nothing.
        return TokenScores(pad(log_probs[:, :-1], (1, 0)), pad(is_greedy[:, :-1] > 0, (1, 0)))


class StreamedContinuer:
    """See `trunkline.evaluate.Continuer`: one prefill a call; questions of one length go on from it together.

    Args:
        model: streamed, in either mode.
        stop: token ids that end a text; None for those of the model's generation config.

    Raises:
        ValueError: the model is not streamed.
    """

    def __init__(self, model: nn.Module, stop: Collection[int] | None = None) -> None:
        self._model, self._forward = model, streamed_forward(model, "evaluate")
        self._stop = frozenset(_end_of_text(self._forward.decoder.model) if stop is None else stop)

    def __call__(self, prefix_ids: Tensor, continuations: Sequence[Tensor], max_new_tokens: int) -> list[list[int]]:
        """See `Continuer`."""
        lengths = sorted({len(ids) for ids in continuations})
        found: list[list[int]] = [[] for _ in continuations]
        with evaluating(self._model):
            cache = prefill(self._model, prefix_ids.to(self._forward.decoder.device))
            for length in lengths:
                numbers = [number for number, ids in enumerate(continuations) if len(ids) == length]
                rows = self._go_on(cache.fork(), torch.stack([continuations[n] for n in numbers]), max_new_tokens)
                for number, row in zip(numbers, rows, strict=True):
                    found[number] = row
        return found

    def _go_on(self, cache: StreamedCache, ids_BS: Tensor, max_new_tokens: int) -> list[list[int]]:
        """Greedy, as a plain loop: a generation config may hold penalties and the like, which are not the model."""
        rows: list[list[int]] = [[] for _ in ids_BS]
        ended = torch.zeros(len(rows), dtype=torch.bool)
        new_BS = ids_BS.to(self._forward.decoder.device)
        most = most_tokens(self._forward.decoder)  # of a learned table: the last new token is not read itself
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
    """Evaluation mode without gradients; afterwards every module's mode and the random state are what they were.

    Args:
        model: the model.
    """
    modes = [(module, module.training) for module in model.modules()]
    device = streamed_forward(model, "evaluate").decoder.device
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _end_of_text(model: nn.Module) -> list[int]:
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return [] if found is None else [found] if isinstance(found, int) else list(found)
