"""Read a `tokenizer.json`: with the library, or in half the time if it is a large BPE with known fields only.

The library first parses the file into an untyped tree and holds the interpreter's lock: half a second for 128,000
tokens, in which nothing else in the process runs. The fast way parses vocabulary and merges here and builds the same
tokenizer from them. If the file has unknown fields, or if the fast way gives other ids, the library reads it instead.

The library panics on unexpected input, such as a regular expression that backtracks too often. A panic reaches Python
as a BaseException that is no Exception. So all loading and encoding is in this module, which names the artifact in its
errors. Other modules only look up tokens and ids.
"""

from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from math import prod
from typing import Any, Final

import msgspec
from tokenizers import AddedToken, Tokenizer, models

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import BadJson, decode_any, decoder

TOKENIZER: Final = "tokenizer.json"
MAX_GROWTH: Final = 128  # how many times longer a tokenizer may make a text
MAX_ADDED_TOKENS: Final = 128  # special tokens that it may add to a text
_PANIC: Final = "pyo3_runtime"  # the module of a panic's exception class
# How many characters a normalizer or pre-tokenizer makes of one character at most, by type; 1 for other types.
_GROWTH: Final = {"BertNormalizer": 3, "ByteLevel": 4}
LARGE_BYTES: Final = 1 << 20  # bytes; for smaller files the library takes at most some 100 ms


class _AddedToken(msgspec.Struct, forbid_unknown_fields=True):
    """A token outside the model. The library always writes every field, so none has a default here."""

    id: int
    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class _Bpe(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="BPE"):
    """The model's fields and defaults, as in tokenizers. Merges are pairs, or in older files texts of two parts."""

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
    """The large parts of the file, and the added tokens that depend on them."""

    model: _Bpe
    added_tokens: list[_AddedToken]


_NONE: Final = msgspec.Raw(b"[]")
_MODEL: Final = msgspec.Raw(b'{"type":"BPE","vocab":{},"merges":[]}')


def load_tokenizer(raw: bytes) -> Any:
    """Return a `tokenizers.Tokenizer` that neither truncates nor pads. Raises `Refused(ArtifactRejected)`.

    The manifest's limits refuse texts that are too long.
    """
    with _as_file_rejected("does not load"):
        tokenizer = read_tokenizer(raw)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        growth = _growth(_state(tokenizer.normalizer)) * _growth(_state(tokenizer.pre_tokenizer))
        copies, added = _post_processor_growth(_state(tokenizer.post_processor))
    if growth * copies > MAX_GROWTH:
        rule = f"it can make a text {growth * copies} times as long; at most {MAX_GROWTH} times is served"
        raise Refused(ArtifactRejected(TOKENIZER, rule))
    if added > MAX_ADDED_TOKENS:
        rule = f"it adds {added} special tokens to a text; at most {MAX_ADDED_TOKENS} are served"
        raise Refused(ArtifactRejected(TOKENIZER, rule))
    return tokenizer


def encode_text(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
    """Return the token ids of a text. Raises `Refused(ArtifactRejected)` if the tokenizer fails on it.

    Other threads run meanwhile; `Tokenizer.encode` would hold the interpreter's lock.
    """
    with _as_file_rejected("fails on this text"):
        (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoded.ids)


def longest_token_characters(tokenizer: Any) -> int:
    """Return the characters of the longest token. Slow.

    n tokens stand for at most n times that many characters, unless the tokenizer drops text or has one unknown token
    for a whole word.
    """
    return max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)


