"""A version's filters on prompts and answers, over the replica's socket."""

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.filter_api import (
    DEADLINE_HEADER,
    POLICY_FILE,
    TENANT_HEADER,
    FilterPolicy,
    FilterRequest,
    FilterResponse,
    Pii,
    TextResult,
)
from kelvin.contracts.artifacts.manifest import Kind
from kelvin.contracts.errors import Failure, InvalidRequest, Refused, Unavailable
from kelvin.contracts.problem import from_wire, to_wire
from kelvin.contracts.serving.stream_frames import FrameDecoder, StreamEnd
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.contracts.wire import decode
from kelvin.filters.pii import scan_text, unknown_region
from kelvin.ipc.service_client import ServiceClient
from runtime.surface.filter_pipeline import (
    MAX_CONCURRENT_CHECKS,
    FilterClient,
    FilterPipeline,
    build_filter_pipeline,
    check_filters,
)
from runtime.surface.openai_requests import TextPrompt
from tests.runtime.fakes import CODEC, data_of, events_of, failure_of, script_of, serve_replica
from tests.runtime.scripted_engine import ScriptedEngine

T = TypeVar("T")


@dataclass
class Looking(FilterClient):
    """Filters in this process. The first `away` checks fail."""

    away: int = 0
    asked: list[FilterRequest] = field(default_factory=list)
    guests: list[str] = field(default_factory=list)  # the guest of each check
    unseen: int = 0

    def count_unfiltered(self, texts: int) -> None:
        self.unseen += texts

    async def check(self, question: FilterRequest, timeout_s: float, guest: str = "") -> FilterResponse:
        self.asked.append(question)
        self.guests.append(guest)
        if len(self.asked) <= self.away:
            raise Refused(Unavailable("the filters"))
        return self.check_from_thread(question, timeout_s)

    def check_from_thread(self, question: FilterRequest, timeout_s: float) -> FilterResponse:
        return FilterResponse(looked=tuple(scan_text(text, question.rules, question.whole) for text in question.texts))


@dataclass
class Skipping(Looking):
    """Filters whose first `skip` checks succeed before `away` checks fail."""

    skip: int = 0

    async def check(self, question: FilterRequest, timeout_s: float, guest: str = "") -> FilterResponse:
        if self.skip:
            self.skip -= 1
            return self.check_from_thread(question, timeout_s)
        return await super().check(question, timeout_s, guest)


class Hanging(Looking):
    """Filters that do not answer until told, or until the timeout."""

    def __init__(self) -> None:
        super().__init__()
        self.told = asyncio.Event()

    async def check(self, question: FilterRequest, timeout_s: float, guest: str = "") -> FilterResponse:
        self.asked.append(question)
        async with asyncio.timeout(timeout_s):
            await self.told.wait()
        raise Refused(Unavailable("the filters"))


AWAY = Unavailable("the filters")
FULL = from_wire(to_wire(Overloaded("the filters' queue", 256, 1.0)))  # as the filter process reports it
SECRET = "I am jo@example.org, card 4111 1111 1111 1111, thanks"
TEXT = "one two " + "and so on, " * 5 + "twenty"
REDACTED = "I am <EMAIL_ADDRESS>, card <CREDIT_CARD>, thanks"
BOTH = Pii(input={"EMAIL_ADDRESS": "redact"}, output={"EMAIL_ADDRESS": "redact", "CREDIT_CARD": "redact"})
STOPS = Pii(input={"CREDIT_CARD": "stop"}, output={"CREDIT_CARD": "stop"})


def _screen(pii: Pii = BOTH, filters: Looking | None = None, **more: Any) -> FilterPipeline:
    return FilterPipeline(FilterPolicy(format=1, filters=(pii,), **more), filters or Looking())


def _steps(text: str) -> int:
    """Return the steps that generate this text, or a little more."""
    return len(CODEC.encode(text)) + 2


async def _some(answer: Any) -> bytes:
    chunk: bytes = await answer.content.readany()
    assert chunk, "the answer ended"
    return chunk


