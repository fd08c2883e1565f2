"""Text is sent in whole characters, with the right spaces, and without a stop string."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from runtime.text.detokenizer import Detokenizer, StopFinder, TokenBytes, UnsupportedDecoder
from tests.runtime.vocabularies import byte_level, metaspace

BYTE_LEVEL = Tokenizer.from_buffer(byte_level())
METASPACE = Tokenizer.from_buffer(metaspace())
NO_STRIP = Tokenizer.from_buffer(metaspace(strip=False))


def _stream(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(TokenBytes(tokenizer), prompt)
    return [detokenizer.push(token_id) for token_id in ids]


@example([171, 96])
@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3)))
def test_byte_level_pieces_join_to_what_the_library_decodes(ids: list[int]) -> None:
    """Any ids, also broken bytes and unknown ids, stream to the library's text, except an unfinished end."""
    known = [token_id for token_id in ids if token_id < BYTE_LEVEL.get_vocab_size()]
    whole = BYTE_LEVEL.decode(known)
    said = "".join(_stream(BYTE_LEVEL, ids))
    # Python waits for the third byte of a surrogate half (ed a0 to ed bf), which the library replaces at once.
    assert whole in (said, said + "\ufffd", said + "\ufffd\ufffd")


@pytest.mark.parametrize(
    "tokenizer",
    [
        pytest.param(BYTE_LEVEL, id="byte-level"),
        pytest.param(METASPACE, id="metaspace with byte fallback"),
        pytest.param(NO_STRIP, id="metaspace whose first space is text"),
    ],
)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40))
def test_any_text_comes_back_as_the_library_decodes_it(tokenizer: Tokenizer, text: str) -> None:
    """Encoding and streaming a text gives what decoding it at once gives."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(_stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("token_id", [-1, -(2**40), METASPACE.get_vocab_size(), 10**6, 2**32 - 1, 2**32, 2**64])
def test_unknown_token_gives_no_text(token_id: int) -> None:
    """An unknown token in a prompt gives no text, and nothing is cached. The engine refuses it by name."""
    pieces = TokenBytes(METASPACE)
    known = repr(pieces)
    assert Detokenizer(pieces, [token_id]).push(token_id) == ""
    assert repr(pieces) == known


@given(
    st.text(st.sampled_from("aé中😀 the"), min_size=1, max_size=20),
    st.text(st.sampled_from("aé中😀 the"), min_size=1, max_size=20),
)
def test_a_continuation_is_spaced_as_one(before: str, after: str) -> None:
    """Prompt and answer together read as the library decodes them, with the space between."""
    prompt = METASPACE.encode(before, add_special_tokens=False).ids
    ids = METASPACE.encode(after, add_special_tokens=False).ids
    assert METASPACE.decode(prompt) + "".join(_stream(METASPACE, ids, prompt)) == METASPACE.decode(prompt + ids)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte-level", "byte fallback"])
def test_no_piece_holds_half_a_character(tokenizer: Tokenizer) -> None:
    """A character of several tokens appears with the last of them. Single tokens decode to halves (control)."""
    ids = tokenizer.encode("ぬ ж 🦀", add_special_tokens=False).ids
    pieces = _stream(tokenizer, ids)
    assert "\ufffd" not in "".join(pieces)
    assert "" in pieces, "some token completes no character"
    assert "\ufffd" in "".join(tokenizer.decode([token_id]) for token_id in ids)


def test_broken_bytes_end_the_stream_of_the_library_and_not_ours() -> None:
    """The library's `DecodeStream` is not used because it raises after a broken byte."""
    ids = [METASPACE.token_to_id(token) for token in ("<0x6E>", "<0xFA>", "or")]
    known = [token_id for token_id in ids if token_id is not None]
    assert _stream(METASPACE, known) == ["n", "\ufffd", "or"]
    theirs = DecodeStream(skip_special_tokens=True)
    assert [theirs.step(METASPACE, token_id) for token_id in known[:2]] == ["n", None]
    with pytest.raises(Exception, match="Invalid prefix"):
        theirs.step(METASPACE, known[2])


def test_special_tokens_say_nothing_and_added_ones_speak() -> None:
    """An end token gives no text, and an added token with a space is literal."""
    two_words = BYTE_LEVEL.token_to_id("two words")
    assert two_words is not None
    assert _stream(BYTE_LEVEL, [0, two_words, 1]) == ["", "two words", ""]


def test_an_unknown_decoder_is_refused_by_name() -> None:
    """A decoder whose pieces are not bytes is refused by name."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedDecoder, match="WordPiece"):
        TokenBytes(tokenizer)


def test_no_decoder_is_refused() -> None:
    state = json.loads(byte_level())
    state["decoder"] = None
    with pytest.raises(UnsupportedDecoder, match="no type"):
        TokenBytes(Tokenizer.from_str(json.dumps(state)))


def _cut(text: str, stops: Sequence[str]) -> str:
    starts = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(starts)] if starts else text


@given(
    st.lists(st.text(st.sampled_from("ab"), max_size=3), max_size=12),
    st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=5), max_size=4),
)
def test_stop_strings_cut_wherever_tokens_do(pieces: list[str], stops: list[str]) -> None:
    """However the text is split, the text before the first complete stop string is sent.
    A longer stop string that began earlier loses against a shorter one that is complete first."""
    finder = StopFinder(stops)
    sent = ""
    for piece in pieces:
        sent += finder.push(piece)
        assert not any(stop in sent for stop in stops)
        assert "".join(pieces).startswith(sent)
    if not finder.found:
        sent += finder.flush()
        assert sent == "".join(pieces)
    assert finder.found == any(stop in "".join(pieces) for stop in stops)


@given(st.text(st.sampled_from("ab"), max_size=30), st.text(st.sampled_from("ab"), min_size=1, max_size=5))
def test_one_stop_string_cuts_exactly(text: str, stop: str) -> None:
    finder = StopFinder([stop])
    sent = "".join(finder.push(character) for character in text)
    assert sent + finder.flush() == _cut(text, [stop])


def test_text_that_begins_no_stop_string_is_not_held() -> None:
    """Only text that could begin a stop string is held back."""
    finder = StopFinder(["\n\nHuman:"])
    assert finder.push("Hello") == "Hello"
    assert finder.push(" there\n") == " there"
    assert finder.push("\nfriend") == "\n\nfriend"
    assert not finder.found
