"""What holds for every test, and the S3 server that those share which need one."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.faults.buckets import Buckets, serving

# How long an example takes says more about the machine's neighbours than about the example.
settings.register_profile("kelvin", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kelvin")


@pytest.fixture(scope="session")
def buckets() -> Iterator[Buckets]:
    """An S3 server of this session's own."""
    with serving() as buckets:
        yield buckets