def _text(frames: Any) -> str:
    return "".join(event["choices"][0]["text"] for event in events_of(frames) if event["choices"])


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_an_answer_is_redacted(tmp_path: Path, stream: bool) -> None:
    """Streamed or whole, the same redacted text is sent, and computed tokens are counted."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(SECRET)), filter_pipeline=_screen()) as each:
        frames = await each.frames(body={"max_tokens": 100, "stream": stream})
        text = _text(frames) if stream else json.loads(data_of(frames))["choices"][0]["text"]
        assert text == REDACTED
        assert frames[-1].counts.completion_tokens == len(script_of(SECRET)(each.engine.admitted[0]))
        assert decode(frames[-1].payload, StreamEnd).finish_reason == "stop"


async def test_without_a_policy_nothing_is_touched(tmp_path: Path) -> None:
    """Negative control: without a policy nothing is redacted."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(SECRET))) as each:
        assert _text(await each.frames(body={"max_tokens": 100, "stream": True})) == SECRET


async def test_text_is_not_held_back_for_long(tmp_path: Path) -> None:
    """A word is sent with the next one, while the engine still generates."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), paced=True), filter_pipeline=_screen()) as each:
        async with each.open(body={"max_tokens": 200, "stream": True}) as answer:
            said, decoder = "", FrameDecoder()
            each.engine.allow(_steps("one two and so "))
            while not said.startswith("one two "):
                said += _text(decoder.feed(await _some(answer)))
            assert "twenty" not in said
            each.engine.run_freely()
            said += _text(decoder.feed(await answer.read()))
        assert said == TEXT


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_an_answer_is_stopped(tmp_path: Path, stream: bool) -> None:
    """The answer ends before the finding with `content_filter`, and the engine's request is cancelled."""
    async with serve_replica(
        tmp_path, ScriptedEngine(script_of(SECRET + " and more" * 20)), filter_pipeline=_screen(STOPS)
    ) as each:
        frames = await each.frames(body={"max_tokens": 200, "stream": stream})
        choices = [event["choices"][0] for event in events_of(frames)] or json.loads(data_of(frames))["choices"]
        assert "".join(choice["text"] for choice in choices) == "I am jo@example.org, card "
        assert choices[-1]["finish_reason"] == "content_filter"
        assert decode(frames[-1].payload, StreamEnd).finish_reason == "content_filter"
        await each.wait_until_idle()


async def test_overlong_text_is_refused_before_filters(tmp_path: Path) -> None:
    """No token is longer than the longest one, so such a text can't fit, and is not filtered or encoded."""
    filters = Looking()
    async with serve_replica(
        tmp_path, ScriptedEngine(script_of("ok")), filter_pipeline=_screen(filters=filters)
    ) as each:
        chat = {"messages": [{"role": "user", "content": "z" * 90_000}]}
        for path, body in (("/v1/completions", {"prompt": "z" * 90_000}), ("/v1/chat/completions", chat)):
            async with each.open(path, body) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["code"]) == (400, "context_length_exceeded")
                assert "characters; this model allows at most" in error["message"]
        assert filters.asked == []
        assert each.engine.admitted == []


async def test_a_prompt_is_redacted_before_it_is_tokens(tmp_path: Path) -> None:
    """A text is redacted, and in a chat each message and speaker name."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of("ok")), filter_pipeline=_screen()) as each:
        await each.frames(body={"prompt": "ask jo@example.org", "max_tokens": 1})
        said = {"role": "user", "name": "jo@example.org", "content": [{"type": "text", "text": "jo@example.org?"}]}
        await each.frames("/v1/chat/completions", {"messages": [said], "max_tokens": 1})
        text, chat = each.engine.admitted
        assert text.prompt_ids == CODEC.encode("ask <EMAIL_ADDRESS>")
        plain = {"role": "user", "name": "<EMAIL_ADDRESS>", "content": "<EMAIL_ADDRESS>?"}
        assert chat.prompt_ids == CODEC.encode_chat([plain])


@pytest.mark.parametrize(
    ("prompt", "code", "said"),
    [
        pytest.param(SECRET, "content_filter", "(CREDIT_CARD)", id="a card number"),
        pytest.param([5, 6], "invalid_request", "must be text", id="token ids, which filters can't read"),
    ],
)
async def test_a_prompt_is_refused_before_compute(tmp_path: Path, prompt: Any, code: str, said: str) -> None:
    """The refusal is 400, and does not repeat the finding."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of("ok")), filter_pipeline=_screen(STOPS)) as each:
        async with each.open(body={"prompt": prompt}) as answer:
            error = json.loads(await answer.read())["error"]
            assert (answer.status, error["code"], error["param"]) == (400, code, "prompt")
            assert said in error["message"]
            assert "4111" not in error["message"]
        assert each.engine.admitted == []


