"""Tokenization of text piece by piece, so that the token positions of each piece are exact.

A tokenizer may join characters across the border of two pieces, or put a marker before any text it is given. Answers
could then not be located in the ids of the whole text. So each piece is tokenized once, behind a character that might
precede it, and ids are joined instead of strings: a piece has the same ids wherever it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trunkline.data.tokenizers import bos_of, plain_ids

# A piece with a leading space follows the end of a sentence; any other follows a letter or the end of a line.
_BEFORE_SPACE, _BEFORE_TEXT, _BEFORE_LINE = ".", "a", "\n"


class PieceTokenizer:
    """Hugging Face tokenizer applied to pieces of text.

    Args:
        tokenizer: a Hugging Face tokenizer. Its length limit and special tokens are ignored, except for a
            beginning-of-sequence token that it adds by itself.

    Attributes:
        tokenizer: the tokenizer.
        bos: ids that begin a sequence: the beginning-of-sequence token, or none.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.bos = bos_of(tokenizer)
        self._encoded: dict[str, list[int]] = {}
        anchors = [_BEFORE_SPACE, _BEFORE_TEXT, _BEFORE_LINE]
        self._anchors: dict[str, list[int]] = dict(zip(anchors, plain_ids(tokenizer, anchors), strict=True))

    def encode(self, text: str) -> list[int]:
        """Return the ids of one piece; results are memoized.

        Args:
            text: a piece, with at most one leading space.

        Raises:
            ValueError: the tokenizer has no tokens for the piece.
        """
        if text not in self._encoded:
            ids = self.encode_many([text])[0]
            if not ids or getattr(self.tokenizer, "unk_token_id", None) in ids:
                raise ValueError(
                    f"tokenizer: it cannot write {text!r}, which tasks consist of (it gives {ids}). Evaluate with the "
                    "model's own tokenizer; it has to know letters, digits and punctuation."
                )
            self._encoded[text] = ids
        return self._encoded[text]

    def encode_many(self, texts: Sequence[str], *, lines: bool = False) -> list[list[int]]:
        """Return the ids of many pieces, each tokenized on its own; a piece without tokens gives an empty list.

        Args:
            texts: pieces.
            lines: pieces without a leading space begin a line; otherwise they continue one.
        """
        if not texts:
            return []
        anchors = [_BEFORE_SPACE if text[:1].isspace() else _BEFORE_LINE if lines else _BEFORE_TEXT for text in texts]
        encoded = plain_ids(self.tokenizer, [anchor + text for anchor, text in zip(anchors, texts, strict=True)])
        before = [self._anchors[anchor] for anchor in anchors]
        # Where the tokenizer merges the anchor with the piece, tokenize the piece alone.
        merged = [i for i, ids in enumerate(encoded) if ids[: len(before[i])] != before[i]]
        ids_alone = plain_ids(self.tokenizer, [texts[i] for i in merged]) if merged else []
        alone = dict(zip(merged, ids_alone, strict=True))
        return [alone[i] if i in alone else ids[len(before[i]) :] for i, ids in enumerate(encoded)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids, without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text
