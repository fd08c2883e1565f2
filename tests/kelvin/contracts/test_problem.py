"""A failure is rendered the same in whichever process it occurred."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kelvin.contracts import artifact_errors, errors, traffic_errors
from kelvin.contracts.artifact_errors import ArtifactRejected, ChunkCorrupt
from kelvin.contracts.errors import CapacityExceeded, Conflict, Failure, LimitExceeded, Refused, Unauthenticated
from kelvin.contracts.problem import (
    from_problem,
    from_wire,
    headers_of,
    open_inference_error,
    openai_error,
    problem_details,
    sse_error,
    to_wire,
)
from kelvin.contracts.traffic_errors import BreakerOpen, BudgetSpent, DeadlineTooShort, Overloaded

FAILURES = [
    pytest.param(Unauthenticated(), "authentication_error", id="a bad key is an authentication error"),
    pytest.param(LimitExceeded("max_tokens", 9, 8, "tokens"), "invalid_request_error", id="a limit is a bad request"),
    pytest.param(Overloaded("the queue", 8, 1.5), "server_error", id="a full queue is the server's"),
]


@pytest.mark.parametrize(("failure", "kind"), FAILURES)
def test_openai_error_has_message_type_param_and_code(failure: Failure, kind: str) -> None:
    """The OpenAI error has the fields that OpenAI's clients read."""
    error = msgspec.json.decode(openai_error(failure))["error"]
    assert error["type"] == kind
    assert (error["message"], error["param"], error["code"]) == (failure.message, failure.param, failure.code)


@pytest.mark.parametrize(("failure", "_kind"), FAILURES)
def test_a_failure_that_crossed_processes_renders_the_same(failure: Failure, _kind: str) -> None:
    """A client can't tell a failure of another process from a local one."""
    remote = from_wire(to_wire(failure))
    assert openai_error(remote) == openai_error(failure)
    assert problem_details(remote) == problem_details(failure)
    assert headers_of(remote) == headers_of(failure)
    assert str(Refused(remote)) == str(Refused(failure))
    assert remote.retryable == failure.retryable


@pytest.mark.parametrize(("failure", "_kind"), FAILURES)
def test_problem_is_read_as_it_was_written(failure: Failure, _kind: str) -> None:
    """Another process or the CLI reads the same failure that was written."""
    assert from_problem(problem_details(failure)) == from_wire(to_wire(failure))


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"code": "\xff"}', openai_error(Unauthenticated())])
def test_other_body_is_not_read_as_a_problem(body: bytes) -> None:
    """HTML of a proxy, or JSON in another form, is not read as a problem."""
    assert from_problem(body) is None


ALL = [
    kind
    for module in (errors, artifact_errors, traffic_errors)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Failure)
]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_failure_renders(kind: type[Failure]) -> None:
    """Message templates and retry rules use only existing fields. Values are shown unchanged, with their braces."""

    @given(st.builds(kind))
    def rendered(failure: Failure) -> None:
        assert isinstance(failure.message, str)
        assert isinstance(failure.param, str | None)
        assert isinstance(failure.retry_after_s, int | float | None)

    rendered()
    assert errors.Conflict("{what}", "{}").message == "{what}: {}"


def test_retry_after_is_whole_seconds_rounded_up() -> None:
    """RFC 9110 allows no fractions in `Retry-After`."""
    assert headers_of(Overloaded("the queue", 8, 1.2)) == {"retry-after": "2"}
    assert headers_of(Unauthenticated()) == {}


@pytest.mark.parametrize(
    ("failure", "should_retry"),
    [
        pytest.param(CapacityExceeded("the cache", 9, 8), "false", id="a request that never fits"),
        pytest.param(ChunkCorrupt("c7", "store"), "false", id="damaged bytes"),
        pytest.param(BudgetSpent(1), "false", id="a spent budget"),
        pytest.param(Conflict("m", "is in use"), "false", id="a conflict"),
        pytest.param(
            BreakerOpen("capacity_exceeded", 1.0, cause_retryable=False), "false", id="a breaker, cause lasts"
        ),
        pytest.param(BreakerOpen("replica_lost", 1.0), None, id="a breaker, cause passes"),
        pytest.param(Overloaded("the queue", 8, 1.2), None, id="a full queue"),
        pytest.param(Unauthenticated(), None, id="a status that no client retries"),
    ],
)
def test_client_is_told_not_to_retry_in_vain(failure: Failure, should_retry: str | None) -> None:
    """OpenAI's clients retry 409, 429 and 5xx by themselves, unless `x-should-retry` is `false`."""
    assert headers_of(failure).get("x-should-retry") == should_retry
    assert headers_of(from_wire(to_wire(failure))) == headers_of(failure)


def test_overloaded_names_the_limited_resource() -> None:
    """A machine has several limited resources, so its refusal names the one that ran out. A queue has one."""
    machine, queue = Overloaded("this machine", 1, 2.0, "device slots"), Overloaded("the queue of seals", 8, 2.0)
    assert machine.message == "this machine is full (limit of device slots: 1); retry after 2 s"
    assert queue.message == "the queue of seals is full (limit 8); retry after 2 s"


@pytest.mark.parametrize("why", ["chunk_missing: chunk 7 is in no tier", "chunk 7 is in no tier"])
def test_open_breaker_names_its_cause_once(why: str) -> None:
    """The code is shown once, whether or not the reason begins with it."""
    message = BreakerOpen("chunk_missing", 1.0, why).message
    assert message.startswith("this model failed (chunk_missing: chunk 7 is in no tier), has no other replica")


def test_too_long_wait_is_sent_in_milliseconds() -> None:
    """The expected wait is sent in milliseconds too, next to the whole seconds of `Retry-After`."""
    headers = headers_of(DeadlineTooShort(1.2345, 0.5, True))
    assert headers == {"retry-after": "2", "x-kelvin-expected-wait-ms": "1235"}


@pytest.mark.parametrize(
    ("need", "have", "message"),
    [
        pytest.param(1, 0, "bytes on the disk: none are left; free some, then try again", id="a full disk"),
        pytest.param(9, 8, "bytes on the disk: needs 9, has 8", id="too little room"),
    ],
)
def test_capacity_that_is_used_up_says_what_to_do(need: int, have: int, message: str) -> None:
    """For a full disk, the size of the write is left out."""
    assert CapacityExceeded("bytes on the disk", need, have).message == message


def test_an_sse_error_is_one_event() -> None:
    """A stream's failure is a single final event with the request id."""
    event = sse_error(Unauthenticated(), "req_1")
    assert event.startswith(b"event: error\ndata: {")
    assert event.endswith(b"}\n\n")
    assert b'"request_id":"req_1"' in event


def test_half_a_surrogate_pair_is_escaped() -> None:
    """JSON may contain half of a surrogate pair. Every form of the error shows it escaped."""
    failure = ArtifactRejected("\ud800.json", "architectures: '\ud800'")
    assert to_wire(failure).param == "\\ud800.json"
    for render in (problem_details, openai_error, open_inference_error):
        assert b"\\\\ud800" in render(failure)
