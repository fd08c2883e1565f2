"""Turn token ids into text as they arrive, in whole characters, and stop at stop strings. Pure.

Each token is mapped to bytes, and an incremental UTF-8 decoder turns these into characters. Decoding ever longer
windows of ids would cost more, and can't distinguish a broken byte from an unfinished character.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from kelvin.contracts.wire import decode_lenient

_METASPACE: Final = "▁"
_MAX_ID: Final = 2**32 - 1  # the largest id that the library accepts


class UnsupportedDecoder(ValueError):
    """The tokenizer's decoder has tokens that are not bytes. The message names the decoder."""


class TokenBytes:
    """The bytes that each token of a vocabulary contributes to the text. Special tokens contribute none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises `UnsupportedDecoder` unless tokens are bytes."""
        self._tokenizer = tokenizer
        self._decode_token, self.strips_first_space = _choose_token_decoder(tokenizer.decoder)
        added = tokenizer.get_added_tokens_decoder()
        self._cache: dict[int, bytes] = {token_id: b"" for token_id, token in added.items() if token.special}

    def __repr__(self) -> str:
        return f"<TokenBytes known={len(self._cache)}>"

    def __getitem__(self, token_id: int) -> bytes:
        """Return a token's bytes; b"" for unknown ids, which are not cached. Unknown ids occur: models pad their output
        layer, and prompts may contain any number.
        """
        raw = self._cache.get(token_id)
        if raw is None:
            token = self._tokenizer.id_to_token(token_id) if 0 <= token_id <= _MAX_ID else None
            if token is None:
                return b""
            raw = self._cache[token_id] = self._decode_token(token)
        return raw


TokenDecoder = Callable[[str], bytes]


def _choose_token_decoder(decoder: Any) -> tuple[TokenDecoder, bool]:
    """Return how the tokenizer decodes a token, and whether it strips the text's first space."""
    state = {} if decoder is None else decode_lenient(decoder.__getstate__())
    parts = state.get("decoders", [state])
    names = [part.get("type") for part in parts]
    if set(names) <= {"ByteLevel", "Fuse"} and "ByteLevel" in names:
        return _decode_byte_level, False
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
    return (_decode_byte_fallback if "ByteFallback" in names else _decode_metaspace), strips


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's bijection of bytes to printable characters (openai/gpt-2, encoder.py)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF: Final = _byte_level_alphabet()


def _decode_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()  # an added token stands for itself


def _decode_metaspace(token: str) -> bytes:
    return token.replace(_METASPACE, " ").encode()


def _decode_byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return _decode_metaspace(token)


class Detokenizer:
    """The text of one sequence. The pushed ids continue `prompt_ids` and are spaced accordingly."""

    def __init__(self, token_bytes: TokenBytes, prompt_ids: Sequence[int]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = token_bytes.strips_first_space and not any(token_bytes[token_id] for token_id in prompt_ids)

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes, possibly none."""
        raw = self._token_bytes[token_id]
        if self._at_start and raw:
            self._at_start = False
            raw = raw.removeprefix(b" ")
        return self._decoder.decode(raw)


class StopFinder:
    """A filter that passes text up to the first stop string. It holds back text that may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Return the text that may be sent now. Once `found`, all text before the stop string has been returned."""
        if self.found or not self._stops:
            return "" if self.found else text
        text = self._held + text
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            self.found, self._held = True, ""
            return text[: min(starts)]
        held_characters = max(_overlap(text, stop) for stop in self._stops)
        sendable, self._held = text[: len(text) - held_characters], text[len(text) - held_characters :]
        return sendable

    def flush(self) -> str:
        """Return the text that was held back, because the sequence has ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