async def test_silent_filter_refuses_the_request(tmp_path: Path) -> None:
    """Without the filters a prompt, and an answer before its first byte, get a retryable 503."""
    looking = Skipping(away=1)
    async with serve_replica(
        tmp_path, ScriptedEngine(script_of(SECRET)), filter_pipeline=_screen(filters=looking)
    ) as each:
        for _ in range(2):  # first the prompt can't be checked, then the answer
            async with each.open(body={"prompt": "x", "max_tokens": 100, "stream": True}) as answer:
                assert answer.status == 503
                assert json.loads(await answer.read())["error"]["code"] == "filter_failed"
            looking.asked.clear()
            looking.away, looking.skip = 1, 1


async def test_filter_failure_cuts_a_begun_answer(tmp_path: Path) -> None:
    """A later failure cuts the answer with FAILED and the counts. All sent text had been checked."""
    looking = Looking()
    async with serve_replica(
        tmp_path, ScriptedEngine(script_of(SECRET), paced=True), filter_pipeline=_screen(filters=looking)
    ) as each:
        async with each.open(body={"prompt": "x", "max_tokens": 100, "stream": True}) as answer:
            said, decoder = "", FrameDecoder()
            each.engine.allow(_steps(SECRET[:24]))
            while REDACTED[:21] not in said:
                said += _text(decoder.feed(await _some(answer)))
            looking.asked.clear()
            looking.away = 1
            each.engine.run_freely()
            frames = decoder.feed(await answer.read())
        assert failure_of(frames[-1]).code == "filter_failed"
        assert REDACTED.startswith(said + _text(frames))
        assert frames[-1].counts.completion_tokens > 0
        await each.wait_until_idle()


async def test_policy_may_pass_unfiltered_text(tmp_path: Path) -> None:
    """With `on_failure="allow"` unchecked text passes and is counted."""
    looking = Looking(away=10_000)
    async with serve_replica(
        tmp_path, ScriptedEngine(script_of(SECRET)), filter_pipeline=_screen(filters=looking, on_failure="allow")
    ) as each:
        assert _text(await each.frames(body={"prompt": "x", "max_tokens": 100, "stream": True})) == SECRET
    assert looking.unseen == len(looking.asked) > 0


@pytest.mark.parametrize(
    ("filters", "want"),
    [
        pytest.param(Looking, False, id="all was looked at"),
        pytest.param(partial(Looking, away=1), True, id="the prompt passed unseen"),
        pytest.param(partial(Skipping, away=1, skip=1), True, id="the beginning of the answer passed unseen"),
    ],
)
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_end_says_whether_something_passed_unseen(
    tmp_path: Path, filters: Callable[[], Looking], want: bool, stream: bool
) -> None:
    """The last frame reports unchecked text, so that the activator does not cache the answer."""
    async with serve_replica(
        tmp_path, ScriptedEngine(script_of(SECRET)), filter_pipeline=_screen(filters=filters(), on_failure="allow")
    ) as each:
        frames = await each.frames(body={"prompt": "x", "max_tokens": 100, "stream": stream})
        assert decode(frames[-1].payload, StreamEnd).unfiltered is want


def test_a_version_with_filters_is_not_served_without() -> None:
    """An installation without filters refuses the version, whatever its policy for failures."""
    raw = b'{"format": 1, "on_failure": "allow", "filters": [{"filter": "pii", "output": {"US_SSN": "stop"}}]}'
    with pytest.raises(Refused, match=r"kelvin-filters\.json: .*KELVIN_FILTERS=off"):
        build_filter_pipeline({POLICY_FILE: raw}, None)
    assert build_filter_pipeline({POLICY_FILE: raw}, Looking()) is not None
    assert build_filter_pipeline({}, None) is None


