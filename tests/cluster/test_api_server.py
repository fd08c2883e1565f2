"""The API server of the tests as its clients see it: both clients of `kubernetes`, faults, what is collected."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from kubernetes import client, config, watch
from kubernetes.aio import client as aio_client
from kubernetes.aio import config as aio_config
from kubernetes.aio import watch as aio_watch
from kubernetes.config.incluster_config import InClusterConfigLoader

from tests.cluster.answers import Json, Refused
from tests.cluster.api_server import ApiServer, Fault, serving
from tests.cluster.recordings import Client, Said

SERVING: Final = "serving.knative.dev/v1"
LIMIT_S: Final = 30.0


def service(name: str = "llama", **spec: Any) -> Json:
    template = {"spec": {"containers": [{"image": "registry.example/runtime:1"}]} | spec}
    return {
        "apiVersion": SERVING,
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"template": template},
    }


def config_map(name: str, **metadata: Any) -> Json:
    about = {"name": name, "namespace": "default"} | metadata
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": {"a": "1"}}


def ask(server: ApiServer, request: Json) -> Said:
    with Client(server) as client:
        return client.send(request)


def owned_by(obj: Json) -> Json:
    reference = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "name": obj["metadata"]["name"]}
    return reference | {"uid": obj["metadata"]["uid"], "blockOwnerDeletion": True}


def missing(server: ApiServer, obj: Json) -> bool:
    try:
        server.get(obj["apiVersion"], obj["kind"], obj["metadata"]["name"], "default")
    except Refused as error:
        return error.status == 404
    return False


def test_the_synchronous_client(api_server: ApiServer, tmp_path: Path) -> None:
    """List and watch by the official client, configured by our file."""
    with config.new_client_from_config(str(api_server.kubeconfig(tmp_path / "config"))) as found:
        core = client.CoreV1Api(found)
        assert "default" in [each.metadata.name for each in core.list_namespace().items]
        told = watch.Watch().stream(core.list_namespace, timeout_seconds=1)
        assert {each["object"].metadata.name for each in told} >= {"default", "knative-serving"}


def test_a_client_in_the_cluster(tmp_path: Path) -> None:
    """It finds the server by its environment, and trusts it by the certificate of its service account."""
    with serving(tls=tmp_path) as server:
        host, _, port = server.url.removeprefix("https://").partition(":")
        around = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        account = server.service_account(tmp_path)
        loader = InClusterConfigLoader(str(account / "token"), str(account / "ca.crt"), environ=around)
        settings = client.Configuration()
        loader.load_and_set(settings)
        with client.ApiClient(settings) as found:
            assert "default" in [each.metadata.name for each in client.CoreV1Api(found).list_namespace().items]


async def _asynchronously(server: ApiServer, path: Path) -> list[tuple[str, str]]:
    await aio_config.load_kube_config(str(path))
    async with aio_client.ApiClient() as found:
        objects = aio_client.CustomObjectsApi(found)
        where = ("serving.knative.dev", "v1", "default", "services")
        await objects.create_namespaced_custom_object(*where, service("one"))
        seen = []
        async with aio_watch.Watch() as watching:
            async for each in watching.stream(objects.list_namespaced_custom_object, *where):
                seen.append((each["type"], each["object"]["metadata"]["name"]))
                if len(seen) == 1:
                    server.create(service("two"))
                elif len(seen) == 2:
                    server.delete(each["object"])
                else:
                    break
        return seen


def test_the_asynchronous_client(api_server: ApiServer, tmp_path: Path) -> None:
    """A watch is told what was there, what came and what went, in that order."""
    path = api_server.kubeconfig(tmp_path / "config")
    seen = asyncio.run(asyncio.wait_for(_asynchronously(api_server, path), LIMIT_S))
    assert seen == [("ADDED", "one"), ("ADDED", "two"), ("DELETED", "two")]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_fault_is_answered_once(api_server: ApiServer, status: int) -> None:
    """And the next request is answered as ever."""
    request = {"method": "GET", "path": "/api/v1/namespaces"}
    api_server.fail(Fault(status=status, path="/namespaces", retry_after_s=1))
    said = ask(api_server, request)
    assert (said.status, said.body["code"], said.headers["retry-after"]) == (status, status, "1")
    assert ask(api_server, request).status == 200
    assert [each.status for each in api_server.seen] == [status, 200]


def test_an_answer_is_lost(api_server: ApiServer) -> None:
    """What was asked is done, and nobody is told."""
    api_server.fail(Fault(lost=True, method="POST"), Fault(drop=True, method="POST"))
    request = {"method": "POST", "path": "/api/v1/namespaces/default/configmaps", "content_type": "application/json"}
    for name in ("lost", "dropped"):
        with pytest.raises(ConnectionError):
            ask(api_server, request | {"body": config_map(name)})
    assert not missing(api_server, config_map("lost"))
    assert missing(api_server, config_map("dropped"))


async def test_an_answer_is_late(api_server: ApiServer) -> None:
    """The next request is answered meanwhile, and who doesn't wait is not missed."""

    api_server.fail(Fault(delay_s=2 * LIMIT_S))

    headers = {"Authorization": f"Bearer {api_server.front.token}"}
    url = f"{api_server.url}/api/v1/namespaces"
    async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession(headers=headers) as session:
        late = asyncio.create_task(session.get(url))
        while not api_server.seen:
            await asyncio.sleep(0.005)
        async with session.get(url) as answer:
            assert answer.status == 200
        assert not late.done()
        late.cancel()
    assert [each.status for each in api_server.seen] == [0, 200]


