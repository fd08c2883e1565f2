"""What the product renders becomes Knative Services on an API server, and is left alone once it is there."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from controlplane.clock import SystemClock
from controlplane.knative.apply.applier import Applier
from controlplane.knative.apply.cluster import Ref
from controlplane.knative.apply.kubernetes_client import KubernetesCluster
from tests.cluster.kube_api.api_server import ApiServer
from tests.controlplane.knative.cluster_ground import NAMESPACE, open_test_client, rendered_service
from tests.controlplane.knative.cluster_ground import server as server
from tests.controlplane.knative.cluster_world import SERVICE, running_loop
from tests.eventually import eventually


@asynccontextmanager
async def converging(client: KubernetesCluster) -> AsyncIterator[Applier]:
    it = Applier(client, *SERVICE, SystemClock(), "kelvin")
    async with running_loop(it):
        yield it


def writes(server: ApiServer) -> int:
    return sum(each.method in ("PATCH", "DELETE") for each in server.seen)


def versions_of(server: ApiServer) -> list[str]:
    services = server.objects("serving.knative.dev/v1", "Service", NAMESPACE)
    return [each["metadata"]["resourceVersion"] for each in services]


def lists(server: ApiServer) -> int:
    return sum(each.method == "GET" for each in server.seen)


def listed_again(server: ApiServer, before: int) -> bool:
    """They were found too old, and are watched again."""
    return lists(server) == before + 1 and server.watching == 1


async def test_services_are_written_once(server: ApiServer, tmp_path: Path) -> None:
    """Whatever the webhook fills in, and however it spells our amounts; likewise after all is listed anew."""
    async with open_test_client(server, tmp_path) as client:
        wanted = [rendered_service(), rendered_service("0a1b2c3d4e5f")]
        async with converging(client) as it:
            it.want(wanted)
            await eventually(lambda: all(it.seen(Ref.of(each)) for each in wanted))  # as it was answered
            for each in range(2):
                server.namespace(f"other-{each}")  # watches were told of nothing that late
                await eventually(lambda: server.watching == 1)
                before = lists(server)
                server.expire()
                server.drop_watches()
                await eventually(partial(listed_again, server, before))
            assert (writes(server), it.refusals()) == (2, {})
        async with converging(client) as it:  # another leads
            before, versions = writes(server), versions_of(server)
            it.want(wanted)
            await eventually(lambda: writes(server) == before + 2)  # each is checked
            assert versions_of(server) == versions, "what was there already is not written"
            it.want([rendered_service()])
            await eventually(lambda: len(versions_of(server)) == 1)


async def test_foreign_edits_are_undone(server: ApiServer, tmp_path: Path) -> None:
    """An edit of a value, more in a container than we named, a label, a deletion; what is theirs stays."""
    async with open_test_client(server, tmp_path) as client:
        wanted = rendered_service()
        ref = Ref.of(wanted)
        name = (ref.api_version, ref.kind, ref.name, NAMESPACE)
        async with converging(client) as it:
            it.want([wanted])
            await eventually(lambda: it.seen(ref))
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
    """In the webhook's words; others are written."""
    async with open_test_client(server, tmp_path) as client:
        bad = rendered_service("0a1b2c3d4e5f")
        bad["spec"]["template"]["metadata"]["annotations"]["autoscaling.knative.dev/min-scale"] = "9"
        async with converging(client) as it:
            it.want([bad, rendered_service()])
            await eventually(lambda: server.objects("serving.knative.dev/v1", "Service", NAMESPACE))
            await eventually(it.refusals)
            (ref,), (why,) = it.refusals().keys(), it.refusals().values()
            assert ref == Ref.of(bad)
            assert why.reason == "Invalid"
            assert "max-scale" in why.message
