"""The push client retries what may succeed, within a time limit, and reads failures in all their forms."""

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx
import pytest

from kelvin.cli.artifacts.push_client import PushClient, RetryPolicy
from kelvin.cli.base.api_client import failure_of_response
from kelvin.contracts.artifacts.push_api import CommitStep, Committing, Missing
from kelvin.contracts.errors import Conflict, Failure, NotFound, Refused, Unauthenticated, Unavailable
from kelvin.contracts.problem import openai_error, problem_details
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.contracts.wire import encode

Answer = httpx.Response | Exception


class ScriptedDoor(httpx.Client):
    """A client with scripted responses. The last one repeats."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        super().__init__(transport=httpx.MockTransport(self._answer), base_url="https://door")
        self.answers, self.calls = answers, 0

    def _answer(self, request: httpx.Request) -> httpx.Response:
        assert request.extensions["timeout"]["read"] is not None
        answer = self.answers[min(self.calls, len(self.answers) - 1)]
        self.calls += 1
        if isinstance(answer, Exception):
            raise answer
        return answer


@dataclass
class Clock:
    """Virtual time that advances by sleeping."""

    now: float = 1000.0
    pauses: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def retry_policy(self, jitter: float = 1.0) -> RetryPolicy:
        return RetryPolicy(clock=lambda: self.now, sleep=self.sleep, jitter=lambda: jitter)


def problem(failure: Failure) -> httpx.Response:
    return httpx.Response(failure.status, content=problem_details(failure))


NOTHING = Missing(plan_id="0" * 32, digests=(), version="f" * 64, exists=True)
GOOD = httpx.Response(200, content=encode(NOTHING))
CUT = httpx.ReadError("cut")


def missing(calls: PushClient) -> Missing:
    return calls.missing("0" * 32, ())


@pytest.mark.parametrize(
    ("before", "calls"),
    [
        pytest.param([], 1, id="at once"),
        pytest.param([CUT, CUT], 3, id="after two cuts"),
        pytest.param([httpx.ConnectError("refused")], 2, id="after a refused connection"),
        pytest.param([httpx.ReadTimeout("slow")], 2, id="after a timeout"),
        pytest.param([problem(Unavailable("the control plane"))], 2, id="after a 503"),
        pytest.param([httpx.Response(502, content=b"<html>")], 2, id="after a 502 of a proxy"),
        pytest.param([httpx.Response(503, content=openai_error(Unavailable("x")))], 2, id="after a 503 of Kelvin"),
    ],
)
def test_passing_failure_is_retried(before: list[Answer], calls: int) -> None:
    """A temporary failure is retried until it passes."""
    client, clock = ScriptedDoor([*before, GOOD]), Clock()
    assert missing(PushClient(client, clock.retry_policy())) == NOTHING
    assert client.calls == calls
    assert len(clock.pauses) == calls - 1


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(NotFound("plan", "x"), id="an unknown plan"),
        pytest.param(Conflict("commit", "no"), id="a conflict"),
        pytest.param(Unauthenticated(), id="a wrong key"),
    ],
)
def test_lasting_failure_is_not_retried(failure: Failure) -> None:
    """A permanent failure is raised at once, with its code and status."""
    client = ScriptedDoor([problem(failure)])
    with pytest.raises(Refused) as caught:
        missing(PushClient(client, Clock().retry_policy()))
    assert client.calls == 1
    assert (caught.value.failure.code, caught.value.failure.status) == (failure.code, failure.status)
    assert caught.value.failure.message == failure.message


def test_redirect_is_no_success() -> None:
    """If a login proxy redirects the upload, the chunk wasn't stored."""
    client = ScriptedDoor([httpx.Response(302, headers={"location": "https://login"})])
    with pytest.raises(Refused, match=r"https://door/push/v1/plans/0+/chunks/f+ answered 302: is the URL Kelvin's\?"):
        PushClient(client, Clock().retry_policy()).put_chunk("0" * 32, "f" * 64, b"bytes")
    assert client.calls == 1


