"""Render responses in OpenAI's formats: one renderer each for chat and text, streamed and whole. Pure.

All renderers have the same calls: `begin`, then `text` for each text that is not empty, at last `end`. Each returns
bytes for the client, or b"" if it must wait.
"""

from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from kelvin.contracts.serving.stream_frames import Counts

DONE_EVENT: Final = b"data: [DONE]\n\n"
# The engine's reasons, and the one for a filter.
AnswerReason = Literal["stop", "length", "content_filter"]


@dataclass(frozen=True, slots=True)
class ResponseMetadata:
    """The values that every piece of one response repeats."""

    request_id: str
    model: str
    version: str
    created_s: int


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _Details


def _usage(counts: Counts) -> _Usage:
    total = counts.prompt_tokens + counts.completion_tokens
    return _Usage(counts.prompt_tokens, counts.completion_tokens, total, _Details(counts.cached_tokens))


class _Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str
    refusal: str | None = None


class _ChatChunkChoice(msgspec.Struct, frozen=True):
    delta: _Delta
    finish_reason: AnswerReason | None
    index: int = 0
    logprobs: None = None


class _ChatChoice(msgspec.Struct, frozen=True):
    message: _Message
    finish_reason: AnswerReason
    index: int = 0
    logprobs: None = None


class _TextChoice(msgspec.Struct, frozen=True):
    text: str
    finish_reason: AnswerReason | None
    index: int = 0
    logprobs: None = None


_Choice = _ChatChunkChoice | _ChatChoice | _TextChoice


class _Answer(msgspec.Struct, frozen=True):
    """A response or a piece of one. `usage` is absent if not requested, and null before the piece that has it."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[_Choice, ...]
    usage: _Usage | msgspec.UnsetType | None = msgspec.UNSET


def _encode(
    metadata: ResponseMetadata,
    kind: str,
    choices: tuple[_Choice, ...],
    usage: _Usage | msgspec.UnsetType | None,
) -> bytes:
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    answer = _Answer(
        f"{prefix}-{metadata.request_id}",
        kind,
        metadata.created_s,
        metadata.model,
        f"fp_{metadata.version[:12]}",
        choices,
        usage,
    )
    return msgspec.json.encode(answer)


class _SseRenderer:
    """Server-sent events, with a separate event for the usage if the client requested it."""

    _kind: str

    def __init__(self, metadata: ResponseMetadata, include_usage: bool) -> None:
        self._metadata = metadata
        self._include_usage = include_usage

    def _event(self, *choices: _Choice, usage: _Usage | None = None) -> bytes:
        shown = usage if self._include_usage else msgspec.UNSET
        return b"data: " + _encode(self._metadata, self._kind, choices, shown) + b"\n\n"

    def _last(self, choice: _Choice, counts: Counts) -> bytes:
        usage = self._event(usage=_usage(counts)) if self._include_usage else b""
        return self._event(choice) + usage + DONE_EVENT


class ChatStreamRenderer(_SseRenderer):
    """A chat as `chat.completion.chunk` events."""

    _kind = "chat.completion.chunk"

    def begin(self) -> bytes:
        """Return the event with the role of the speaker."""
        return self._event(_ChatChunkChoice(_Delta(role="assistant", content=""), None))

    def text(self, text: str) -> bytes:
        """Return one event with the text."""
        return self._event(_ChatChunkChoice(_Delta(content=text), None))

    def end(self, reason: AnswerReason, counts: Counts) -> bytes:
        """Return the reason, the usage and `[DONE]`."""
        return self._last(_ChatChunkChoice(_Delta(), reason), counts)


class TextStreamRenderer(_SseRenderer):
    """A completion as `text_completion` events."""

    _kind = "text_completion"

    def begin(self) -> bytes:
        """Return b"", because the first event has the first text."""
        return b""

    def text(self, text: str) -> bytes:
        """Return one event with the text."""
        return self._event(_TextChoice(text, None))

    def end(self, reason: AnswerReason, counts: Counts) -> bytes:
        """Return the reason, the usage and `[DONE]`."""
        return self._last(_TextChoice("", reason), counts)


class _JsonRenderer:
    """One JSON object at the end."""

    _kind: str

    def __init__(self, metadata: ResponseMetadata) -> None:
        self._metadata = metadata
        self._texts: list[str] = []

    def begin(self) -> bytes:
        return b""

    def text(self, text: str) -> bytes:
        self._texts.append(text)
        return b""

    def _object(self, choice: _Choice, counts: Counts) -> bytes:
        return _encode(self._metadata, self._kind, (choice,), _usage(counts))


class ChatJsonRenderer(_JsonRenderer):
    """A chat as one `chat.completion` object."""

    _kind = "chat.completion"

    def end(self, reason: AnswerReason, counts: Counts) -> bytes:
        return self._object(_ChatChoice(_Message("assistant", "".join(self._texts)), reason), counts)


class TextJsonRenderer(_JsonRenderer):
    """A completion as one `text_completion` object."""

    _kind = "text_completion"

    def end(self, reason: AnswerReason, counts: Counts) -> bytes:
        return self._object(_TextChoice("".join(self._texts), reason), counts)


Renderer = ChatStreamRenderer | TextStreamRenderer | ChatJsonRenderer | TextJsonRenderer


def choose_renderer(metadata: ResponseMetadata, *, chat: bool, stream: bool, include_usage: bool) -> Renderer:
    """Return a renderer for the requested form."""
    if stream:
        return ChatStreamRenderer(metadata, include_usage) if chat else TextStreamRenderer(metadata, include_usage)
    return ChatJsonRenderer(metadata) if chat else TextJsonRenderer(metadata)
