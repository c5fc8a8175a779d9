"""Text to token ids piece by piece, so that where each piece stands is known to the token.

A tokenizer may join characters across the border of two pieces, or set a mark in front of whatever it is given, and
then answers cannot be found again in a text that was tokenised as a whole. So each piece is tokenised once, behind a
character that it might follow in a text, and ids are joined, not strings: a piece has the same ids wherever it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trunkline.data.tokenizers import bos_of

# A piece that begins with a space follows the end of a sentence; one that does not, a letter or a line's end.
_BEFORE_SPACE, _BEFORE_TEXT, _BEFORE_LINE = ".", "a", "\n"


class Pieces:
    """A Hugging Face tokenizer that tokenises pieces of texts.

    Args:
        tokenizer: any; its length limit and the special tokens it adds are ignored, but for the token that it begins
            texts with.

    Attributes:
        tokenizer: the same.
        bos: ids that a sequence begins with: none, or the beginning-of-sequence token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.bos = bos_of(tokenizer)
        self._known: dict[str, list[int]] = {}
        self._anchors = {text: self._plain([text])[0] for text in (_BEFORE_SPACE, _BEFORE_TEXT, _BEFORE_LINE)}

    def _plain(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            truncation=False,
            padding=False,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        return ids

    def encode(self, text: str) -> list[int]:
        """Tokenise one piece that comes again and again: it is remembered.

        Args:
            text: a piece; at most its first character is white space.

        Returns:
            Its ids.

        Raises:
            ValueError: the tokenizer cannot write it.
        """
        if text not in self._known:
            ids = self.encode_many([text])[0]
            unknown = getattr(self.tokenizer, "unk_token_id", None)
            if not ids or unknown in ids:
                raise ValueError(
                    f"tokenizer: it cannot write {text!r}, which tasks consist of (it gives {ids}). Evaluate with the "
                    "model's own tokenizer; it has to know letters, digits and punctuation."
                )
            self._known[text] = ids
        return self._known[text]

    def encode_many(self, texts: Sequence[str], *, lines: bool = False) -> list[list[int]]:
        """Tokenise many pieces, each on its own.

        Args:
            texts: pieces.
            lines: whether those that begin with no space begin a line; else they go on in one.

        Returns:
            The ids of each.
        """
        before_text = _BEFORE_LINE if lines else _BEFORE_TEXT
        anchors = [_BEFORE_SPACE if text[:1].isspace() else before_text for text in texts]
        found = self._plain([anchor + text for anchor, text in zip(anchors, texts, strict=True)]) if texts else []
        before = [self._anchors[anchor] for anchor in anchors]
        # Where the tokenizer joined a piece with what is before it, the piece alone is all that can be had.
        joined = [i for i, ids in enumerate(found) if ids[: len(before[i])] != before[i]]
        alone = dict(zip(joined, self._plain([texts[i] for i in joined]) if joined else [], strict=True))
        return [alone[i] if i in alone else ids[len(before[i]) :] for i, ids in enumerate(found)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids, special tokens left out."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text
