"""The API server that tests of the cluster speak to."""

from collections.abc import Iterator

import pytest

from tests.cluster.api_server import ApiServer, serving


@pytest.fixture
def api_server() -> Iterator[ApiServer]:
    """A cluster of this test's own, with Knative Serving's kinds."""
    with serving() as server:
        yield server
