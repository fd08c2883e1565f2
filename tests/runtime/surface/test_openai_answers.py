"""Answers are valid for the types of OpenAI's own client."""

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kelvin.contracts.serving.stream_frames import Counts
from runtime.surface.openai_answers import DONE_EVENT, Renderer, ResponseMetadata, choose_renderer

HEADING = ResponseMetadata("r1", "acme-chat", "ab" * 32, 1_700_000_000)
COUNTS = Counts(prompt_tokens=5, cached_tokens=2, completion_tokens=3)
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 3,
    "total_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 2},
}


def _drive(renderer: Renderer) -> list[bytes]:
    return [renderer.begin(), renderer.text("Hel"), renderer.text("lo\n"), renderer.end("length", COUNTS)]


def _events(pieces: list[bytes]) -> list[dict[str, Any]]:
    text = b"".join(pieces)
    assert text.endswith(DONE_EVENT)
    events = text.removesuffix(DONE_EVENT).decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_streamed_chat() -> None:
    """Role, texts and finish reason are separate chunks of the client's type."""
    events = _events(_drive(choose_renderer(HEADING, chat=True, stream=True, include_usage=False)))
    chunks = [ChatCompletionChunk.model_validate(event, strict=True) for event in events]
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "Hel", "lo\n", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "length"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.id for chunk in chunks} == {"chatcmpl-r1"}
    assert {chunk.system_fingerprint for chunk in chunks} == {"fp_abababababab"}
    assert all("usage" not in event for event in events)


@pytest.mark.parametrize("chat", [True, False])
def test_streamed_usage_is_a_piece_of_its_own(chat: bool) -> None:
    """With include_usage, chunks have null and the last one before `[DONE]` has the usage, without choices."""
    events = _events(_drive(choose_renderer(HEADING, chat=chat, stream=True, include_usage=True)))
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["usage"] == USAGE
    assert events[-1]["choices"] == []


def test_a_streamed_text() -> None:
    """Text events have the finish reason in the last one."""
    pieces = _drive(choose_renderer(HEADING, chat=False, stream=True, include_usage=False))
    assert pieces[0] == b""
    # OpenAI's service sends a null reason in earlier chunks, which the client's type does not allow.
    answers = [Completion.model_construct(**event) for event in _events(pieces)]
    assert [answer.choices[0].text for answer in answers] == ["Hel", "lo\n", ""]
    assert [answer.choices[0].finish_reason for answer in answers] == [None, None, "length"]
    assert Completion.model_validate(_events(pieces)[-1]).id == "cmpl-r1"


def test_a_whole_chat() -> None:
    *nothing, last = _drive(choose_renderer(HEADING, chat=True, stream=False, include_usage=False))
    assert nothing == [b"", b"", b""]
    answer = ChatCompletion.model_validate(json.loads(last), strict=True)
    assert answer.choices[0].message.content == "Hello\n"
    assert answer.choices[0].finish_reason == "length"
    assert json.loads(last)["usage"] == USAGE


def test_a_whole_text() -> None:
    *nothing, last = _drive(choose_renderer(HEADING, chat=False, stream=False, include_usage=False))
    assert nothing == [b"", b"", b""]
    answer = Completion.model_validate(json.loads(last), strict=True)
    assert answer.choices[0].text == "Hello\n"
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 8
