"""`kelvin push` against the base's processes: gated and sealed by the engine, registered with the control plane,
applied to the cluster.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from controlplane.knative.policy.knative_service import service_name
from tests.cluster.fake_knative import NAMESPACE, SERVING
from tests.cluster.kube_api.api_server import ApiServer
from tests.e2e.tiny_models import make_tiny
from tests.manifests.kustomize_build import ROOT, of_base
from tests.manifests.pod_processes import LocalPaths, RunningContainer, running
from tests.manifests.test_processes import AUTHORITY, outside
from tests.runtime.processes import poll_until

# Less memory than in the manifest, for a small machine: one slab for the model, one in advance.
SMALL: Final = {"KELVIN_HOST_BYTES": str(16 << 20), "KELVIN_SLAB_BYTES": str(4 << 20)}


def trusted(here: LocalPaths) -> LocalPaths:
    """Give the front door a certificate for this machine's name."""
    front = AUTHORITY.sign(name="localhost")
    given = {"tls.crt": front.certificate, "tls.key": front.key}
    return replace(here, secrets={**here.secrets, "kelvin-front": given}, beside={**here.beside, **SMALL})


def push(here: LocalPaths, door: RunningContainer, model: Path) -> "subprocess.CompletedProcess[str]":
    """Run `kelvin push` as a user does."""
    ca, key = here.place / "ca.pem", here.place / "admin.key"
    ca.write_bytes(AUTHORITY.pem)
    key.write_bytes(here.secrets["kelvin-keys"]["admin.key"])
    at = ["--url", f"https://localhost:{door.ports['https']}", "--ca", str(ca), "--key", str(key)]
    command = [sys.executable, "-m", "kelvin.cli.main", "push", str(model), "--name", "tiny", *at]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


def services(api: ApiServer) -> set[str]:
    """Return the tenant's Knative Services."""
    return {each["metadata"]["name"] for each in api.objects(SERVING, "Service", NAMESPACE)}


@pytest.mark.timeout(400)
def test_push_waits_for_an_engine(tmp_path: Path) -> None:
    """Without an engine the push is refused as unavailable. With one the same push succeeds and its Service is applied.
    That Service stays when the engine is gone.
    """
    objects, model = of_base(), make_tiny(tmp_path / "model", "llama")
    with (
        outside(objects, tmp_path) as (given, api),
        running(objects, "activator", here := trusted(given)) as activator,
        running(objects, "snapshotter", here) as snapshotter,
        running(objects, "controlplane", here) as controlplane,
    ):
        for each in (controlplane, snapshotter, activator):
            each.until("readinessProbe")
        refused = push(here, activator, model)
        assert (refused.returncode, services(api)) == (1, set()), refused.stderr
        assert refused.stderr.endswith("Error: the engine is not available\n")
        with running(objects, "snapshotter", here, "engine") as engine:
            for which in ("startupProbe", "readinessProbe", "livenessProbe"):
                engine.until(which)
            done = push(here, activator, model)
            assert done.returncode == 0, done.stderr + engine.log.read_text()[-3000:]
            version = done.stdout.split()[-1]
            poll_until("its Service", lambda: services(api) == {service_name("tiny", version)} or None)
        assert engine.probe("livenessProbe") is None
        other = make_tiny(tmp_path / "other", "llama", seed=2)
        assert push(here, activator, other).stderr.endswith("Error: the engine is not available\n")
        assert services(api) == {service_name("tiny", version)}


@pytest.mark.timeout(400)
def test_push_survives_a_change_of_leader(tmp_path: Path) -> None:
    """Without a leader the push is gated and waits. The next leader completes it."""
    objects, model = of_base(), make_tiny(tmp_path / "model", "llama")
    with (
        outside(objects, tmp_path) as (given, api),
        running(objects, "activator", here := trusted(given)) as activator,
        running(objects, "snapshotter", here) as snapshotter,
        running(objects, "snapshotter", here, "engine") as engine,
        ThreadPoolExecutor(1) as beside,
    ):
        with running(objects, "controlplane", here) as controlplane:
            for each in (controlplane, snapshotter, activator, engine):
                each.until("readinessProbe")
        pushing = beside.submit(push, here, activator, model)
        poll_until("a standby", lambda: '"born"' in engine.log.read_text() or None)
        assert (pushing.done(), services(api)) == (False, set())
        with running(objects, "controlplane", here):
            done = pushing.result(200)
            assert done.returncode == 0, done.stderr
            version = done.stdout.split()[-1]
            poll_until("its Service", lambda: services(api) == {service_name("tiny", version)} or None)
