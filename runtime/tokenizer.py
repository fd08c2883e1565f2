"""Text to token ids and the stop ids of a version, from its pinned files' verified bytes; nothing is read by path.

Turning ids back into text is detokenizer's work.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from contracts.artifact_errors import ArtifactRejected
from contracts.errors import InvalidRequest, Refused
from runtime.chat_template import ChatTemplate, Message
from runtime.detokenizer import Detokenizer, TokenBytes, UnsupportedDecoder
from runtime.pinned import PinnedFiles, end_ids, json_object
from runtime.tokenizer_file import TOKENIZER, encode_text, load_tokenizer, longest_token

CONFIG: Final = "config.json"
_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextCodec:
    """One version's tokenizer. Thread-safe: encoding does not change it."""

    def __init__(self, files: PinnedFiles) -> None:
        """`files` by name, `tokenizer.json` required. Raises `Refused(ArtifactRejected)` naming the file."""
        if TOKENIZER not in files:
            raise Refused(ArtifactRejected(TOKENIZER, "is missing"))
        self._tokenizer: Any = load_tokenizer(files[TOKENIZER])
        try:
            self._pieces = TokenBytes(self._tokenizer)
        except UnsupportedDecoder as error:
            raise Refused(ArtifactRejected(TOKENIZER, str(error))) from error
        config = json_object(files, "tokenizer_config.json")
        special = _special_tokens({**json_object(files, "special_tokens_map.json"), **config})
        self.template_file, self._template = _chat_template(files, config, special)
        ids = {name: self._tokenizer.token_to_id(text) for name, text in special.items()}
        self.special_ids: dict[str, int] = {name: found for name, found in ids.items() if found is not None}
        end = {self.special_ids["eos_token"]} if "eos_token" in self.special_ids else set()
        self.stop_ids: frozenset[int] = end_ids(files) | end

    def __repr__(self) -> str:
        return f"<TextCodec vocab={self._tokenizer.get_vocab_size()} chat={self._template is not None}>"

    @property
    def token_count(self) -> int:
        """How many tokens it has. Ids may have gaps: `vocab_size` knows the highest, and takes a while."""
        count: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return count

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that a text can have. Takes a while."""
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return 1 + max(ids.values())

    def encode(self, text: str) -> tuple[int, ...]:
        """A text to be continued: with the special tokens that the tokenizer puts around one."""
        return encode_text(self._tokenizer, text)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """A conversation through the chat template, which spells its special tokens itself. Raises `Refused`."""
        return self.encode_rendered(self.render(messages))

    def render(self, messages: Sequence[Message]) -> str:
        """Return the conversation as the chat template writes it. Raises `Refused`."""
        if self._template is None:
            rule = "this model has no chat template; /v1/completions continues plain text"
            raise Refused(InvalidRequest("messages", f"({len(messages)})", rule))
        return self._template.render(messages)

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text that `render` wrote. Raises `Refused`."""
        return encode_text(self._tokenizer, text, add_special_tokens=False)

    @cached_property
    def longest_token(self) -> int:
        """Return the characters of the longest token. The first call is slow."""
        return longest_token(self._tokenizer)

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        """For the continuation of `prompt_ids`."""
        return Detokenizer(self._pieces, prompt_ids)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the named special tokens; each is a text or an object with its `content`."""
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
    """The file that has it, and it. A file of its own comes before the configuration's; of several named ones there
    the default counts.
    """
    where, source = "tokenizer_config.json", config.get("chat_template")
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    if (raw := files.get("chat_template.jinja")) is not None:
        where, source = "chat_template.jinja", raw.decode("utf-8", "replace")
    if source is None:
        return None, None
    try:
        return where, ChatTemplate(str(source), special)
    except ValueError as error:
        raise Refused(ArtifactRejected(where, str(error)[:200])) from error