def test_filters_that_are_full_are_not_the_artifacts_fault() -> None:
    """Full filters are a retryable failure, not a fault of the file."""

    class Full(Looking):
        def check_from_thread(self, question: FilterRequest, timeout_s: float) -> FilterResponse:
            raise Refused(FULL)

    raw = b'{"format": 1, "filters": [{"filter": "pii", "output": {"US_SSN": "stop"}}]}'
    with pytest.raises(Refused, match=r"^overloaded: the filters' queue is full"):
        check_filters({POLICY_FILE: raw}, "generate", Full())


class Away(ServiceClient):
    """A filter service that fails, and records the headers of each call."""

    def __init__(self, failure: Failure = AWAY) -> None:
        self._failure = failure
        self.sent_headers: list[Mapping[str, str]] = []

    async def call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        body: object | None = None,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        self.sent_headers.append(headers or {})
        raise Refused(self._failure)


@pytest.mark.virtual_time
@pytest.mark.parametrize("failure", [pytest.param(AWAY, id="away"), pytest.param(FULL, id="full")])
async def test_filter_request_carries_its_remaining_time(failure: Failure) -> None:
    """Each retry sends the remaining time, so that late work is skipped."""
    away, question = Away(failure), FilterRequest(direction="output", rules=(), texts=("x",), whole=True)

    with pytest.raises(Refused, match=failure.code):
        await FilterClient(away, asyncio.get_running_loop()).check(question, 0.05)
    assert [int(each[DEADLINE_HEADER]) for each in away.sent_headers] == pytest.approx([50, 30, 10], abs=1)


@pytest.mark.virtual_time
async def test_guests_texts_are_filtered_in_turns_of_the_guest() -> None:
    """A guest's texts count as the guest's, so that they don't delay the owner's."""
    away, question = Away(), FilterRequest(direction="output", rules=(), texts=("x",), whole=True)

    filters = FilterClient(away, asyncio.get_running_loop())
    filters.tenant = "acme"
    for guest in ("", "other"):
        with pytest.raises(Refused, match="unavailable"):
            await filters.check(question, 0.01, guest)
    assert [each[TENANT_HEADER] for each in away.sent_headers] == ["acme", "other"]


@pytest.mark.virtual_time
async def test_guests_that_ask_no_more_are_forgotten() -> None:
    """A public model has any number of guests over months."""
    question = FilterRequest(direction="output", rules=(), texts=("x",), whole=True)
    filters = FilterClient(Away(), asyncio.get_running_loop())
    for number in range(10):
        with pytest.raises(Refused, match="unavailable"):
            await filters.check(question, 0.01, f"guest-{number}")
    gc.collect()
    assert repr(filters) == "<FilterClient tenants=0>"


