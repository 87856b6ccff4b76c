from __future__ import annotations

import pytest
from http_fakes import byte_level_tokenizer, sentencepiece_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from pdd.base.errors import ModelInvalid
from pdd.http.detokenizer import Detokenizer, StopScanner
from pdd.http.vocabulary import ByteVocabulary, TokenizerVocabulary, Vocabulary

BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
FIRST_WORD = 259


def text_of(vocabulary: Vocabulary, tokens: list[int], *, skip_special_tokens: bool = True) -> str:
    detokenizer = Detokenizer(vocabulary, skip_special_tokens=skip_special_tokens)
    return "".join([*(detokenizer.push(token) for token in tokens), detokenizer.flush()])


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1)), st.booleans())
def test_byte_level_tokens_one_by_one_are_the_whole_decode(tokens: list[int], skip: bool) -> None:
    vocabulary = TokenizerVocabulary(BYTE_LEVEL, BYTE_LEVEL.get_vocab_size())
    assert text_of(vocabulary, tokens, skip_special_tokens=skip) == BYTE_LEVEL.decode(tokens, skip_special_tokens=skip)


@given(st.lists(st.one_of(st.integers(1, 2), st.integers(FIRST_WORD, SENTENCEPIECE.get_vocab_size() - 1), st.text())))
def test_sentencepiece_tokens_one_by_one_are_the_whole_decode_after_a_prompt(parts: list[int | str]) -> None:
    """Texts become byte tokens, so that characters are cut by token borders."""
    tokens = [
        token for part in parts for token in ([part] if isinstance(part, int) else [3 + byte for byte in part.encode()])
    ]
    vocabulary = TokenizerVocabulary(SENTENCEPIECE, SENTENCEPIECE.get_vocab_size())
    prompt = SENTENCEPIECE.encode("Hello").ids
    whole = SENTENCEPIECE.decode(prompt + tokens)
    assert SENTENCEPIECE.decode(prompt) + text_of(vocabulary, tokens) == whole


@given(st.text())
def test_a_byte_vocabulary_gives_back_what_it_took(text: str) -> None:
    vocabulary = ByteVocabulary(300)
    assert text_of(vocabulary, [*vocabulary.encode(text), 256, 299]) == text
    assert vocabulary.decode(vocabulary.encode(text)) == text


@given(st.text(min_size=1))
def test_no_part_ends_within_a_character(text: str) -> None:
    """A replacement character may only come out when the text itself has one."""
    vocabulary = ByteVocabulary(256)
    detokenizer = Detokenizer(vocabulary, skip_special_tokens=True)
    parts = [detokenizer.push(token) for token in vocabulary.encode(text)]
    assert "".join(parts).count("\ufffd") == text.count("\ufffd")
    assert len([part for part in parts if part]) == len(text)


def test_an_unfinished_character_at_the_end_is_one_replacement() -> None:
    vocabulary = ByteVocabulary(256)
    assert text_of(vocabulary, list("a🦊".encode()[:-1])) == "a\ufffd"


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    vocabulary = TokenizerVocabulary(BYTE_LEVEL, 100_000)
    assert text_of(vocabulary, [99_999]) == ""


def test_a_decoder_of_another_family_is_refused() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelInvalid, match="WordPiece"):
        TokenizerVocabulary(tokenizer, 1)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(end, stop string) of the stop string that is complete first; of several that end together, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


small_texts = st.text(alphabet="ab\n", max_size=30)


@given(st.lists(small_texts, max_size=10), st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4), st.booleans())
def test_any_split_gives_the_text_up_to_the_first_stop_string(
    parts: list[str], stops: list[str], include: bool
) -> None:
    text = "".join(parts)
    scanner = StopScanner(stops, include_stop=include)
    shown = ""
    for part in parts:
        shown += scanner.push(part)
        if scanner.found is not None:
            break
    else:
        shown += scanner.flush()
    found = first_stop(text, stops)
    if found is None:
        assert (shown, scanner.found) == (text, None)
        return
    end, stop = found
    assert (shown, scanner.found) == (text[: end if include else end - len(stop)], stop)


@given(small_texts, st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4))
def test_what_is_shown_early_never_has_to_be_taken_back(text: str, stops: list[str]) -> None:
    """Character by character, nothing is held that no stop string could still claim."""
    scanner = StopScanner(stops, include_stop=False)
    shown = ""
    for count, character in enumerate(text, 1):
        shown += scanner.push(character)
        if scanner.found is not None:
            return
        held = text[len(shown) : count]
        assert shown + held == text[:count]
        assert not held or any(stop.startswith(held) for stop in stops)
