"""Cached answers, over TLS: only on request, for the same tenant, version and request, and for a short time."""

from pathlib import Path

import pytest

from activator.routing.policy.request_body import is_greedy
from kelvin.contracts.traffic_errors import Overloaded
from tests.activator.answers.idempotent_calls import ASK, same, sent
from tests.activator.control import STRANGER
from tests.activator.replica import hello, refuses, unfiltered
from tests.activator.world import CHAT, world

GREEDY = CHAT | {"temperature": 0}
ALLOW = {"x-kelvin-cache": "allow"}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_question_is_answered_out_of_the_cache(tmp_path: Path, stream: bool) -> None:
    """A cached answer has the same bytes, is marked as a hit and costs nothing. A different request runs."""
    body = GREEDY | {"stream": stream}

    async with world(tmp_path) as here:
        replica = await here.replica("a")
        first, again = [await here.post(body=body, **ALLOW) for _ in range(2)]
        assert same(first, again)
        assert [got.headers["x-kelvin-cache"] for got in (first, again)] == ["miss", "hit"]
        assert again.headers["x-kelvin-repeat-of"] == first.headers["x-request-id"]
        assert again.headers["x-request-id"] != first.headers["x-request-id"]
        assert sent(await here.control.wait_for_records(2)) == [("ok", 200, 2, False), ("cached", 200, 0, False)]
        assert len(replica.calls) == 1
        assert (await here.post(body=body | {"seed": 1}, **ALLOW)).headers["x-kelvin-cache"] == "miss"
        assert (await here.post(body=body, key=STRANGER, **ALLOW)).status == 404
        unasked = await here.post(body=body)
        assert "x-kelvin-cache" not in unasked.headers
        assert len(replica.calls) == 3
        assert await here.metric_value("kelvin_cache_requests_total", result="hit") == 1


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(CHAT, id="no temperature"),
        pytest.param(CHAT | {"temperature": 0.1}, id="a temperature above 0"),
        pytest.param(CHAT | {"temperature": None}, id="temperature null"),
    ],
)
async def test_nondeterministic_requests_are_not_cached(tmp_path: Path, body: dict[str, object]) -> None:
    """Each request runs, and the response has no cache header."""

    async with world(tmp_path) as here:
        replica = await here.replica("a")
        for _ in range(2):
            assert "x-kelvin-cache" not in (await here.post(body=body, **ALLOW)).headers
        assert len(replica.calls) == 2
        assert await here.metric_value("kelvin_cache_requests_total", result="bypass") == 2


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_answer_that_passed_unfiltered_is_not_cached(tmp_path: Path, stream: bool) -> None:
    """An unfiltered answer is not cached. The next request runs, and its filtered answer is cached."""
    body = GREEDY | {"stream": stream}

    async with world(tmp_path) as here:
        replica = await here.replica("a", unfiltered)
        assert (await here.post(body=body, **ALLOW)).headers["x-kelvin-cache"] == "miss"
        replica.script = hello
        said = [(await here.post(body=body, **ALLOW)).headers["x-kelvin-cache"] for _ in range(2)]
        assert said == ["miss", "hit"]
        assert len(replica.calls) == 2


async def test_cache_header_accepts_only_allow(tmp_path: Path) -> None:
    """Any other value is 400. A keyed request may be answered from the cache."""

    async with world(tmp_path) as here:
        replica = await here.replica("a")
        refused = await here.post(body=GREEDY, **{"x-kelvin-cache": "yes"})
        assert (refused.status, refused.code) == (400, "invalid_request")
        assert b"must be allow" in refused.body
        first = await here.post(body=GREEDY, **ALLOW)
        keyed = await here.post(body=GREEDY, **ALLOW, **ASK)
        assert same(first, keyed)
        assert keyed.headers["x-kelvin-cache"] == "hit"
        assert len(replica.calls) == 1


async def test_failures_are_not_cached(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        replica = await here.replica("a", refuses(Overloaded("the queue", 1, 1.0)))
        assert (await here.post(body=GREEDY, **ALLOW)).status == 503
        replica.script = hello
        assert [(await here.post(body=GREEDY, **ALLOW)).headers["x-kelvin-cache"] for _ in range(2)] == [
            "miss",
            "hit",
        ]


@pytest.mark.parametrize(
    ("raw", "path", "want"),
    [
        pytest.param(b'{"temperature": 0}', "/v1/completions", True, id="0"),
        pytest.param(b'{"temperature": -0.0}', "/v1/completions", True, id="0 with a sign"),
        pytest.param(b'{"temperature": "0"}', "/v1/completions", False, id="a string, which the replica refuses"),
        pytest.param(b'{"temperature": 0}', "/v1/embeddings", False, id="an embedding has no temperature"),
        pytest.param(b"{", "/v1/completions", False, id="no JSON"),
    ],
)
def test_temperature_zero_is_greedy(raw: bytes, path: str, want: bool) -> None:
    """Only an explicit temperature of 0 makes a completion greedy."""
    assert is_greedy(raw, path) is want