def test_a_token_is_replaced(api_server: ApiServer, tmp_path: Path) -> None:
    """Who has the old one is told so, and finds the new one where the old one was."""
    api_server.kubeconfig(tmp_path / "config")
    api_server.front.token = "another"
    with config.new_client_from_config(str(tmp_path / "config")) as found:
        with pytest.raises(client.ApiException) as refused:
            client.CoreV1Api(found).list_namespace()
        assert refused.value.status == 401
    with config.new_client_from_config(str(api_server.kubeconfig(tmp_path / "config"))) as found:
        assert client.CoreV1Api(found).list_namespace().items


class Watching:
    """A watch in a thread: its events, and how it ended."""

    def __init__(self, server: ApiServer, path: str, query: str = "") -> None:
        self.events: list[Json] = []
        self.ended = ""
        self._came = threading.Condition()
        self._request = (server, f"{path}?watch=1{query}")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        server, path = self._request
        try:
            with Client(server) as client:
                for line in client.lines(path):
                    with self._came:
                        self.events.append(json.loads(line))
                        self._came.notify_all()
            self.ended = "well"
        except Exception as error:
            self.ended = type(error).__name__
        with self._came:
            self._came.notify_all()

    def wait(self, count: int) -> list[str]:
        """The kinds of the first events, when there are so many."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.events) >= count, LIMIT_S), self.events
            return [each["type"] for each in self.events]

    def join(self) -> str:
        self._thread.join(LIMIT_S)
        return self.ended


MAPS: Final = "/api/v1/namespaces/default/configmaps"


def test_watches_are_dropped(api_server: ApiServer) -> None:
    """A bookmark for who takes one; then the connection breaks, without a last chunk."""
    api_server.create(config_map("one"))
    plain, marked = Watching(api_server, MAPS), Watching(api_server, MAPS, "&allowWatchBookmarks=true")
    assert plain.wait(1) == marked.wait(1) == ["ADDED"]
    api_server.bookmark()
    assert marked.wait(2) == ["ADDED", "BOOKMARK"]
    assert marked.events[1]["object"]["metadata"] == {"resourceVersion": str(api_server.cluster.store.version)}
    assert api_server.watching == 2
    api_server.drop_watches()
    assert (plain.join(), marked.join()) == ("IncompleteRead", "IncompleteRead")
    assert len(plain.events) == 1


@pytest.mark.parametrize("as_status", [False, True])
def test_versions_expire(api_server: ApiServer, as_status: bool) -> None:
    """A watch from before is told 410, as an event or as an answer; a list and a watch anew go on."""
    version = api_server.create(config_map("one"))["metadata"]["resourceVersion"]
    api_server.create(config_map("two"))
    api_server.expire(as_status=as_status)
    request = {"method": "GET", "path": MAPS, "query": {"watch": "true", "resourceVersion": version}}
    said = ask(api_server, request)
    told = said.body if as_status else json.loads(said.body)["object"]
    assert said.status == (410 if as_status else 200)
    assert (told["code"], told["reason"]) == (410, "Expired")
    listed = ask(api_server, {"method": "GET", "path": MAPS}).body
    watching = Watching(api_server, MAPS, f"&resourceVersion={listed['metadata']['resourceVersion']}")
    api_server.create(config_map("three"))
    assert watching.wait(1) == ["ADDED"]


def test_history_is_told(api_server: ApiServer) -> None:
    """A watch from a version that is not expired is told what happened since, as it happened."""
    version = api_server.cluster.store.version
    one = api_server.create(config_map("one"))
    api_server.change(one, {"data": {"a": "2"}})
    api_server.delete(one)
    watching = Watching(api_server, MAPS, f"&resourceVersion={version}")
    assert watching.wait(3) == ["ADDED", "MODIFIED", "DELETED"]
    versions = [int(each["object"]["metadata"]["resourceVersion"]) for each in watching.events]
    assert versions == sorted(set(versions))
    assert [each["object"]["data"]["a"] for each in watching.events] == ["1", "2", "2"]
