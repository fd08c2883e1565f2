"""Fixtures: a fake API server of the cluster, and Knative played on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.fake_knative import FEATURES, FakeKnative
from tests.cluster.kube_api.api_server import ApiServer, serving


@pytest.fixture
def api_server() -> Iterator[ApiServer]:
    """A cluster of this test with Knative Serving's kinds."""
    with serving() as server:
        yield server


@pytest.fixture
def knative(api_server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKnative:
    """A cluster with the features that the settings need, and a KUBECONFIG that points to it."""
    api_server.features.update(dict.fromkeys(FEATURES, "enabled"))
    api_server.namespace("platform")
    monkeypatch.setenv("KUBECONFIG", str(api_server.kubeconfig(tmp_path / "kubeconfig")))
    return FakeKnative(api_server)
