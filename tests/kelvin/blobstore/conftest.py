"""S3 behind a proxy, with one client for all tests of a module: to make one costs more than a test."""

from collections.abc import Iterator

import pytest

from tests.faults.s3_buckets import ENVIRONMENT, Buckets
from tests.kelvin.blobstore.s3_world import World, worlds


@pytest.fixture(scope="package", autouse=True)
def _credentials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def s3(buckets: Buckets) -> Iterator[World]:
    """The world of a module; faults are lifted and stores closed after each test that uses `world`."""
    with worlds(buckets) as world:
        yield world


@pytest.fixture
def world(s3: World) -> Iterator[World]:
    """An empty bucket, nothing seen, no fault."""
    s3.begin()
    yield s3
    s3.end()
