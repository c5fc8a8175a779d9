"""Haystacks: endless sentences, made up or from a user's own texts, cut to an exact number of tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from trunkline.data.sources import find_files, read_documents
from trunkline.evaluate.piece_tokenizer import PieceTokenizer
from trunkline.evaluate.seeded import SplitMix64

# A function of the generator that yields endless sentences.
Haystack = Callable[[SplitMix64], Iterator[str]]

# A sentence ends at its mark before white space, at a full stop of Chinese or Japanese, or with its line. Line ends
# stay with the sentence before them, spaces go to the one behind: tokenizers cut there, too.
_CLOSING = "\"'”\u2019)"
_WIDE = "。\uff01\uff1f"
_SENTENCE = re.compile(rf"(?:[^\n.!?{_WIDE}]|[.!?](?![\s{_CLOSING}]))*(?:[.!?][{_CLOSING}]*|[{_WIDE}]|\n|$)\n*")
# A longer sentence is cut, or a needle could not be placed near its depth.
_MOST_CHARS = 600
_REPEATED = (" The fields are wide.", " The lake is deep.", " The clouds drift on.", " This way and back again.")
_FIRST_BATCH, _LARGEST_BATCH = 64, 8192
# A sentence may have no tokens; after this many in a row without any, the whole haystack has none.
_MOST_EMPTY = 10_000


def repeated_sentences(draws: SplitMix64) -> Iterator[str]:
    """Yield the same four sentences again and again; nothing is drawn."""
    while True:
        yield from _REPEATED


class TextHaystack:
    """Haystack of given texts: their sentences in order from a random one, and from the beginning again after the last.

    Args:
        texts: texts, at least one that is not blank.

    Raises:
        ValueError: all texts are blank.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._sentences = [sentence for text in texts for sentence in split_sentences(text)]
        if not any(sentence.strip() for sentence in self._sentences):
            raise ValueError("haystack: the texts are empty. Give files that hold text, or leave haystack out.")

    @classmethod
    def read(cls, files: Sequence[str], *, setting: str = "haystack") -> TextHaystack:
        """Read a haystack from files.

        Args:
            files: files, folders, glob patterns or `stdlib`, as in `data.files` of a recipe.
            setting: name of the setting in messages.

        Raises:
            ValueError: a file cannot be read, a line of a `.jsonl` file has no field `text`, or there is no text.
        """
        documents = read_documents(find_files(files, setting=setting), setting=setting)
        return cls([document.text for document in documents])

    def __call__(self, draws: SplitMix64) -> Iterator[str]:
        """Yield endless sentences, from a random one on."""
        place = draws.below(len(self._sentences))
        while True:
            yield self._sentences[place]
            place = (place + 1) % len(self._sentences)


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences of at most 600 characters; joined, they give the text."""
    sentences = []
    for match in _SENTENCE.finditer(text):
        rest = match.group()
        while len(rest) > _MOST_CHARS:
            cut = rest.rfind(" ", _MOST_CHARS // 2, _MOST_CHARS)
            cut = cut if cut > 0 else _MOST_CHARS
            sentences.append(rest[:cut])
            rest = rest[cut:]
        if rest:
            sentences.append(rest)
    return sentences


def fill_exactly(pieces: PieceTokenizer, sentences: Iterator[str], num_tokens: int) -> list[list[int]]:
    """Tokenize sentences until they have an exact number of tokens in total.

    Args:
        pieces: the tokenizer.
        sentences: endless sentences.
        num_tokens: tokens to fill.

    Returns:
        Ids of each sentence; sentences without tokens are left out. What is too much is cut off at the beginning, so
        that the total is exact and the last sentence whole.

    Raises:
        ValueError: the tokenizer has no tokens for the sentences.
    """
    filled: list[list[int]] = []
    total = num_read = 0
    while total < num_tokens:
        # Estimate from the sentences so far how many are missing. The size of a batch changes time only.
        count = min(_LARGEST_BATCH, 1 + (num_tokens - total) * num_read // total) if total else _FIRST_BATCH
        num_read += count
        for ids in pieces.encode_many(list(islice(sentences, count)), lines=True):
            if ids and total < num_tokens:
                filled.append(ids)
                total += len(ids)
        if not total and num_read > _MOST_EMPTY:
            raise ValueError("haystack: its text has no tokens with this tokenizer. Give files with other text.")
    # Only the last sentence went over, but the first is cut: the text then ends with a whole sentence.
    excess = total - num_tokens
    first = 0
    while excess and excess >= len(filled[first]):
        excess -= len(filled[first])
        first += 1
    return [filled[first][excess:], *filled[first + 1 :]] if filled[first:] else []
