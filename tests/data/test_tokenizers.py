"""Encoding: the byte tokenizer equals the Hugging Face tokenizer it is saved as; nothing is cut off or joined."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trunkline.data import load_encoder, make_byte_tokenizer
from trunkline.data.tokenizers import plain_ids, split_text

ENCODER = load_encoder("bytes")
TEXT = "def f(x):\n    return x + 1\n\n\nclass Größe:\n    pass\n\n" * 40


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([TEXT], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    # A length limit inside the tokenizer's own file: the recipe's context decides, not this.
    backend.enable_truncation(16)
    folder = tmp_path_factory.mktemp("bpe")
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", model_max_length=16
    ).save_pretrained(folder)
    return folder


@settings(deadline=None, max_examples=200)
@given(st.text())
def test_bytes_equal_the_hugging_face_tokenizer(text):
    ids = ENCODER.encode(text)
    assert ids.tolist() == [*text.encode(), 256]
    if "<|" not in text:
        assert ENCODER.tokenizer(text)["input_ids"] == list(text.encode())
    assert ENCODER.tokenizer.decode(ids[:-1].astype(int)) == text


def test_byte_tokenizer_survives_saving(tmp_path):
    make_byte_tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = bytes(range(128)).decode() + "é漢🚆 \r\n  \u2028"
    assert loaded(text)["input_ids"] == list(text.encode())
    assert loaded.decode(list(text.encode())) == text
    assert (len(loaded), loaded.eos_token_id, loaded.pad_token_id, loaded.bos_token_id) == (258, 256, 257, None)
    assert loaded.decode([256, 257], skip_special_tokens=True) == ""


def test_special_words_in_the_text_stay_text():
    assert ENCODER.encode("<|eos|>").tolist() == [*b"<|eos|>", 256]


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="ab \n", max_size=200), st.integers(1, 30))
def test_pieces_join_to_the_text_and_are_bounded(text, piece_chars):
    pieces = list(split_text(text, piece_chars))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= piece_chars for piece in pieces)


def test_cuts_lie_before_newlines_else_after_them_else_at_spaces_else_anywhere():
    assert list(split_text("aaaa)\nbbb1\ncccc", 12)) == ["aaaa)\nbbb1", "\ncccc"]
    assert list(split_text("aaaa)\nbbb:\ncccc", 12)) == ["aaaa)\nbbb:\n", "cccc"]
    assert list(split_text("aaaa bbbb", 7)) == ["aaaa ", "bbbb"]
    assert list(split_text("aaaabbbb", 5)) == ["aaaab", "bbb"]


def test_long_text_is_encoded_in_pieces_and_whole(bpe_folder, monkeypatch):
    encoder = load_encoder(str(bpe_folder))
    assert encoder.piece_chars == 1_000_000
    whole = encoder.tokenizer(TEXT, add_special_tokens=False, truncation=False)["input_ids"]
    encoder = dataclasses.replace(encoder, piece_chars=300)
    calls = []
    monkeypatch.setattr(
        "trunkline.data.tokenizers.plain_ids",
        lambda tokenizer, piece: calls.append(len(piece)) or plain_ids(tokenizer, piece),
    )
    ids = encoder.encode(TEXT)
    assert max(calls) <= 300 < len(TEXT)
    assert len(whole) > 16
    # Beginning and end once, not once a piece; and no tokenizer length limit.
    assert ids.tolist() == [0, *whole, 1]
    assert encoder.tokenizer.decode(ids[1:-1]) == TEXT


def test_ids_have_the_smallest_type(bpe_folder):
    assert load_encoder(str(bpe_folder)).encode("a").dtype == np.uint16
    assert ENCODER.encode("a").dtype == np.uint16


def test_a_missing_tokenizer_is_refused_with_the_fix(tmp_path):
    with pytest.raises(ValueError, match=r"data\.tokenizer: the folder '.*nowhere' does not exist\. Set it to 'bytes'"):
        load_encoder(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"data\.tokenizer: the folder '.*' holds no tokenizer"):
        load_encoder(str(tmp_path))
