"""Haystacks: sentences of the grammar and of a user's texts, filled to an exact number of tokens."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.data import make_byte_tokenizer
from trunkline.evaluate import TASKS, TextHaystack
from trunkline.evaluate.haystack import fill_exactly, split_sentences
from trunkline.evaluate.needle_samples import SampleMaker
from trunkline.evaluate.piece_tokenizer import PieceTokenizer
from trunkline.evaluate.prose import prose
from trunkline.evaluate.seeded import SplitMix64

TEXT = "It is 3.5 miles to the inn. Who goes there? 他走了。她来了\uff01\nA line\n\nAnother one. " + "endless " * 200


def test_prose_is_varied_and_has_no_digits():
    sentences = list(itertools.islice(prose(SplitMix64(0)), 2000))
    assert len(set(sentences)) > 1950
    assert all(sentence[0] == " " and sentence[-1] == "." for sentence in sentences)
    assert not any(letter.isdigit() or letter in "{}" for sentence in sentences for letter in sentence)
    # 14 forms, each as likely: 143 of 2,000, with a standard deviation of 11.5; six of these.
    assert abs(sum(sentence.startswith(" Nobody knew why") for sentence in sentences) - 143) < 70


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="aB .!?。\uff01\n\"' ", max_size=300))
def test_joined_sentences_are_the_text(text):
    pieces = split_sentences(text)
    assert "".join(pieces) == text
    assert all(pieces)


def test_texts_are_split_at_ends_of_sentences_and_lines():
    pieces = split_sentences(TEXT)
    assert pieces[:6] == [
        "It is 3.5 miles to the inn.", " Who goes there?", " 他走了。", "她来了\uff01\n", "A line\n\n", "Another one.",
    ]  # fmt: skip
    assert all(len(piece) <= 600 for piece in pieces)
    assert len(pieces) > 8


def test_a_users_texts_are_the_haystack(tmp_path):
    (tmp_path / "a.txt").write_text("The first file has one sentence. And two.\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("The second file, that is “the last”.\n", encoding="utf-8")
    tokenizer = make_byte_tokenizer()
    haystack = TextHaystack.read([str(tmp_path / "*.txt")])
    sample = SampleMaker(PieceTokenizer(tokenizer), haystack, (0.5,), 0).make(TASKS["needle"], 3000, 0)
    text = tokenizer.decode(sample.ids)
    # In their order, and from the beginning again.
    assert "And two.\nThe second file, that is “the last”.\nThe first file" in text
    assert "market" not in text
    (answer,) = sample.answers
    assert tokenizer.decode(sample.ids[answer.start : answer.stop]) == f" {answer.text}"


def test_texts_without_text_are_refused():
    with pytest.raises(ValueError, match="haystack: the texts are empty"):
        TextHaystack(["", " \n"])


def test_a_haystack_without_tokens_is_refused():
    pieces = PieceTokenizer(make_byte_tokenizer())
    with pytest.raises(ValueError, match="haystack: its text has no tokens"):
        fill_exactly(pieces, itertools.repeat(""), 10)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2000), st.integers(0, 50))
def test_filling_is_exact_and_cuts_only_the_first_sentence(num_tokens, seed):
    pieces = PieceTokenizer(make_byte_tokenizer())
    filled = fill_exactly(pieces, prose(SplitMix64(seed)), num_tokens)
    assert sum(map(len, filled)) == num_tokens
    sentences = [list(s.encode()) for s in itertools.islice(prose(SplitMix64(seed)), 100)]
    joined = [token for sentence in sentences for token in sentence]
    whole = [token for sentence in filled for token in sentence]
    if filled:
        assert all(sentence in sentences for sentence in filled[1:])
        # What is kept ends with a sentence, and is all that was before it but for the front.
        ends = list(itertools.accumulate(map(len, sentences)))
        assert any(joined[end - num_tokens : end] == whole for end in ends if end >= num_tokens)


@pytest.mark.parametrize(
    ("sentences", "num_tokens", "kept"),
    [(("12", "3", "45"), 5, "12 3 45"), (("12", "3", "45"), 4, "2 3 45"), (("1", "23456"), 3, "456"), (("1",), 0, "")],
)
def test_excess_is_cut_from_the_front(sentences, num_tokens, kept):
    pieces = SimpleNamespace(encode_many=lambda texts, lines: [list(text) for text in texts])
    found = fill_exactly(pieces, itertools.cycle(sentences), num_tokens)
    assert " ".join(map("".join, found)) == kept


def test_ids_of_a_piece_are_those_within_a_text():
    """A tokenizer that marks the beginning of whatever it is given marks no piece so."""

    class Marking(SimpleNamespace):
        def __call__(self, texts, **settings):
            return {"input_ids": [[1, *text.encode()] for text in texts]}

    pieces = PieceTokenizer(Marking(bos_token_id=None, unk_token_id=None))
    assert pieces.encode(" is") == list(b" is")
    assert pieces.encode_many(["A line", " goes"], lines=True) == [list(b"A line"), list(b" goes")]
