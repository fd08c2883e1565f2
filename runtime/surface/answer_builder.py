"""From the events of one request to the bytes of its answer: text, stop strings, OpenAI's form. Pure.

How bytes travel is `delivery.py`'s.
"""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kelvin.contracts.errors import Failure
from kelvin.contracts.serving.stream_frames import Counts
from runtime.drivers.interface import Cancelled, Embedded, Event, Failed, Finished, FinishReason, Generated, Predicted
from runtime.surface.openai_answers import AnswerReason, Renderer
from runtime.text.detokenizer import Detokenizer, StopFinder


@dataclass(frozen=True, slots=True)
class AnswerProgress:
    """What the client may have now, at which cost, and how it ended, if it did."""

    data: bytes
    counts: Counts
    reason: AnswerReason | None = None
    failure: Failure | None = None
    unfiltered: bool = False  # some of it passed its filters unseen


@dataclass(frozen=True, slots=True)
class DecodedText:
    """What events say: text that the client may have as far as stop strings go, and how it ended, if it did."""

    text: str
    reason: FinishReason | None = None
    failure: Failure | None = None


class AnswerBuilder(Protocol):
    """How an answer is made of a request's events."""

    @property
    def counts(self) -> Counts:
        """Of the last event."""
        ...

    def add_events(self, events: Sequence[Event]) -> AnswerProgress | Awaitable[AnswerProgress]:
        """Events in order; nothing may follow once a progress had a reason or a failure."""
        ...


class TextAnswerBuilder:
    """Fed with a request's events in order. Nothing may follow once a progress had a reason or a failure."""

    def __init__(self, renderer: Renderer, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._renderer = renderer
        self._detokenizer = detokenizer
        self._stops = StopFinder(stops)
        self._has_begun = False
        self.counts = Counts()

    def add_events(self, events: Sequence[Event]) -> AnswerProgress:
        """All text of these events is one piece. A stop string ends the answer as its completing token arrives: what
        the engine made after it is neither said nor counted."""
        decoded = self.read(events)
        return self.to_progress(decoded, decoded.text, decoded.reason)

    def read(self, events: Sequence[Event]) -> DecodedText:
        """The first half of `add_events`."""
        text = ""
        reason: FinishReason | None = None
        failure: Failure | None = None
        for event in events:
            self.counts = event.counts
            match event:
                case Generated():
                    text += self._stops.push(self._detokenizer.push(event.token_id))
                    if self._stops.found:
                        reason = "stop"
                        break
                case Finished():
                    text += self._stops.flush()
                    reason = event.reason
                case Failed():
                    failure = event.failure
                case Cancelled() | Embedded() | Predicted():
                    raise AssertionError("no event of an answer in text")
        return DecodedText(text, reason, failure)

    def to_progress(self, decoded: DecodedText, text: str = "", reason: AnswerReason | None = None) -> AnswerProgress:
        """The other half: `text` is shown of what was said, and `reason` as what ended it."""
        return AnswerProgress(self._render(text, reason), self.counts, reason, decoded.failure)

    def _render(self, text: str, reason: AnswerReason | None) -> bytes:
        data = b""
        if not self._has_begun and (text or reason):
            self._has_begun, data = True, self._renderer.begin()
        if text:
            data += self._renderer.text(text)
        return data if reason is None else data + self._renderer.end(reason, self.counts)
