"""S3 behind a fault proxy. All tests of a module share one client, because creating it takes longer than a test."""

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
    """A `World` shared by the module. `world` lifts faults and closes stores after each test."""
    with worlds(buckets) as world:
        yield world


@pytest.fixture
def world(s3: World) -> Iterator[World]:
    """A `World` with an empty bucket, no recorded requests and no fault."""
    s3.begin()
    yield s3
    s3.end()