class Slow(Away):
    """A filter service that answers only when allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()

    async def call(self, *_: Any, headers: Mapping[str, str] | None = None, **__: Any) -> Any:
        self.sent_headers.append(headers or {})
        await self.may_answer.wait()
        return FilterResponse(looked=())


@pytest.mark.virtual_time
async def test_questions_of_one_tenant_wait_at_the_replica() -> None:
    """At most MAX_CONCURRENT_CHECKS of one tenant are at the filters, which all tenants share.
    Further checks wait at the replica until their deadline, and do not delay another tenant."""
    slow, question = Slow(), FilterRequest(direction="output", rules=(), texts=("x",), whole=True)
    filters = FilterClient(slow, asyncio.get_running_loop())
    filters.tenant = "acme"
    asking = [asyncio.create_task(filters.check(question, 60.0, "guest")) for _ in range(64)]
    late = asyncio.create_task(filters.check(question, 0.5, "guest"))
    await asyncio.sleep(0.4)
    own = asyncio.create_task(filters.check(question, 0.5))
    with pytest.raises(Refused, match=r"0\.5 s"):
        await late
    assert Counter(each[TENANT_HEADER] for each in slow.sent_headers) == {"guest": MAX_CONCURRENT_CHECKS, "acme": 1}
    asking.pop(0).cancel()  # its place goes to the next one
    await asyncio.sleep(0.1)
    assert len(slow.sent_headers) == 1 + MAX_CONCURRENT_CHECKS + 1
    slow.may_answer.set()
    assert await own == FilterResponse(looked=())
    assert await asyncio.gather(*asking) == [FilterResponse(looked=())] * 63


async def test_prompt_and_answer_are_filtered_for_their_caller(tmp_path: Path) -> None:
    """A guest's prompt and answer are checked as the guest's."""
    looking = Looking()
    filter_pipeline = _screen(Pii(input={"US_SSN": "stop"}, output={"US_SSN": "stop"}), looking)
    async with serve_replica(tmp_path, ScriptedEngine(script_of("x y")), filter_pipeline=filter_pipeline) as each:
        await each.frames(body={"prompt": "x"})
        assert set(looking.guests) == {""}
        looking.guests.clear()
        await each.frames(body={"prompt": "x"}, guest="other")
        assert len(looking.guests) >= 2
        assert set(looking.guests) == {"other"}


async def test_disconnect_during_filtering_cancels_the_engine(tmp_path: Path) -> None:
    """The engine's request is cancelled at once, not after the filter's answer."""
    hanging = Hanging()
    filter_pipeline = _screen(Pii(output={"US_SSN": "stop"}), hanging, deadline_ms=5000)
    async with serve_replica(tmp_path, ScriptedEngine(script_of("x " * 2000)), filter_pipeline=filter_pipeline) as each:
        asking = asyncio.create_task(each.frames(body={"prompt": "x", "max_tokens": 20_000, "stream": True}))
        await each.until("a question about the answer", lambda: len(hanging.asked) > 0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await each.until("the engine is told", lambda: len(each.engine.cancelled) == 1)
        hanging.told.set()
        await each.wait_until_idle()


def test_prompt_over_the_filter_limit_is_refused() -> None:
    looking = Looking()
    with pytest.raises(Refused, match="at most 262144"):
        asyncio.run(_screen(filters=looking).filter_prompt(TextPrompt("a" * 262_145), "prompt"))
    assert looking.asked == []


async def test_an_answer_that_leaves_too_much_undecided() -> None:
    """The text that a filter may hold back is bounded."""

    class Undecided(Looking):
        async def check(self, question: FilterRequest, timeout_s: float, guest: str = "") -> FilterResponse:
            return FilterResponse(looked=(TextResult(decided=0),))

    output = _screen(filters=Undecided()).build_output_filter()
    assert output is not None
    assert (await output.push("a" * 60_000, last=False)).text == ""
    with pytest.raises(Refused, match="filter_failed"):
        await output.push("a" * 60_000, last=False)


@pytest.mark.parametrize(
    ("pii", "kind", "said"),
    [
        pytest.param('"output": {"US_SSN": "stop"}', "embed", "for models that generate", id="another kind of model"),
        pytest.param(
            '"output": {"PHONE_NUMBER": "stop"}, "phone_regions": ["XX"]', "generate", "'XX'", id="an unknown region"
        ),
    ],
)
def test_filter_policy_is_tried_before_sealing(pii: str, kind: Kind, said: str) -> None:
    """Rules that only the filters know are checked, and a wrong one is the file's fault."""

    class Strict(Looking):
        def check_from_thread(self, question: FilterRequest, timeout_s: float) -> FilterResponse:
            for rule in question.rules:
                if (region := unknown_region(rule)) is not None:
                    raise Refused(InvalidRequest("phone_regions", repr(region), "must be a region"))
            return super().check_from_thread(question, timeout_s)

    raw = f'{{"format": 1, "filters": [{{"filter": "pii", {pii}}}]}}'
    with pytest.raises(Refused, match=said) as refused:
        check_filters({POLICY_FILE: raw.encode()}, kind, Strict())
    assert isinstance(refused.value.failure, ArtifactRejected)
    check_filters({POLICY_FILE: raw.replace("XX", "DE").encode()}, "generate", Strict())
    check_filters({}, kind, None)
