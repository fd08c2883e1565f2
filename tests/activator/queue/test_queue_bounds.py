"""What may wait: so much of one tenant, so many tokens; who waits for another tenant's model is not in the way."""

import asyncio
from pathlib import Path
from typing import TypedDict

import pytest

from tests.activator.control import KEY, STRANGER
from tests.activator.world import CHAT, ActivatorWorld, ReceivedResponse, world

THEIRS = CHAT | {"model": "theirs"}


class Bounds(TypedDict, total=False):
    """Settings of the queue."""

    queue_requests_per_tenant: int
    queue_tokens: int
    queue_tokens_per_tenant: int
    queue_tokens_in_all: int


async def _one_that_waits(here: ActivatorWorld, body: object = None) -> asyncio.Task[ReceivedResponse]:
    """Of the default tenant, and in its queue, as one that comes after it is told."""
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
    """One waits, and may take 1024 tokens; the next of its tenant is refused, or waits until its deadline; so is the
    next of another tenant.
    """

    async with world(tmp_path, **bounds) as here:
        waiting = await _one_that_waits(here)
        await _next(here, CHAT, KEY, mine)
        await _next(here, THEIRS, STRANGER, theirs)
        await here.replica("a")
        assert (await waiting).status == 200


async def test_a_small_answer_waits_where_a_large_one_has_no_room(tmp_path: Path) -> None:
    """`max_tokens` counts, as far as the version gives them."""

    async with world(tmp_path, queue_tokens=1500) as here:
        waiting = await _one_that_waits(here, CHAT | {"max_tokens": 10**9})
        await _next(here, CHAT | {"max_tokens": 1000}, KEY, "model is full (limit of tokens: 1500)")
        await _next(here, CHAT | {"max_tokens": 100}, KEY, None)
        await here.replica("a")
        assert (await waiting).status == 200


async def _next(here: ActivatorWorld, body: object, key: str, full: str | None) -> None:
    """Waits until its deadline, or is refused long before it, as `full` is."""
    got = await here.post(body=body, key=key, x_kelvin_deadline_ms="300" if full is None else "20000")
    if full is None:
        assert (got.status, got.code) == (504, "deadline_exceeded")
        return
    assert (got.status, got.code, got.headers["retry-after"]) == (503, "overloaded", "1")
    assert full.encode() in got.body
