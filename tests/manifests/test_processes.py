"""The manifests' processes really start: each Deployment's command, environment and files, until its probes pass."""

import asyncio
import contextlib
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import Final

import pytest

from controlplane.registry.key_files import new_key_text
from kelvin.contracts.roles import Role
from kelvin.telemetry.telemetry import CERTIFICATE_EXPIRY_METRIC
from tests.activator.redis_server import RedisServer
from tests.activator.scale_link.knative_autoscaler import StrictAutoscaler
from tests.cluster.kube_api.api_server import ApiServer
from tests.cluster.kube_api.api_server import serving as api_server
from tests.controlplane.postgres_server import PostgresServer
from tests.faults.s3_buckets import CREDENTIALS, serving
from tests.kelvin.crypto.pki import Authority
from tests.loop_thread import running_loop_thread
from tests.manifests.kustomize_build import Json, build_with_components, find, knative, kustomize, of_base
from tests.manifests.pod_processes import LocalPaths, pod_name, ports_of, running
from tests.runtime.processes import poll_until

AUTHORITY = Authority()


def given(redis: str) -> dict[str, dict[str, bytes]]:
    """Return the secrets that docs/operations/cluster-install.md lets an operator create."""
    pairs = {role: AUTHORITY.of(role) for role in Role}
    return {
        **{
            f"kelvin-inner-{role}": {"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": AUTHORITY.pem}
            for role, pair in pairs.items()
        },
        "kelvin-front": {"tls.crt": pairs[Role.AGENT].certificate, "tls.key": pairs[Role.AGENT].key},
        "kelvin-once": {"once.key": token_hex(32).encode()},
        "kelvin-keys": {name: new_key_text().encode() for name in ("admin.key", "default.key")},
        "kelvin-redis": {"url": redis.encode()},
        "kelvin-database": {"password": b"unused"},
        "kelvin-store": {name: value.encode() for name, value in CREDENTIALS.items()},
    }


@contextlib.contextmanager
def autoscaler() -> Iterator[str]:
    """Run a fake Knative autoscaler and yield its URL."""
    listening, there = StrictAutoscaler(), threading.Event()

    async def main(stop: asyncio.Event) -> None:
        await listening.start()
        there.set()
        await stop.wait()
        await listening.stop()

    with running_loop_thread(main):
        assert there.wait(30)
        yield listening.url


STORE: Final = "s3://kelvin/versions"


@contextlib.contextmanager
def outside(objects: list[Json], place: Path) -> Iterator[tuple[LocalPaths, ApiServer]]:
    """Run everything outside of our Deployments: real PostgreSQL and Redis, an S3 server, an API server, an
    autoscaler.
    """
    with (
        PostgresServer() as postgres,
        RedisServer() as redis,
        serving() as buckets,
        autoscaler() as hears,
        api_server() as api,
    ):
        database = find(objects, "ConfigMap", "kelvin-controlplane")["data"]["KELVIN_DATABASE"]
        instead = {
            STORE: buckets.url(buckets.make(), "versions"),
            database: postgres.database(migrated=False).url,
            "ws://autoscaler.knative-serving.svc:8080": hears,
        }
        for kind in ("Namespace", "NetworkPolicy"):
            for each in (each for each in objects if each["kind"] == kind):
                api.create(each)
        template = find(objects, "Deployment", "controlplane")["spec"]["template"]
        about = {**template["metadata"], "name": pod_name("controlplane"), "namespace": "kelvin"}
        api.create({"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": template["spec"]})
        for name in ("kelvin-inner-runtime", "kelvin-store"):
            api.create(
                {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": "kelvin-default"}}
            )
        api.features.update(find(knative(), "ConfigMap", "config-features")["data"])
        beside = {"KUBECONFIG": str(api.kubeconfig(place / "kubeconfig"))}
        yield LocalPaths(place, given(redis.url), ports_of(objects), instead, beside), api


@pytest.mark.timeout(300)
def test_every_probe_answers_over_mutual_tls(tmp_path: Path) -> None:
    """All run together. An activator is ready once it has the feed, over mutual TLS by role. Each exports the expiry of
    its certificate.
    """
    objects = of_base()
    with (
        outside(objects, tmp_path) as (here, api),
        running(objects, "activator", here) as activator,
        running(objects, "snapshotter", here) as snapshotter,
    ):
        activator.until("livenessProbe")
        assert activator.probe("readinessProbe") == 503  # it has no feed yet
        with running(objects, "controlplane", here) as controlplane:
            for each in (controlplane, activator, snapshotter):
                each.until("readinessProbe")
                assert re.search(
                    rf'^{CERTIFICATE_EXPIRY_METRIC}{{process="{each.name}",of="inner"}} \d', each.page(), re.MULTILINE
                )
            selector = find(objects, "Service", "controlplane")["spec"]["selector"].items()

            def is_selected() -> bool:
                pod = api.get("v1", "Pod", pod_name("controlplane"), "kelvin")
                return bool(selector <= pod["metadata"]["labels"].items())

            poll_until("the Service leads to it", lambda: is_selected() or None)


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGHUP])
def test_ends_leave_no_traceback(tmp_path: Path, ended_by: signal.Signals) -> None:
    """Each process ends cleanly on each signal, the control plane while an activator reads its feed. `running` does the
    checks.
    """
    objects = of_base()
    with (
        outside(objects, tmp_path) as (here, _),
        running(objects, "activator", here, ended_by=ended_by) as activator,
        running(objects, "snapshotter", here, ended_by=ended_by) as snapshotter,
        running(objects, "controlplane", here, ended_by=ended_by) as controlplane,
    ):
        for each in (controlplane, activator, snapshotter):
            each.until("readinessProbe")


@pytest.mark.timeout(300)
def test_a_certificate_of_another_role(tmp_path: Path) -> None:
    """Control: the process refuses it, so the test above needs the right files."""
    objects, secrets = of_base(), given("unix:///nobody.sock")  # it ends before it connects to anything
    wrong = {**secrets, "kelvin-inner-activator": secrets["kelvin-inner-runtime"]}
    with (
        pytest.raises(AssertionError, match=r"activator ended with 2:\s+KELVIN_INNER_TLS"),
        running(objects, "activator", LocalPaths(tmp_path, wrong, ports_of(objects), {})) as activator,
    ):
        activator.until("livenessProbe")


@pytest.mark.skipif(kustomize() is None, reason="no kustomize 5: kubectl 1.27 or later has it")
@pytest.mark.timeout(300)
def test_a_cache_agent(tmp_path: Path) -> None:
    """Its probes are commands. It is ready only while it runs."""
    objects = build_with_components("cache-agent")
    small = {"KELVIN_HOST_BYTES": 16 << 20, "KELVIN_SLAB_BYTES": 4 << 20, "KELVIN_NVME_BYTES": 64 << 20}
    with serving() as buckets:
        instead = {STORE: buckets.url(buckets.make(), "versions")}
        beside = {name: str(value) for name, value in small.items()}
        here = LocalPaths(tmp_path, given("unix:///nobody.sock"), ports_of(objects), instead, beside)
        with running(objects, "cache-agent", here) as agent:
            agent.until("startupProbe")
            agent.until("readinessProbe")
            agent.until("livenessProbe")
        assert agent.probe("livenessProbe") is None
