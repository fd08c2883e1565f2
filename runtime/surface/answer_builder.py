"""Turn the events of one request into the bytes of its response: text, stop strings, OpenAI's format. Pure.

`delivery.py` sends the bytes.
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
    """The bytes that the client may have now, the cost so far, and how the response ended, if it did."""

    data: bytes
    counts: Counts
    reason: AnswerReason | None = None
    failure: Failure | None = None
    unfiltered: bool = False  # some of it was not checked by its filters


@dataclass(frozen=True, slots=True)
class DecodedText:
    """The text of some events, up to a stop string, and how the response ended, if it did."""

    text: str
    reason: FinishReason | None = None
    failure: Failure | None = None


class AnswerBuilder(Protocol):
    """The conversion of one request's events into its response: text, embeddings or predictions."""

    @property
    def counts(self) -> Counts:
        """Return the counts of the last event."""
        ...

    def add_events(self, events: Sequence[Event]) -> AnswerProgress | Awaitable[AnswerProgress]:
        """Add events in order and return the progress. Call no more after a progress with a reason or a failure."""
        ...


class TextAnswerBuilder:
    """The builder of a response in text: a completion or a chat."""

    def __init__(self, renderer: Renderer, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._renderer = renderer
        self._detokenizer = detokenizer
        self._stops = StopFinder(stops)
        self._has_begun = False
        self.counts = Counts()

    def add_events(self, events: Sequence[Event]) -> AnswerProgress:
        """Return the text of these events as one piece. A stop string ends the response when its last token arrives.
        Later tokens are neither shown nor counted.
        """
        decoded = self.decode_events(events)
        return self.render_progress(decoded, decoded.text, decoded.reason)

    def decode_events(self, events: Sequence[Event]) -> DecodedText:
        """Decode the events: the first half of `add_events`."""
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
                    raise AssertionError("not an event of a text response")
        return DecodedText(text, reason, failure)

    def render_progress(
        self, decoded: DecodedText, text: str = "", reason: AnswerReason | None = None
    ) -> AnswerProgress:
        """Render the second half of `add_events`: show `text`, and end with `reason`."""
        return AnswerProgress(self._render(text, reason), self.counts, reason, decoded.failure)

    def _render(self, text: str, reason: AnswerReason | None) -> bytes:
        data = b""
        if not self._has_begun and (text or reason):
            self._has_begun, data = True, self._renderer.begin()
        if text:
            data += self._renderer.text(text)
        return data if reason is None else data + self._renderer.end(reason, self.counts)