def test_retries_end_after_the_time_limit() -> None:
    """The limit is 10 s before the first response and 120 s after it. Pauses grow up to 5 s."""
    clock = Clock()
    client = ScriptedDoor([CUT])
    with pytest.raises(Refused, match="the installation is not available"):
        missing(PushClient(client, clock.retry_policy()))
    assert 5 < clock.now - 1000 <= 10
    client, clock = ScriptedDoor([GOOD, CUT]), Clock()
    calls = PushClient(client, clock.retry_policy())
    missing(calls)
    with pytest.raises(Refused):
        missing(calls)
    assert 100 < clock.now - 1000 <= 120
    assert clock.pauses == sorted(clock.pauses)
    assert max(clock.pauses) == 5.0


def test_overloaded_answer_counts_as_the_first_answer() -> None:
    """A reply that asks the client to wait counts as the first response, so the longer limit applies."""
    clock = Clock()
    with pytest.raises(Refused, match="turn"):
        missing(PushClient(ScriptedDoor([problem(Overloaded("a turn", 1, 5.0))]), clock.retry_policy()))
    assert 100 < clock.now - 1000 <= 120


def test_retry_after_is_respected() -> None:
    """The pause is the one that the response requests, without jitter."""
    clock = Clock()
    missing(PushClient(ScriptedDoor([problem(Overloaded("x", 1, 7.0)), GOOD]), clock.retry_policy(jitter=0.0)))
    assert clock.pauses == [7.0]


def test_untrusted_certificate_is_not_retried() -> None:
    """A retry can't make a certificate valid."""

    def untrusted() -> Exception:
        try:
            try:
                reason = ssl.SSLCertVerificationError()
                reason.verify_message = "self-signed certificate"
                raise reason
            except ssl.SSLError as cause:
                raise httpx.ConnectError("tls") from cause
        except httpx.ConnectError as error:
            return error

    client = ScriptedDoor([untrusted()])
    with pytest.raises(Refused, match="not trusted: self-signed certificate"):
        missing(PushClient(client, Clock().retry_policy()))
    assert client.calls == 1


def test_running_commit_is_polled() -> None:
    """A 202 response means that the commit is still running."""
    running = httpx.Response(202, content=encode(Committing(step=CommitStep.SEALING)))
    calls = PushClient(ScriptedDoor([running]), Clock().retry_policy())
    assert calls.commit("0" * 32, ()) == Committing(step=CommitStep.SEALING)


@pytest.mark.parametrize(
    ("content", "code", "after_s"),
    [
        pytest.param(problem_details, "overloaded", 3.0, id="a problem"),
        pytest.param(openai_error, "overloaded", 4.0, id="an error of the activator"),
        pytest.param(lambda failure: b"<html>", "unavailable", 4.0, id="a page of a proxy"),
        pytest.param(lambda failure: b'{"a": 1}', "unavailable", 4.0, id="other JSON"),
    ],
)
def test_failure_is_decoded_from_every_form(content: Callable[[Failure], bytes], code: str, after_s: float) -> None:
    """Code, retry flag and pause are read from each form."""
    answer = httpx.Response(503, content=content(Overloaded("x", 1, 3.0)), headers={"retry-after": "4"})
    found = failure_of_response(answer)
    assert found.message
    assert (found.remote_code, found.remote_status, found.remote_retryable) == (code, 503, True)
    assert found.retry_after_s == after_s


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b'{"title": "Too Many Requests", "status": 429, "detail": "slow down"}', id="problem details"),
        pytest.param(b'{"error": {"message": "slow down", "code": 429}}', id="an error with a number for its code"),
        pytest.param(b'{"error": {"message": "slow down"}}', id="an error without a code"),
    ],
)
def test_foreign_error_text_is_passed_on(content: bytes) -> None:
    """The text is passed on, and the request may be retried."""
    found = failure_of_response(httpx.Response(429, content=content))
    assert (found.message, found.remote_retryable) == ("slow down", True)
