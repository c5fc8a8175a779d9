"""The harness's texts as token ids, by its own conventions for what belongs to a context and what to a continuation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trunkline.data.tokenizers import Encoder, Tokens, encoder_of


@dataclass(frozen=True, slots=True)
class Pair:
    """A continuation to be scored.

    Attributes:
        context: ids before it, at least one.
        continuation: its ids; there may be none.
    """

    context: Tokens
    continuation: Tokens

    def __len__(self) -> int:
        return len(self.context) + len(self.continuation)


class Texts:
    """Encodes texts with a model's tokenizer, as long as they are."""

    def __init__(self, encoder: Encoder) -> None:
        self.tokenizer = encoder.tokenizer
        self._body = dataclasses.replace(encoder, prefix=(), suffix=())
        self._begin = list(encoder.prefix)
        bos = self.tokenizer.bos_token_id
        first = self.tokenizer.eos_token_id if bos is None else bos
        if first is None:
            raise ValueError(
                "the tokenizer has neither a beginning-of-sequence nor an end-of-sequence token, one of which stands "
                "before a text without context: set tokenizer.bos_token or tokenizer.eos_token."
            )
        self.first: int = first

    @classmethod
    def of(cls, tokenizer: Any) -> Texts:
        """Those of a Hugging Face tokenizer."""
        return cls(encoder_of(tokenizer))

    def encode(self, text: str, *, special: bool | None = None) -> Tokens:
        """Ids of a text.

        Args:
            text: any.
            special: whether it begins with the beginning-of-sequence token; None if the tokenizer adds one by itself,
                and the text, such as a filled chat template, does not begin with it.
        """
        if special is None:
            special = not (self._begin and text.startswith(self.tokenizer.decode(self._begin)))
        ids = self._body.encode(text) if text else np.empty(0, self._body.dtype)
        return np.concatenate([np.asarray(self._begin if special else [], ids.dtype), ids])

    def context(self, text: str) -> Tokens:
        """Ids of a text that something follows: at least one."""
        ids = self.encode(text)
        return ids if len(ids) else np.asarray([self.first], ids.dtype)

    def document(self, text: str) -> Pair:
        """A whole text to be scored: each of its tokens, behind a token that begins it."""
        ids = self.encode(text, special=False)
        begins = len(ids) > 0 and ids[0] == self.first
        return Pair(np.asarray([self.first], ids.dtype), ids[1:] if begins else ids)

    def pairs(self, texts: Sequence[tuple[str, str]]) -> list[Pair]:
        """Contexts with their continuations.

        Spaces at the end of a context belong to the continuation, and what is tokenised is the whole: a tokenizer that
        joins a space with the word behind it does so at the border, too.
        """
        contexts: dict[str, Tokens] = {}
        found = []
        for context, continuation in texts:
            before = context.rstrip()
            if before not in contexts:
                contexts[before] = self.encode(before)
            ids, whole = contexts[before], self.encode(context + continuation)
            if not len(ids):
                found.append(self.document(context + continuation))
            else:
                found.append(Pair(ids, whole[len(ids) :].copy()))  # a view would keep the whole
        return found
