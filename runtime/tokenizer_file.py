"""Read a `tokenizer.json`: as the library does, or, where it is a large BPE of known fields, in half of the time.

The library goes through an untyped tree of the file before it builds the model, holding the interpreter's lock: half a
second for 128,000 tokens, in which nothing else of the process runs. Given vocabulary and merges as they are, it builds
the same. What is not known here, or comes out otherwise, is read its way.
"""

from itertools import groupby
from typing import Any, Final

import msgspec
from tokenizers import AddedToken, Tokenizer, models

from contracts.wire import BadJson, decoder

LARGE: Final = 1 << 20  # bytes; below it the library's way takes some 100 ms at most


class _Added(msgspec.Struct, forbid_unknown_fields=True):
    """A token outside the model. Every field is written by the library, so none has a default here."""

    id: int
    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class _Bpe(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="BPE"):
    """The model's fields and defaults as tokenizers has them. Merges are pairs, or texts of two in older files."""

    vocab: dict[str, int]
    merges: msgspec.Raw
    dropout: None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False


class _File(msgspec.Struct):
    """The part that is large, and what has to come after it."""

    model: _Bpe
    added_tokens: list[_Added]


_NONE: Final = msgspec.Raw(b"[]")
_MODEL: Final = msgspec.Raw(b'{"type":"BPE","vocab":{},"merges":[]}')


def read_tokenizer(raw: bytes, large: int = LARGE) -> Any:
    """A `tokenizers.Tokenizer`. Raises what the library raises, which is nothing narrower than Exception."""
    if len(raw) >= large and (fast := _try_fast(raw)) is not None:
        return fast
    return Tokenizer.from_buffer(raw)


def is_read_alike(raw: bytes, large: int = LARGE) -> bool:
    """Whether what is read here is what the library reads, by its own account of all that it has. Takes a while."""
    return len(raw) < large or read_tokenizer(raw, large).to_str() == Tokenizer.from_buffer(raw).to_str()


def _try_fast(raw: bytes) -> Any:
    """None where the file is of another kind, or a token has another id than the file says."""
    try:
        file = decoder(_File).decode(raw)
        rest = decoder(dict[str, msgspec.Raw]).decode(raw) | {"added_tokens": _NONE, "model": _MODEL}
        tokenizer: Any = Tokenizer.from_buffer(msgspec.json.encode(rest))
        model = file.model
        given = {
            name: getattr(model, name) for name in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")
        }
        tokenizer.model = models.BPE(
            vocab=model.vocab,
            merges=_pairs(model.merges),
            fuse_unk=model.fuse_unk,
            byte_fallback=model.byte_fallback,
            ignore_merges=model.ignore_merges,
            **{name: value for name, value in given.items() if value is not None},
        )
    except Exception:  # the library's way says what is wrong, if anything is
        return None
    for is_special, tokens in groupby(file.added_tokens, lambda token: token.special):
        add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
        add([_added(token) for token in tokens])
    if any(tokenizer.token_to_id(token.content) != token.id for token in file.added_tokens):
        return None
    return tokenizer


def _pairs(merges: msgspec.Raw) -> list[tuple[str, str]]:
    """Raises ValueError, of which BadJson is one."""
    try:
        return decoder(list[tuple[str, str]]).decode(merges)
    except BadJson:  # at the first of them, where they are texts
        return [_pair(text) for text in decoder(list[str]).decode(merges)]


def _pair(text: str) -> tuple[str, str]:
    left, right = text.split(" ")
    return left, right


def _added(token: _Added) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )
