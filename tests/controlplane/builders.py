"""Facts that several tests need, with the least said."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from contracts.control import ConcurrencyStat, Stats, VersionRegistration
from contracts.manifest import Limits
from controlplane.audit import Actor
from controlplane.facts import VersionKey
from controlplane.feed import FeedHub
from controlplane.keys import KeyStore
from controlplane.registry import Registry
from tests.controlplane.backends import database as opened_database

TENANT = "default"
NOW_S = 1_700_000_000
BY = Actor(key_id="k", tenant=TENANT, scopes=(), request_id="req_1")


def digest(letter: str) -> str:
    """A version's name: the letter 64 times."""
    return letter * 64


def registration(
    model: str = "m", letter: str = "a", *, tenant: str = TENANT, max_streams: int = 64
) -> VersionRegistration:
    """What the snapshotter would say of a small model."""
    return VersionRegistration(
        tenant=tenant,
        model=model,
        version=digest(letter),
        limits=Limits(max_input_tokens=100, max_output_tokens=100, max_streams=max_streams),
        architecture="LlamaForCausalLM",
        weight_bytes=1000,
        total_bytes=4096,
        kv_bytes_per_token=16,
        max_positions=128,
    )


def key(model: str = "m", letter: str = "a") -> VersionKey:
    """The version that `registration` registers."""
    return VersionKey(TENANT, model, digest(letter))


def stats(which: VersionKey, concurrency: float = 1.0, requests: int = 1) -> Stats:
    """One report of one activator."""
    stat = ConcurrencyStat(
        tenant=which.tenant, model=which.model, version=which.version, concurrency=concurrency, requests=requests
    )
    return Stats(activator="activator-0", stats=(stat,))


@asynccontextmanager
async def opened_registry(data: Path, feed: FeedHub | None = None) -> AsyncIterator[Registry]:
    """A registry over a real file, with the default tenant, loaded."""
    feed = feed or FeedHub()
    database = opened_database(data)
    try:
        await KeyStore(database, feed).bootstrap(data, NOW_S)
        registry = Registry(database, feed)
        await registry.load()
        yield registry
    finally:
        database.close()
