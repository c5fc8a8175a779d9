"""What the harness asks of generated text, in transformers' words: lengths, sampling, and strings that end it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # what harness tasks call it
_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_SPARE = 8  # tokens whose text depends on those before: a space that is left out, a part of a character


@dataclass(frozen=True, slots=True)
class Asked:
    """How to generate.

    Attributes:
        max_new_tokens: most tokens.
        until: texts that end it, and are cut off.
        settings: what else transformers' `generate` is given.
    """

    max_new_tokens: int
    until: tuple[str, ...]
    settings: Mapping[str, Any]


def asked(given: Mapping[str, Any], max_new_tokens: int) -> Asked:
    """Read a task's `generation_kwargs`.

    Args:
        given: `until`, `max_gen_toks`, `do_sample`, `temperature` and any other argument of transformers' `generate`.
        max_new_tokens: where nothing is said.

    Returns:
        What they say. Without `do_sample` a temperature above 0 samples; without sampling its settings mean nothing.

    Raises:
        ValueError: one of them cannot be meant.
    """
    rest = dict(given)
    until = rest.pop("until", None) or []
    until = [until] if isinstance(until, str) else until
    if not isinstance(until, Sequence) or not all(isinstance(text, str) for text in until):
        raise ValueError(f"until={until!r}: give a text, or a list of texts, at which to stop.")
    lengths = [value for value in (rest.pop(name, None) for name in _LENGTHS) if value is not None]
    longest = lengths[0] if lengths else max_new_tokens
    if not isinstance(longest, int) or isinstance(longest, bool) or longest < 1:
        raise ValueError(f"max_gen_toks={longest!r}: give a positive number of tokens.")
    if rest.pop("max_length", None) is not None:
        raise ValueError("max_length in generation_kwargs counts the context, too: give max_gen_toks.")
    temperature = rest.get("temperature")
    sample = rest.pop("do_sample", None)
    sample = bool(temperature) if sample is None else sample
    if sample and temperature is not None and not temperature > 0:
        raise ValueError(f"do_sample=True with temperature={temperature!r}: give a positive temperature.")
    if not sample:
        rest = {name: value for name, value in rest.items() if name not in _OF_SAMPLING}
    return Asked(longest, tuple(text for text in until if text), {**rest, "do_sample": bool(sample)})


def cut(text: str, until: Sequence[str]) -> str:
    """A text up to the first of these."""
    return text[: min((at for at in map(text.find, until) if at >= 0), default=len(text))]


class Until(StoppingCriteria):  # type: ignore[misc]
    """Ends a generation as soon as its text has one of several in it, however it was cut into tokens."""

    def __init__(self, tokenizer: Any, until: Sequence[str], begin: int) -> None:
        """Stop at texts.

        Args:
            tokenizer: of the model.
            until: the texts.
            begin: tokens that were given: what is in these does not end anything.
        """
        self._tokenizer, self._until, self._begin = tokenizer, until, begin
        # A token is a byte at least, so that nothing longer needs to be looked at again for each new one.
        self._looked_at = max((len(text.encode()) for text in until), default=0) + _SPARE

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Whether each row (B, n) has come to its end, (B,)."""
        first = max(self._begin, input_ids.shape[1] - self._looked_at)
        texts = [self._tokenizer.decode(row) for row in input_ids[:, first:].tolist()]
        ended = [any(stop in text for stop in self._until) for text in texts]
        return torch.tensor(ended, dtype=torch.bool, device=input_ids.device)
