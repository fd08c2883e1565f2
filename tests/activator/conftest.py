"""What tests of the activator ask for."""

from collections.abc import Iterator

import pytest

from tests.activator.redis_server import RedisServer


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A Redis of the test's own."""
    with RedisServer() as server:
        yield server
