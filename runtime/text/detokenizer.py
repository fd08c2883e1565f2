"""Turn token ids into text as they come, never half a character, and stop at stop strings. Pure.

Each token is mapped to bytes, and an incremental UTF-8 decoder makes characters of them: decoding ever longer windows
of ids instead would cost more, and cannot tell a broken byte from an unfinished character.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from kelvin.contracts.wire import decode_lenient

_METASPACE: Final = "▁"
_MAX_ID: Final = 2**32 - 1  # what the library can be asked for


class UnsupportedDecoder(ValueError):
    """The tokenizer's decoder is of a kind whose tokens are not bytes; the text names it."""


class TokenBytes:
    """What each token of a vocabulary contributes to the text, as bytes. Special tokens contribute nothing."""

    def __init__(self, vocabulary: Tokenizer) -> None:
        """Raises `UnsupportedDecoder`."""
        self._vocabulary = vocabulary
        self._token_bytes, self.strips_first_space = _speller(vocabulary.decoder)
        added = vocabulary.get_added_tokens_decoder()
        self._cache: dict[int, bytes] = {token_id: b"" for token_id, token in added.items() if token.special}

    def __repr__(self) -> str:
        return f"<TokenBytes known={len(self._cache)}>"

    def __getitem__(self, token_id: int) -> bytes:
        """b"" also for ids that the vocabulary lacks: models pad their output layer, and prompts may name any number.
        Those are not remembered.
        """
        known = self._cache.get(token_id)
        if known is None:
            token = self._vocabulary.id_to_token(token_id) if 0 <= token_id <= _MAX_ID else None
            if token is None:
                return b""
            known = self._cache[token_id] = self._token_bytes(token)
        return known


Speller = Callable[[str], bytes]


def _speller(decoder: Any) -> tuple[Speller, bool]:
    """How the decoder spells a token, and whether the text's first space is none of the text's."""
    state = {} if decoder is None else decode_lenient(decoder.__getstate__())
    parts = state.get("decoders", [state])
    names = [part.get("type") for part in parts]
    if set(names) <= {"ByteLevel", "Fuse"} and "ByteLevel" in names:
        return _spell_byte_level, False
    strips = False
    for part in parts:
        match part:
            case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
                pass
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                strips = True
            case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}:
                strips = scheme != "never"
            case _:
                raise UnsupportedDecoder(f"a decoder of {part.get('type', 'no type')} is not supported")
    return (_spell_with_fallback if "ByteFallback" in names else _spell_metaspace), strips


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's bijection of bytes to printable characters (openai/gpt-2, encoder.py)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF: Final = _byte_level_alphabet()


def _spell_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()  # an added token: itself


def _spell_metaspace(token: str) -> bytes:
    return token.replace(_METASPACE, " ").encode()


def _spell_with_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return _spell_metaspace(token)


class Detokenizer:
    """The text of one sequence. What is pushed is the continuation of `prompt_ids`, and spaced as such."""

    def __init__(self, pieces: TokenBytes, prompt_ids: Sequence[int]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = pieces.strips_first_space and not any(pieces[token_id] for token_id in prompt_ids)

    def push(self, token_id: int) -> str:
        """The characters that this token completes, possibly none."""
        raw = self._pieces[token_id]
        if self._at_start and raw:
            self._at_start = False
            raw = raw.removeprefix(b" ")
        return self._decoder.decode(raw)


class StopFinder:
    """Passes text on up to the first stop string, holding back what may turn out to be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """What may be sent now. Once `found`, everything up to the stop string has been."""
        if self.found or not self._stops:
            return "" if self.found else text
        text = self._held + text
        starts = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if starts:
            self.found, self._held = True, ""
            return text[: min(starts)]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The sequence ended of itself: what was held back is text after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
