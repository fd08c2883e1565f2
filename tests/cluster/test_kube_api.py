"""Rules of the fake API server that no recording shows, or that several tests rely on.

Faults, watches and credentials are covered by the tests of its client (tests/controlplane).
"""

from typing import Final

import pytest

from tests.cluster.kube_api.api_server import ApiServer
from tests.cluster.kube_api.recordings import Answered, Client
from tests.cluster.kube_api.status_answers import Json, Refused
from tests.eventually import wait

SERVING: Final = "serving.knative.dev/v1"


def service() -> Json:
    return {
        "apiVersion": SERVING,
        "kind": "Service",
        "metadata": {"name": "llama", "namespace": "default"},
        "spec": {"template": {"spec": {"containers": [{"image": "registry.example/runtime:1"}]}}},
    }


def config_map(name: str, **metadata: object) -> Json:
    about = {"name": name, "namespace": "default"} | metadata
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": {"a": "1"}}


def ask(server: ApiServer, request: Json) -> Answered:
    with Client(server) as client:
        return client.send(request)


def owned_by(obj: Json) -> Json:
    reference = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "name": obj["metadata"]["name"]}
    return reference | {"uid": obj["metadata"]["uid"], "blockOwnerDeletion": True}


def test_a_definition_of_our_own(api_server: ApiServer) -> None:
    """A CRD's kind is served at once, with its schema and its status subresource."""
    schema = {
        "type": "object",
        "properties": {
            "spec": {
                "type": "object",
                "required": ["size"],
                "properties": {"size": {"type": "integer", "minimum": 1}, "mode": {"type": "string", "default": "a"}},
            },
            "status": {"type": "object", "properties": {"ready": {"type": "boolean"}}},
        },
    }
    names = {"plural": "things", "kind": "Thing", "singular": "thing"}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    spec = {"group": "kelvin.dev", "scope": "Namespaced", "names": names}
    metadata = {"name": "things.kelvin.dev"}
    definition = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": metadata}
    api_server.create(definition | {"spec": spec | {"versions": [version | {"subresources": {"status": {}}}]}})
    thing = {"apiVersion": "kelvin.dev/v1", "kind": "Thing", "metadata": {"name": "x", "namespace": "default"}}
    with pytest.raises(Refused, match=r"spec.size in body should be greater than or equal to 1"):
        api_server.create(thing | {"spec": {"size": 0}})
    with pytest.raises(Refused, match=r"spec.size: Required value"):
        api_server.create(thing | {"spec": {}})
    made = api_server.create(thing | {"spec": {"size": 2}, "status": {"ready": True}})
    assert (made["spec"], made["status"]) == ({"size": 2, "mode": "a"}, {"ready": True})
    assert made["metadata"]["generation"] == 1
    assert api_server.change(made, {"spec": {"size": 3}})["metadata"]["generation"] == 2
    api_server.delete(definition)
    assert ask(api_server, {"method": "GET", "path": "/apis/kelvin.dev/v1/things"}).status == 404


def test_a_status_is_applied(api_server: ApiServer) -> None:
    """The status has its own field owner. Its apply changes neither the spec nor the generation."""
    api_server.create(service())
    body = service() | {"spec": {"template": {"spec": {"containers": []}}}, "status": {"url": "http://llama"}}
    path = "/apis/serving.knative.dev/v1/namespaces/default/services/llama/status"
    query = {"fieldManager": "kelvin", "force": "true"}
    request = {"method": "PATCH", "path": path, "query": query, "content_type": "application/apply-patch+yaml"}
    response = ask(api_server, request | {"body": body})
    assert response.status == 200, response.body
    assert response.body["status"] == {"url": "http://llama"}
    assert response.body["spec"]["template"]["spec"]["containers"][0]["image"] == "registry.example/runtime:1"
    assert response.body["metadata"]["generation"] == 1
    (owned,) = (each for each in response.body["metadata"]["managedFields"] if each["manager"] == "kelvin")
    assert (owned["subresource"], owned["fieldsV1"]) == ("status", {"f:status": {"f:url": {}}})
    again = ask(api_server, request | {"body": body})
    assert again.body["metadata"]["resourceVersion"] == response.body["metadata"]["resourceVersion"]


def test_an_apply_that_names_an_object_makes_none(api_server: ApiServer) -> None:
    """An apply with a uid creates no object. One without creates it, and one with the right uid changes it."""
    path = "/apis/serving.knative.dev/v1/namespaces/default/services/llama"
    request = {"method": "PATCH", "path": path, "query": {"fieldManager": "kelvin", "force": "true"}}
    request |= {"content_type": "application/apply-patch+yaml"}

    def applied(uid: str | None) -> tuple[int, str]:
        body = service()
        body["metadata"] = {**body["metadata"], **({} if uid is None else {"uid": uid})}
        response = ask(api_server, request | {"body": body})
        return response.status, str(response.body.get("message") or response.body["metadata"]["uid"])

    assert applied("1-2-3") == (
        409,
        'Operation cannot be fulfilled on services.serving.knative.dev "llama": uid mismatch: '
        "the provided object specified uid 1-2-3, and no existing object was found",
    )
    status, uid = applied(None)
    assert status == 201
    assert applied(uid) == (200, uid)


def test_empty_endpoint_slice_holds_nulls(api_server: ApiServer) -> None:
    """This is a private Service without pods (lifecycle/endpointslice.jsonl). Readers must expect it."""
    about = {"name": "llama-00001-private-x", "namespace": "default"}
    found: Json = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": about}
    made = api_server.create(found | {"addressType": "IPv4", "endpoints": [], "ports": []})
    assert (made["endpoints"], made["ports"]) == (None, None)


def test_strategic_merge_patch_merges_by_key(api_server: ApiServer) -> None:
    """A condition is replaced by type, and the others stay. A merge patch replaces the whole list."""
    conditions = [{"type": "Ready", "status": "False"}, {"type": "PodScheduled", "status": "True"}]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one", "namespace": "default"}}
    containers = {"containers": [{"name": "runtime", "image": "registry.example/runtime:1"}]}
    api_server.create(pod | {"spec": containers, "status": {"conditions": conditions}})
    patch = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    request = {"method": "PATCH", "path": "/api/v1/namespaces/default/pods/one/status", "body": patch}
    response = ask(api_server, request | {"content_type": "application/strategic-merge-patch+json"})
    assert response.body["status"]["conditions"] == [{"type": "Ready", "status": "True"}, conditions[1]]
    response = ask(api_server, request | {"content_type": "application/merge-patch+json"})
    assert response.body["status"]["conditions"] == [{"type": "Ready", "status": "True"}]


def test_dependents_go_with_their_owner(api_server: ApiServer) -> None:
    """The garbage collector runs beside the server."""
    owner = api_server.create(config_map("owner"))
    api_server.create(config_map("owned", ownerReferences=[owned_by(owner)]))
    api_server.delete(owner)
    wait(lambda: not api_server.objects("v1", "ConfigMap", "default"), "both are gone")
