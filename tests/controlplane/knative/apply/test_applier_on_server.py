"""Applier on the fake API server: rendered Services are written once and left alone afterwards."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from controlplane.clock import SystemClock
from controlplane.knative.apply.applier import Applier
from controlplane.knative.apply.cluster import Ref
from controlplane.knative.apply.kubernetes_client import KubernetesCluster
from tests.cluster.kube_api.api_server import ApiServer
from tests.controlplane.knative.api_server_fixture import NAMESPACE, open_test_client, rendered_service
from tests.controlplane.knative.api_server_fixture import server as server
from tests.controlplane.knative.fake_cluster import SERVICE, running_loop
from tests.eventually import eventually


@asynccontextmanager
async def running_applier(client: KubernetesCluster) -> AsyncIterator[Applier]:
    it = Applier(client, *SERVICE, SystemClock(), "kelvin")
    async with running_loop(it):
        yield it


def writes(server: ApiServer) -> int:
    return sum(each.method in ("PATCH", "DELETE") for each in server.requests)


def versions_of(server: ApiServer) -> list[str]:
    services = server.objects("serving.knative.dev/v1", "Service", NAMESPACE)
    return [each["metadata"]["resourceVersion"] for each in services]


def lists(server: ApiServer) -> int:
    return sum(each.method == "GET" for each in server.requests)


def listed_again(server: ApiServer, before: int) -> bool:
    """Return whether one more list was read, because the version had expired, and the watch is open again."""
    return lists(server) == before + 1 and server.open_watches == 1


async def test_services_are_written_once(server: ApiServer, tmp_path: Path) -> None:
    """Neither the webhook's defaults nor other spellings of quantities cause a second write, also after a new list."""
    async with open_test_client(server, tmp_path) as client:
        wanted = [rendered_service(), rendered_service("0a1b2c3d4e5f")]
        async with running_applier(client) as it:
            it.set_wanted(wanted)
            await eventually(lambda: all(it.find_observed(Ref.of(each)) for each in wanted))  # from the response
            for each in range(2):
                server.namespace(f"other-{each}")  # a change that the watches do not deliver
                await eventually(lambda: server.open_watches == 1)
                before = lists(server)
                server.expire()
                server.drop_watches()
                await eventually(partial(listed_again, server, before))
            assert (writes(server), it.refusals()) == (2, {})
        async with running_applier(client) as it:  # a new leader
            before, versions = writes(server), versions_of(server)
            it.set_wanted(wanted)
            await eventually(lambda: writes(server) == before + 2)  # each is checked
            assert versions_of(server) == versions, "existing Services are not written"
            it.set_wanted([rendered_service()])
            await eventually(lambda: len(versions_of(server)) == 1)


async def test_foreign_edits_are_undone(server: ApiServer, tmp_path: Path) -> None:
    """A changed value, an extra container field, a removed label and a deletion are repaired. Other annotations
    stay.
    """
    async with open_test_client(server, tmp_path) as client:
        wanted = rendered_service()
        ref = Ref.of(wanted)
        name = (ref.api_version, ref.kind, ref.name, NAMESPACE)
        async with running_applier(client) as it:
            it.set_wanted([wanted])
            await eventually(lambda: it.find_observed(ref))
            template = {"autoscaling.knative.dev/max-scale": "100"}
            patch = {
                "metadata": {"annotations": {"theirs": "1"}},
                "spec": {"template": {"metadata": {"annotations": template}}},
            }
            server.change(server.get(*name), patch)
            await eventually(lambda: _scale(server, name) == "3")
            assert server.get(*name)["metadata"]["annotations"]["theirs"] == "1"
            containers = server.get(*name)["spec"]["template"]["spec"]["containers"]
            containers[0]["command"] = ["evil"]
            server.change(server.get(*name), {"spec": {"template": {"spec": {"containers": containers}}}})
            await eventually(lambda: "command" not in server.get(*name)["spec"]["template"]["spec"]["containers"][0])
            server.change(server.get(*name), {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}})
            await eventually(lambda: "app.kubernetes.io/managed-by" in server.get(*name)["metadata"]["labels"])
            server.delete(server.get(*name))
            await eventually(lambda: server.objects("serving.knative.dev/v1", "Service", NAMESPACE))


def _scale(server: ApiServer, name: tuple[str, str, str, str]) -> str:
    found: str = server.get(*name)["spec"]["template"]["metadata"]["annotations"]["autoscaling.knative.dev/max-scale"]
    return found


async def test_refused_service_shows_the_message(server: ApiServer, tmp_path: Path) -> None:
    """The refusal has the webhook's message. Other Services are written."""
    async with open_test_client(server, tmp_path) as client:
        bad = rendered_service("0a1b2c3d4e5f")
        bad["spec"]["template"]["metadata"]["annotations"]["autoscaling.knative.dev/min-scale"] = "9"
        async with running_applier(client) as it:
            it.set_wanted([bad, rendered_service()])
            await eventually(lambda: server.objects("serving.knative.dev/v1", "Service", NAMESPACE))
            await eventually(it.refusals)
            (ref,), (why,) = it.refusals().keys(), it.refusals().values()
            assert ref == Ref.of(bad)
            assert why.reason == "Invalid"
            assert "max-scale" in why.message
