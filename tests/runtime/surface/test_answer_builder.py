"""Events become text, and text an answer, however the events are grouped."""

import json
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kelvin.contracts.errors import Internal
from kelvin.contracts.serving.stream_frames import Counts
from runtime.drivers.interface import Event, Failed, Finished, Generated
from runtime.surface.answer_builder import TextAnswerBuilder
from runtime.surface.openai_answers import DONE_EVENT, ResponseMetadata, choose_renderer
from tests.runtime.fakes import CODEC

HEADING = ResponseMetadata("r", "m", "ab" * 32, 1)
TEXT = "one 中文 two 😀 three"
IDS = CODEC.encode(TEXT)[1:]


def _events(ids: Sequence[int]) -> list[Event]:
    counts = [Counts(3, 0, number + 1, 0) for number in range(len(ids))]
    events: list[Event] = [Generated("r", token, count) for token, count in zip(ids, counts, strict=True)]
    return [*events, Finished("r", "length", counts[-1])]


def _answer(stops: Sequence[str] = (), *, stream: bool = True) -> TextAnswerBuilder:
    renderer = choose_renderer(HEADING, chat=True, stream=stream, include_usage=False)
    return TextAnswerBuilder(renderer, CODEC.detokenizer((0,)), stops)


def _text(data: bytes) -> str:
    lines = [line[6:] for line in data.decode().split("\n\n") if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines)


@given(st.lists(st.integers(1, len(IDS)), max_size=6), st.sampled_from([(), ("two",), ("\n", "e 中"), ("zzz",)]))
def test_batches_do_not_change_the_text(cuts: list[int], stops: tuple[str, ...]) -> None:
    """The client reads the same text with one end, however events are grouped."""
    events = _events(IDS)
    bounds = sorted({0, len(events), *cuts})
    answer, data, ends = _answer(stops), b"", 0
    for begin, end in pairwise(bounds):
        progress = answer.add_events(events[begin:end])
        data += progress.data
        if progress.reason is not None:
            ends += 1
            break
    starts = [TEXT.find(stop) for stop in stops if stop in TEXT]
    assert _text(data) == TEXT[: min(starts, default=len(TEXT))]
    assert ends == 1
    assert data.endswith(DONE_EVENT)
    assert data.count(b'"role":"assistant"') == 1


def test_tokens_after_a_stop_string_are_not_counted() -> None:
    """The engine may be a step ahead, and the client does not pay for that."""
    events = _events(IDS)
    progress = _answer(["中"]).add_events(events)
    assert progress.reason == "stop"
    assert progress.counts.completion_tokens < len(IDS)
    upto = CODEC.detokenizer((0,))
    said = ""
    for token in IDS[: progress.counts.completion_tokens]:
        said += upto.push(token)
    assert said.endswith("中")


def test_failure_keeps_earlier_text_and_counts() -> None:
    events = [*_events(IDS)[:3], Failed("r", Internal(), Counts(3, 0, 3, 0))]
    progress = _answer().add_events(events)
    assert (progress.reason, progress.failure) == (None, Internal())
    assert progress.counts.completion_tokens == 3
    assert _text(progress.data)


def test_no_events_are_no_bytes() -> None:
    assert _answer().add_events([]).data == b""


def test_text_held_for_a_stop_string_comes_with_the_end() -> None:
    """Text held back as a possible stop string is sent at the end."""
    answer = _answer(["three!"])
    progress = answer.add_events(_events(IDS))
    assert _text(progress.data) == TEXT
