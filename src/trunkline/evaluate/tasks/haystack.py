"""Haystacks: streams of sentences, made up or from a user's own texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from trunkline.data.sources import find_files, read_documents
from trunkline.evaluate.draws import Draws
from trunkline.evaluate.tasks.prose import prose

# A sentence ends at its mark before white space, at a full stop of Chinese or Japanese, or with its line. Line ends
# stay with what is before them, spaces go to what is behind: there tokenizers cut, too.
_CLOSING = "\"'”\u2019)"
_WIDE = "。\uff01\uff1f"
_SENTENCE = re.compile(rf"(?:[^\n.!?{_WIDE}]|[.!?](?![\s{_CLOSING}]))*(?:[.!?][{_CLOSING}]*|[{_WIDE}]|\n|$)\n*")
# A line without an end has to be cut somewhere, or no needle finds a place in it.
_MOST_CHARS = 600

_REPEATED = (
    "The fields are wide.",
    "The lake is deep.",
    "The clouds drift on.",
    "This way and back again.",
)


class Haystack(Protocol):
    """Where the text around needles comes from."""

    def sentences(self, draws: Draws) -> Iterator[str]:
        """Yield sentences without end; the draws decide which."""


class Prose:
    """Made-up sentences of a small grammar."""

    def sentences(self, draws: Draws) -> Iterator[str]:
        """Yield sentences without end."""
        return prose(draws)


class Repeated:
    """The same few sentences again and again."""

    def sentences(self, draws: Draws) -> Iterator[str]:
        """Yield sentences without end; nothing is drawn."""
        while True:
            yield from (f" {sentence}" for sentence in _REPEATED)


class Texts:
    """Sentences of given texts, in their order, from a drawn one on; after the last comes the first again.

    Args:
        texts: at least one with a letter in it.

    Raises:
        ValueError: there is no text.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._sentences = [sentence for text in texts for sentence in split_sentences(text)]
        if not any(sentence.strip() for sentence in self._sentences):
            raise ValueError("haystack: the texts are empty. Give files that hold text, or leave haystack out.")

    @classmethod
    def read(cls, files: Sequence[str], *, base: Path | None = None, setting: str = "haystack") -> Texts:
        """Read the texts from files.

        Args:
            files: as in `data.files` of a recipe: files, folders, glob patterns, `stdlib`.
            base: folder that relative names start from; the current one by default.
            setting: what messages call the files.

        Returns:
            The haystack.

        Raises:
            ValueError: a file does not exist or holds no text.
        """
        return cls(
            [
                document.text
                for document in read_documents(find_files(files, base=base, setting=setting), setting=setting)
            ]
        )

    def sentences(self, draws: Draws) -> Iterator[str]:
        """Yield sentences without end."""
        place = draws.below(len(self._sentences))
        while True:
            yield self._sentences[place]
            place = (place + 1) % len(self._sentences)


def split_sentences(text: str) -> list[str]:
    """Split a text where sentences or lines end.

    Args:
        text: any.

    Returns:
        Pieces of at most 600 characters that joined give the text.
    """
    pieces = []
    for match in _SENTENCE.finditer(text):
        rest = match.group()
        while len(rest) > _MOST_CHARS:
            cut = rest.rfind(" ", _MOST_CHARS // 2, _MOST_CHARS)
            cut = cut if cut > 0 else _MOST_CHARS
            pieces.append(rest[:cut])
            rest = rest[cut:]
        if rest:
            pieces.append(rest)
    return pieces
