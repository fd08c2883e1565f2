"""Fixtures of the activator's tests."""

from collections.abc import Iterator

import pytest

from tests.activator.redis_server import RedisServer


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A Redis server of the test's own."""
    with RedisServer() as server:
        yield server
