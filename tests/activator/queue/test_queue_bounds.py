"""Queue limits on requests and tokens, per version, per tenant and in total. Other tenants' models have own queues."""

import asyncio
from pathlib import Path
from typing import TypedDict

import pytest

from tests.activator.control import KEY, STRANGER
from tests.activator.world import CHAT, ActivatorWorld, ReceivedResponse, world

THEIRS = CHAT | {"model": "theirs"}


class Bounds(TypedDict, total=False):
    """Queue settings."""

    queue_requests_per_tenant: int
    queue_tokens: int
    queue_tokens_per_tenant: int
    queue_tokens_in_all: int


async def _start_waiting(here: ActivatorWorld, body: object = None) -> asyncio.Task[ReceivedResponse]:
    """Start a request of the default tenant. Return it once it waits."""
    task = asyncio.create_task(here.post(body=body))
    await here.control.wait_for_stat(1.0)
    return task


@pytest.mark.parametrize(
    ("bounds", "mine", "theirs"),
    [
        pytest.param(
            Bounds(queue_requests_per_tenant=1),
            "tenant is full (limit of requests: 1)",
            None,
            id="requests of a tenant",
        ),
        pytest.param(
            Bounds(queue_tokens_per_tenant=1500),
            "tenant is full (limit of tokens: 1500)",
            None,
            id="tokens of a tenant",
        ),
        pytest.param(
            Bounds(queue_tokens=1500), "model is full (limit of tokens: 1500)", None, id="tokens for a version"
        ),
        pytest.param(
            Bounds(queue_tokens_in_all=1500),
            "queue is full (limit of tokens: 1500)",
            "queue is full (limit of tokens: 1500)",
            id="tokens in all",
        ),
        pytest.param(Bounds(queue_requests_per_tenant=9), None, None, id="nothing is full"),
    ],
)
async def test_queue_limits_bound_requests_bytes_and_tokens(
    tmp_path: Path, bounds: Bounds, mine: str | None, theirs: str | None
) -> None:
    """One request waits and may use 1024 tokens. The next of its tenant, and the next of another tenant, is refused or
    waits until its deadline.
    """

    async with world(tmp_path, **bounds) as here:
        waiting = await _start_waiting(here)
        await _check_next(here, CHAT, KEY, mine)
        await _check_next(here, THEIRS, STRANGER, theirs)
        await here.replica("a")
        assert (await waiting).status == 200


async def test_a_small_answer_waits_where_a_large_one_has_no_room(tmp_path: Path) -> None:
    """A request counts with its `max_tokens`, up to the version's limit."""

    async with world(tmp_path, queue_tokens=1500) as here:
        waiting = await _start_waiting(here, CHAT | {"max_tokens": 10**9})
        await _check_next(here, CHAT | {"max_tokens": 1000}, KEY, "model is full (limit of tokens: 1500)")
        await _check_next(here, CHAT | {"max_tokens": 100}, KEY, None)
        await here.replica("a")
        assert (await waiting).status == 200


async def _check_next(here: ActivatorWorld, body: object, key: str, full: str | None) -> None:
    """Send a request. It must wait until its deadline, or be refused long before with the message `full`."""
    got = await here.post(body=body, key=key, x_kelvin_deadline_ms="300" if full is None else "20000")
    if full is None:
        assert (got.status, got.code) == (504, "deadline_exceeded")
        return
    assert (got.status, got.code, got.headers["retry-after"]) == (503, "overloaded", "1")
    assert full.encode() in got.body
