"""Requests with the same idempotency key: what tests send, count and compare, and two activators that share a Redis."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from activator.answers.idempotency_secret import ensure_idempotency_secret
from kelvin.contracts.accounting.usage import RequestRecord
from tests.activator.redis_server import RedisServer
from tests.activator.world import STREAM, ActivatorWorld, ReceivedResponse, http, world

ASK = {"idempotency-key": "order-7"}
KEYED = http(json.dumps(STREAM).encode(), extra="Idempotency-Key: order-7\r\n")  # sent on a connection of its own


def sent(records: list[RequestRecord]) -> list[tuple[str, int, int, bool]]:
    """Return (outcome, status, completion tokens, whether it has a charge id) of each record."""
    return [(each.outcome, each.status, each.completion_tokens, bool(each.once)) for each in records]


def same(one: ReceivedResponse, other: ReceivedResponse) -> bool:
    """Return whether two responses have the same status, body, and headers about the answer."""
    names = {"content-type", "content-length", "server-timing", "x-kelvin-version", "cache-control"}
    heads = [{name: value for name, value in got.headers.items() if name in names} for got in (one, other)]
    return (one.status, one.body, heads[0]) == (other.status, other.body, heads[1])


async def wait_for_joined(here: ActivatorWorld, count: int) -> None:
    """Wait until `count` requests have joined a running request."""
    await here.wait_for_metric("kelvin_repeats_total", count, answer="joined")


@asynccontextmanager
async def pair(tmp_path: Path, redis: RedisServer) -> AsyncIterator[tuple[ActivatorWorld, ActivatorWorld]]:
    """Two activators of one installation that share a Redis. Each has its own control plane."""
    secret = ensure_idempotency_secret(tmp_path / "once.key")
    for name in ("a", "b"):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "data" / "once.key").write_text(secret.hex())
    async with world(tmp_path / "a", redis=redis.url) as one, world(tmp_path / "b", redis=redis.url) as two:
        yield one, two