@contextmanager
def _as_file_rejected(what: str) -> Iterator[None]:
    """Translate all exceptions of the library, panics included, into `Refused(ArtifactRejected)`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != _PANIC:
            raise
        raise Refused(ArtifactRejected(TOKENIZER, f"{what}: {str(error)[:200]}")) from error


def _state(part: Any) -> dict[str, Any]:
    state: dict[str, Any] = {} if part is None else decode_any(part.__getstate__())
    return state


def _growth(part: dict[str, Any]) -> int:
    """Return how many times longer a normalizer or pre-tokenizer can make a text. For a sequence: the product of its
    steps.
    """
    match part:
        case {"type": "Sequence", "normalizers": steps} | {"type": "Sequence", "pretokenizers": steps}:
            return prod(map(_growth, steps))
        case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:
            raw = b64decode(charsmap)  # the length of the trie, the trie, zero-terminated replacements
            replacements = raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")
            return max(1, *(len(each.decode(errors="replace")) for each in replacements))
        case {"type": "Replace", "pattern": {"String": str(replaced)}, "content": str(content)} if replaced:
            return max(1, -(-len(content) // len(replaced)))
        case {"type": "Replace", "content": str(added)} | {"type": "Prepend", "prepend": str(added)}:
            return 1 + len(added)  # a regular expression may match between any two characters
        case _:
            return _GROWTH.get(part.get("type", ""), 1)


def _post_processor_growth(processor: dict[str, Any]) -> tuple[int, int]:
    """Return how often a post-processor repeats a text, and how many special tokens it adds at most."""
    match processor:
        case {"type": "Sequence", "processors": steps}:
            copies, added = 1, 0
            for step_copies, step_added in map(_post_processor_growth, steps):
                copies, added = copies * step_copies, added * step_copies + step_added
            return copies, added
        case {"type": "TemplateProcessing", "single": list(pieces), "special_tokens": dict(special)}:
            named = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
            return max(1, len(pieces) - len(named)), sum(len(special[name]["ids"]) for name in named)
        case _:
            return 1, 0


def read_tokenizer(raw: bytes, large_bytes: int = LARGE_BYTES) -> Any:
    """Return a `tokenizers.Tokenizer`. Raises the library's exceptions, whose only common base is BaseException."""
    if len(raw) >= large_bytes and (fast := _try_fast(raw)) is not None:
        return fast
    return Tokenizer.from_buffer(raw)


def reads_same_tokenizer(raw: bytes, large_bytes: int = LARGE_BYTES) -> bool:
    """Return whether the fast way and the library give the same tokenizer, compared as JSON. Slow.

    Raises `Refused(ArtifactRejected)` if the file does not load.
    """
    with _as_file_rejected("does not load"):
        return (
            len(raw) < large_bytes or read_tokenizer(raw, large_bytes).to_str() == Tokenizer.from_buffer(raw).to_str()
        )


def _try_fast(raw: bytes) -> Any:
    """Return None if the file is of another kind, or if a token gets another id than the file has."""
    try:
        file = decoder(_File).decode(raw)
        rest = decoder(dict[str, msgspec.Raw]).decode(raw) | {"added_tokens": _NONE, "model": _MODEL}
        tokenizer: Any = Tokenizer.from_buffer(msgspec.json.encode(rest))
        model = file.model
        optional = {
            name: getattr(model, name) for name in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")
        }
        tokenizer.model = models.BPE(
            vocab=model.vocab,
            merges=_pairs(model.merges),
            fuse_unk=model.fuse_unk,
            byte_fallback=model.byte_fallback,
            ignore_merges=model.ignore_merges,
            **{name: value for name, value in optional.items() if value is not None},
        )
    except Exception:  # the library then reads the file and reports what is wrong
        return None
    for is_special, tokens in groupby(file.added_tokens, lambda token: token.special):
        add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
        add([_added(token) for token in tokens])
    if any(tokenizer.token_to_id(token.content) != token.id for token in file.added_tokens):
        return None
    return tokenizer


def _pairs(merges: msgspec.Raw) -> list[tuple[str, str]]:
    """Return the merges as pairs. Raises ValueError; BadJson is one."""
    try:
        return decoder(list[tuple[str, str]]).decode(merges)
    except BadJson:  # older files have texts; the decoder fails at the first one
        return [_pair(text) for text in decoder(list[str]).decode(merges)]


def _pair(text: str) -> tuple[str, str]:
    left, right = text.split(" ")
    return left, right


def _added(token: _AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )
