"""Encoders from text to token ids: of a byte tokenizer, which needs no files, or of a Hugging Face tokenizer.

Nothing is truncated: a tokenizer's own length limit is ignored on purpose, because the recipe sets the context.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trunkline.utils.error_text import first_line

Tokens = npt.NDArray[np.integer[Any]]

BYTES = "bytes"
BYTE_EOS = "<|eos|>"
BYTE_PAD = "<|pad|>"

# Time and memory of tokenizers grow faster than the text; pieces of this many characters bound both.
PIECE_CHARS = 1_000_000


def make_byte_tokenizer() -> Any:
    """Build the byte tokenizer as a Hugging Face tokenizer.

    Ids 0…255 are the byte values of the UTF-8 text; 256 is `<|eos|>`, 257 is `<|pad|>`.

    Returns:
        A `PreTrainedTokenizerFast` whose saved folder loads with `AutoTokenizer`.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # The regular expression bounds the length of one call of the BPE model. Without merges it does not change the ids.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(BYTE_EOS, special=True), AddedToken(BYTE_PAD, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=BYTE_EOS,
        pad_token=BYTE_PAD,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class Encoder:
    """Encoder from one document to token ids.

    Attributes:
        tokenizer: Hugging Face tokenizer, saved with the model.
        is_bytes: whether ids are byte values, so that encoding is a view of memory.
        prefix: ids before each document: the beginning-of-sequence token, if the tokenizer adds one by itself.
        suffix: ids after each document: the end-of-sequence token, if the tokenizer has one.
        vocab_size: largest id plus 1.
        piece_chars: most characters in one call of the tokenizer.
    """

    tokenizer: Any
    is_bytes: bool
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    vocab_size: int
    piece_chars: int = PIECE_CHARS

    @property
    def dtype(self) -> type[np.uint16] | type[np.int32]:
        """Type of ids: uint16 if it holds every id, else int32."""
        return np.uint16 if self.vocab_size <= 2**16 else np.int32

    def encode(self, text: str) -> Tokens:
        """Encode one whole document; nothing is truncated.

        Args:
            text: text of the document.

        Returns:
            Ids (S,) in `dtype`: prefix, text, suffix.
        """
        if self.is_bytes:
            body = [np.frombuffer(text.encode("utf-8"), dtype=np.uint8)]
        else:
            pieces = split_text(text, self.piece_chars)
            body = [np.asarray(plain_ids(self.tokenizer, piece), self.dtype) for piece in pieces]
        parts = [np.asarray(self.prefix, self.dtype), *body, np.asarray(self.suffix, self.dtype)]
        return np.concatenate(parts, dtype=self.dtype, casting="safe")


def plain_ids(tokenizer: Any, text: str | list[str]) -> Any:
    """Return the ids of a text, or of each text of a list: no special tokens are added, and nothing is truncated."""
    return tokenizer(
        text, add_special_tokens=False, truncation=False, padding=False, return_attention_mask=False, verbose=False
    )["input_ids"]


# A cut between a letter or digit and the newline after it. Byte-level tokenizers (GPT-2's, Llama 3's, Qwen's) split
# there before they look for tokens; after a newline, or after punctuation, they differ.
_CLEAN_CUT = re.compile(r"(?<=[^\W_])(?=\n)")


def split_text(text: str, piece_chars: int) -> Iterator[str]:
    """Cut text into pieces for a tokenizer, where a token seldom spans the cut.

    A cut is between a letter or digit and a newline, which byte-level tokens never span; else after a newline; else
    after a space; else after `piece_chars` characters, so that one endless line does not stall the tokenizer.

    Args:
        text: text to cut.
        piece_chars: most characters of a piece.

    Yields:
        Pieces; joined, they are the text.
    """
    start = 0
    while len(text) - start > piece_chars:
        stop = start + piece_chars
        # The last half is enough to search: in prose or code it has a clean cut.
        tail = max(start + 1, stop - piece_chars // 2)
        clean = [match.end() for match in _CLEAN_CUT.finditer(text, tail, stop)]
        cut = clean[-1] if clean else (text.rfind("\n", start, stop) + 1 or text.rfind(" ", start, stop) + 1 or stop)
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def load_encoder(spec: str) -> Encoder:
    """Load the tokenizer of `data.tokenizer`.

    Args:
        spec: `bytes`, or a local folder with a Hugging Face tokenizer; nothing is downloaded.

    Raises:
        ValueError: the folder does not exist, or holds no tokenizer.
    """
    if spec == BYTES:
        tokenizer = make_byte_tokenizer()
        return Encoder(tokenizer, True, (), (tokenizer.eos_token_id,), len(tokenizer))
    from transformers import AutoTokenizer

    folder = Path(spec).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"data.tokenizer: the folder '{folder}' does not exist. Set it to 'bytes', or to a local folder with a "
            "Hugging Face tokenizer (tokenizer.json); names on the Hub are not downloaded."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"data.tokenizer: the folder '{folder}' holds no tokenizer that transformers can load "
            f"({first_line(error)}). Save one there with tokenizer.save_pretrained, or set data.tokenizer to 'bytes'."
        ) from error
    return encoder_of(tokenizer)


def encoder_of(tokenizer: Any) -> Encoder:
    """Return the encoder of a loaded Hugging Face tokenizer."""
    eos = tokenizer.eos_token_id
    suffix = (eos,) if eos is not None else ()
    return Encoder(
        tokenizer, False, bos_of(tokenizer), suffix, max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
    )


def bos_of(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that a tokenizer adds before a text by itself: the beginning-of-sequence token, or none."""
    added = tokenizer("", add_special_tokens=True)["input_ids"]
    bos = tokenizer.bos_token_id
    return (bos,) if bos is not None and added[:1] == [bos] else ()
