"""Tokenize text and find the stop ids of a version, from the verified bytes of its pinned files. Reads no path.

`detokenizer.py` turns ids back into text.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.errors import InvalidRequest, Refused
from runtime.models.pinned_files import CONFIG, PinnedFiles, end_of_sequence_ids, json_object
from runtime.text.chat_template import ChatTemplate, Message
from runtime.text.detokenizer import Detokenizer, TokenBytes, UnsupportedDecoder
from runtime.text.tokenizer_file import (
    TOKENIZER,
    encode_text,
    load_tokenizer,
    longest_token_characters,
    reads_same_tokenizer,
)

_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# A minimal conversation. A template that can't render it can't serve chats.
CONVERSATION: Final[tuple[Mapping[str, str], ...]] = (
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Good day."},
    {"role": "user", "content": "Tell me more."},
)


class TextCodec:
    """One version's tokenizer. Thread-safe, because encoding does not change it."""

    def __init__(self, files: PinnedFiles) -> None:
        """`files` are by name; `tokenizer.json` is required. Raises `Refused(ArtifactRejected)` with the file."""
        if TOKENIZER not in files:
            raise Refused(ArtifactRejected(TOKENIZER, "is missing"))
        self._tokenizer: Any = load_tokenizer(files[TOKENIZER])
        try:
            self._token_bytes = TokenBytes(self._tokenizer)
        except UnsupportedDecoder as error:
            raise Refused(ArtifactRejected(TOKENIZER, str(error))) from error
        config = json_object(files, "tokenizer_config.json")
        special = _special_tokens({**json_object(files, "special_tokens_map.json"), **config})
        self.template_file, self._template = _chat_template(files, config, special)
        ids = {name: self._tokenizer.token_to_id(text) for name, text in special.items()}
        self.special_ids: dict[str, int] = {name: token_id for name, token_id in ids.items() if token_id is not None}
        eos_ids = {self.special_ids["eos_token"]} if "eos_token" in self.special_ids else set()
        self.stop_ids: frozenset[int] = end_of_sequence_ids(files) | eos_ids

    def __repr__(self) -> str:
        return f"<TextCodec vocab={self._tokenizer.get_vocab_size()} chat={self._template is not None}>"

    @property
    def token_count(self) -> int:
        """Return how many tokens there are. Ids may have gaps; `vocab_size` has the highest, but is slow."""
        count: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return count

    @property
    def vocab_size(self) -> int:
        """Return the highest id that a text can have, plus one. Slow."""
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return 1 + max(ids.values())

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text to continue, with the special tokens that the tokenizer adds."""
        return encode_text(self._tokenizer, text)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the ids of a conversation. Its template writes the special tokens itself. Raises `Refused`."""
        return self.encode_rendered(self.render(messages))

    def render(self, messages: Sequence[Message]) -> str:
        """Return the conversation as the chat template renders it. Raises `Refused`."""
        if self._template is None:
            rule = "this model has no chat template; /v1/completions continues plain text"
            raise Refused(InvalidRequest("messages", f"({len(messages)})", rule))
        return self._template.render(messages)

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text from `render`. Raises `Refused`."""
        return encode_text(self._tokenizer, text, add_special_tokens=False)

    @cached_property
    def longest_token_characters(self) -> int:
        """Return the characters of the longest token. The first call is slow."""
        return longest_token_characters(self._tokenizer)

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        """Return a detokenizer for the continuation of `prompt_ids`."""
        return Detokenizer(self._token_bytes, prompt_ids)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the named special tokens. Each is a text or an object with a `content`."""
    texts = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
    return texts


def _chat_template(
    files: PinnedFiles, config: Mapping[str, Any], special: Mapping[str, str]
) -> tuple[str | None, ChatTemplate | None]:
    """Return the template's file and the template. `chat_template.jinja` comes before the configuration, in which the
    template named `default` counts.
    """
    path, source = "tokenizer_config.json", config.get("chat_template")
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    if (raw := files.get("chat_template.jinja")) is not None:
        path, source = "chat_template.jinja", raw.decode("utf-8", "replace")
    if source is None:
        return None, None
    try:
        return path, ChatTemplate(str(source), special)
    except ValueError as error:
        raise Refused(ArtifactRejected(path, str(error)[:200])) from error


def check_token_rows(codec: TextCodec, vocab_size: int) -> None:
    """Check that the model has a row for every special token, every stop id and every token of a conversation.

    Also checks that it has as many rows as there are tokens. Ids may have gaps: `check_vocabulary` checks each id, but
    is slow. Raises `Refused(ArtifactRejected)` with file and token.
    """
    if codec.token_count > vocab_size:
        _reject(TOKENIZER, f"has {codec.token_count} tokens, the model {vocab_size}")
    for name, token_id in codec.special_ids.items():
        if token_id >= vocab_size:
            _reject(TOKENIZER, f"{name} is id {token_id}, but the model has {vocab_size} rows")
    for stop_id in sorted(codec.stop_ids):
        if not 0 <= stop_id < vocab_size:
            _reject(
                CONFIG,
                f"eos_token_id {stop_id}, here or in generation_config.json: must be a row of the model's {vocab_size}",
            )
    if codec.template_file is not None:
        _check_template(codec, codec.template_file, vocab_size)


def check_fast_reader(tokenizer: bytes) -> None:
    """Check that our parser of a large `tokenizer.json` gives the same tokenizer as the library. Raises
    `Refused(ArtifactRejected)`.
    """
    if not reads_same_tokenizer(tokenizer):
        _reject(TOKENIZER, "is read differently here and by the tokenizers library")


def check_vocabulary(codec: TextCodec, vocab_size: int) -> None:
    """Check that the model has a row for every id of the vocabulary. Raises `Refused(ArtifactRejected)`."""
    if codec.vocab_size > vocab_size:
        _reject(TOKENIZER, f"has id {codec.vocab_size - 1}, the model {vocab_size} rows")


def _check_template(codec: TextCodec, path: str, vocab_size: int) -> None:
    try:
        ids = codec.encode_chat(CONVERSATION)
    except Refused as refused:
        reason = f"does not render a conversation of user, assistant and user: {refused.failure.message[:200]}"
        raise Refused(ArtifactRejected(path, reason)) from refused
    if not ids:
        _reject(path, "renders a conversation to nothing")
    if (highest := max(ids)) >= vocab_size:
        _reject(path, f"renders a conversation with id {highest}, but the model has {vocab_size} rows")


def _reject(path: str, reason: str) -> None:
    raise Refused(ArtifactRejected(path, reason))
