"""Two tenants in one installation: objects of one look nonexistent to the other.

Every route is classified below. A new route fails here until it is added.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coldstart_bench.harness.installation import Installation
from kelvin.cli.artifacts.push_source import scan
from tests.consistency.documented_facts import Route, routes_of_code
from tests.e2e.https_client import complete, connect
from tests.e2e.installation_state import chunks

pytestmark = pytest.mark.deep

INNER = ("/internal/", "/healthz", "/readyz")


@dataclass(frozen=True)
class Names:
    """Names of existing objects of `default`, or of objects that don't exist."""

    model: str
    version: str
    request: str
    plan: str
    key: str
    tenant: str
    chunk: str


NOBODYS = Names("nothing", "0" * 64, "req_" + "0" * 26, "0" * 32, "0" * 12, "nobody", "1" * 64)

# Calls that name an object: the key's scope, the path and the body, with placeholders for names.
CALLS: dict[Route, tuple[str, str, Any]] = {
    ("POST", "/v1/completions"): ("infer", "/v1/completions", {"model": "{model}", "prompt": "w1", "max_tokens": 1}),
    ("POST", "/v1/chat/completions"): ("infer", "/{tenant}/{model}/v1/chat/completions", {"messages": []}),
    ("POST", "/v1/embeddings"): ("infer", "/v1/embeddings", {"model": "{model}", "input": "w1"}),
    ("GET", "/v1/models/{}"): ("infer", "/v1/models/{model}@{version}", None),
    ("DELETE", "/v1/requests/{}"): ("infer", "/v1/requests/{request}", None),
    ("GET", "/v1/requests/{}/timeline"): ("infer", "/v1/requests/{request}/timeline", None),
    ("GET", "/v2/models/{}"): ("infer", "/v2/models/{model}", None),
    ("GET", "/v2/models/{}/ready"): ("infer", "/{tenant}/{model}/v2/models/{model}/ready", None),
    ("POST", "/v2/models/{}/infer"): ("infer", "/v2/models/{model}/infer", {"inputs": []}),
    ("GET", "/v2/models/{}/versions/{}"): ("infer", "/v2/models/{model}/versions/{version}", None),
    ("GET", "/v2/models/{}/versions/{}/ready"): ("infer", "/v2/models/{model}/versions/{version}/ready", None),
    ("POST", "/v2/models/{}/versions/{}/infer"): ("infer", "/v2/models/{model}/versions/{version}/infer", {}),
    ("GET", "/admin/v1/models/{}"): ("admin", "/admin/v1/models/{model}", None),
    ("GET", "/admin/v1/models/{}/idle"): ("admin", "/admin/v1/models/{model}/idle", None),
    ("GET", "/admin/v1/models/{}/starts"): ("admin", "/admin/v1/models/{model}/starts", None),
    ("POST", "/admin/v1/models/{}/deploy"): ("admin", "/admin/v1/models/{model}/deploy", {"version": "{version}"}),
    ("PUT", "/admin/v1/models/{}/scale"): ("admin", "/admin/v1/models/{model}/scale", {}),
    ("POST", "/admin/v1/models/{}/stop"): ("admin", "/admin/v1/models/{model}/stop", None),
    ("GET", "/admin/v1/models/{}/restart"): ("admin", "/admin/v1/models/{model}/restart", None),
    ("POST", "/admin/v1/models/{}/restart"): ("admin", "/admin/v1/models/{model}/restart", None),
    ("DELETE", "/admin/v1/models/{}/versions/{}"): ("admin", "/admin/v1/models/{model}/versions/{version}", None),
    ("GET", "/admin/v1/billing/report"): ("admin", "/admin/v1/billing/report?month=2026-11&tenant={tenant}", None),
    ("GET", "/admin/v1/billing/verify"): ("admin", "/admin/v1/billing/verify?tenant={tenant}", None),
    ("GET", "/admin/v1/billing/reconcile"): ("admin", "/admin/v1/billing/reconcile?tenant={tenant}", None),
    ("POST", "/admin/v1/billing/close"): (
        "admin", "/admin/v1/billing/close", {"month": "2026-01", "tenant": "{tenant}"},
    ),
    ("GET", "/push/v1/manifests/{}"): ("admin", "/push/v1/manifests/{version}", None),
    ("DELETE", "/admin/v1/models/{}"): ("admin", "/admin/v1/models/{model}?force=true", None),
    ("GET", "/push/v1/originals/{}"): ("admin", "/push/v1/originals/{version}", None),
    ("GET", "/push/v1/chunks/{}"): ("admin", "/push/v1/chunks/{chunk}", None),
    ("GET", "/push/v1/versions/{}/attestations"): ("admin", "/push/v1/versions/{version}/attestations", None),
    ("GET", "/push/v1/plans/{}/manifest"): ("admin", "/push/v1/plans/{plan}/manifest", None),
    ("POST", "/push/v1/plans/{}/attestations"): (
        "admin", "/push/v1/plans/{plan}/attestations", {"envelope": ""},
    ),
    ("POST", "/admin/v1/cache/evict"): ("admin", "/admin/v1/cache/evict", {"tier": "host", "tenant": "{tenant}"}),
    ("GET", "/admin/v1/grants"): ("admin", "/admin/v1/grants?tenant={tenant}", None),
    ("PUT", "/admin/v1/models/{}/ladder"): ("admin", "/admin/v1/models/{model}/ladder", {"steps": []}),
    ("PUT", "/admin/v1/models/{}/split"): ("admin", "/admin/v1/models/{model}/split", {"weights": {}}),
    ("PUT", "/admin/v1/models/{}/grants/{}"): ("admin", "/admin/v1/models/{model}/grants/stranger", None),
    ("DELETE", "/admin/v1/models/{}/grants/{}"): ("admin", "/admin/v1/models/{model}/grants/stranger", None),
    ("GET", "/admin/v1/keys"): ("admin", "/admin/v1/keys?tenant={tenant}", None),
    ("POST", "/admin/v1/keys"): ("admin", "/admin/v1/keys?tenant={tenant}", {"name": "x", "scopes": ["infer"]}),
    ("POST", "/admin/v1/keys/{}/rotate"): ("admin", "/admin/v1/keys/{key}/rotate", {"overlap_s": 60}),
    ("POST", "/admin/v1/keys/{}/revoke"): ("admin", "/admin/v1/keys/{key}/revoke", None),
    ("GET", "/admin/v1/audit"): ("admin", "/admin/v1/audit?tenant={tenant}", None),
    ("GET", "/admin/v1/audit/verify"): ("admin", "/admin/v1/audit/verify?tenant={tenant}", None),
    ("GET", "/admin/v1/audit/windows"): ("admin", "/admin/v1/audit/windows?tenant={tenant}", None),
    ("POST", "/push/v1/plans/{}/missing"): ("admin", "/push/v1/plans/{plan}/missing", {"digests": []}),
    ("PUT", "/push/v1/plans/{}/chunks/{}"): ("admin", "/push/v1/plans/{plan}/chunks/" + "0" * 64, None),
    ("POST", "/push/v1/plans/{}/commit"): ("admin", "/push/v1/plans/{plan}/commit", {"digests": []}),
}  # fmt: skip
# Calls without names. They must not show objects of `default`.
LISTS: dict[Route, str] = {
    ("GET", "/v1/models"): "infer",
    ("GET", "/v2"): "infer",
    ("GET", "/v2/health/live"): "infer",
    ("GET", "/v2/health/ready"): "infer",
    ("GET", "/admin/v1/models"): "admin",
    ("GET", "/admin/v1/status"): "admin",
    ("GET", "/admin/v1/tenants"): "admin",
    ("POST", "/push/v1/fsck"): "admin",
}
# Routes of the operator: 403 for every other key.
OPERATORS: set[Route] = {
    ("GET", "/admin/v1/cache"),
    ("POST", "/admin/v1/cache/check"),
    ("GET", "/admin/v1/metrics"),
    ("PUT", "/admin/v1/audit/windows"),
    ("POST", "/admin/v1/audit/expire"),
    ("POST", "/admin/v1/tenants"),
    ("DELETE", "/admin/v1/tenants/{}"),
    ("PUT", "/admin/v1/tenants/{}/limits"),
    ("POST", "/admin/v1/tenants/{}/suspend"),
    ("POST", "/admin/v1/tenants/{}/resume"),
}
# Calls that show nothing existing: they create or free the caller's own objects.
OWN: set[Route] = {("POST", "/push/v1/plans"), ("POST", "/push/v1/collect")}
# Public descriptions, equal for every key that may call some of the API.
SAME: set[Route] = {("GET", "/admin/v1/openapi.json"), ("GET", "/push/v1/openapi.json")}
CLASSIFIED = CALLS.keys() | LISTS.keys() | OPERATORS | OWN | SAME


class Caller:
    """The keys of one tenant."""

    def __init__(self, kelvin: Installation, keys: dict[str, str]) -> None:
        self._kelvin = kelvin
        self._keys = keys

    def ask(self, key: str, method: str, path: str, body: object = None) -> tuple[int, str]:
        """Return status and body."""
        connection = connect(self._kelvin)
        try:
            headers = {"authorization": f"Bearer {self._keys[key]}", "content-type": "application/json"}
            payload = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
            connection.request(method, path, payload, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        finally:
            connection.close()

    def call(self, route: Route, names: Names) -> tuple[int, str]:
        """Call the route with these names. The answer's names and request id are masked."""
        key, path, body = CALLS[route]
        filled = None if body is None else json.loads(_filled(json.dumps(body), names))
        status, text = self.ask(key, route[0], _filled(path, names), filled)
        try:
            found = json.loads(text) if text else {}
        except json.JSONDecodeError:  # a chunk
            return status, text
        if isinstance(found, dict) and isinstance(found.get("error"), dict):
            found["error"].pop("request_id", None)
        plain = json.dumps(found)
        for name in (names.version, names.request, names.plan, names.key, names.chunk, names.model, names.tenant):
            plain = plain.replace(name, "…")
        return status, plain


def _filled(text: str, names: Names) -> str:
    for field in Names.__dataclass_fields__:
        text = text.replace(f"{{{field}}}", getattr(names, field))
    return text


@pytest.fixture(scope="module")
def theirs(kelvin: Installation, llama: Path) -> Names:
    """The names of a model, version, request, open push, key and chunk of `default`."""
    answered = complete(kelvin, "llama", "w1", max_tokens=1)
    assert answered.status == 200
    plan = Caller(kelvin, _keys_of_default(kelvin)).ask("admin", "POST", "/push/v1/plans", _plan(llama))
    assert plan[0] == 200, plan[1]
    key = (kelvin.data / "default.key").read_text().split("-")[1]
    version = kelvin.model("llama")["version"]
    return Names("llama", version, answered.headers["x-request-id"], json.loads(plan[1])["plan_id"], key, "default",
                 chunks(kelvin, "llama")[0])  # fmt: skip


def _plan(directory: Path) -> bytes:
    from kelvin.contracts.wire import encode

    return encode(scan(directory).request("planned"))


def _keys_of_default(kelvin: Installation) -> dict[str, str]:
    return {
        "infer": (kelvin.data / "default.key").read_text().strip(),
        "admin": (kelvin.data / "admin.key").read_text().strip(),
    }


@pytest.fixture(scope="module")
def stranger(kelvin: Installation) -> Iterator[Caller]:
    """Another tenant, with a key of each scope."""
    kelvin.admin.request("POST", "/admin/v1/tenants", {"tenant": "stranger"})
    made = {
        scope: kelvin.admin.request("POST", "/admin/v1/keys?tenant=stranger", {"name": scope, "scopes": [scope]})
        for scope in ("infer", "admin")
    }
    yield Caller(kelvin, {scope: each["secret"] for scope, each in made.items()})
    for each in made.values():
        kelvin.admin.request("POST", f"/admin/v1/keys/{each['key']['key_id']}/revoke?tenant=stranger")
    kelvin.admin.request("DELETE", "/admin/v1/tenants/stranger")


def test_every_route_is_classified(tmp_path: Path) -> None:
    """The routes come from the code, so a new route fails this test."""
    outer = {route for route in routes_of_code(tmp_path) if not route[1].startswith(INNER)}
    assert outer == CLASSIFIED


@pytest.mark.parametrize("route", CALLS, ids=" ".join)
def test_foreign_names_look_unknown(stranger: Caller, theirs: Names, route: Route) -> None:
    """A foreign name and a nonexistent one get the same 404 and the same text."""
    refused, unknown = stranger.call(route, theirs), stranger.call(route, NOBODYS)
    assert refused == unknown
    assert refused[0] == 404, refused


@pytest.mark.parametrize("route", sorted(SAME), ids=" ".join)
def test_public_answers_are_the_same_for_every_key(kelvin: Installation, stranger: Caller, route: Route) -> None:
    """The answers are identical, and a key without the scope gets 403."""
    own = Caller(kelvin, _keys_of_default(kelvin))
    assert stranger.ask("admin", *route) == own.ask("admin", *route)
    assert stranger.ask("admin", *route)[0] == 200
    assert stranger.ask("infer", *route)[0] == 403


@pytest.mark.parametrize("route", LISTS, ids=" ".join)
def test_lists_show_own_objects_alone(stranger: Caller, theirs: Names, route: Route) -> None:
    status, text = stranger.ask(LISTS[route], *route)
    assert status == 200
    for name in (theirs.model, theirs.version, theirs.key, '"default"'):
        assert name not in text


@pytest.mark.parametrize("route", sorted(OPERATORS), ids=" ".join)
def test_the_installation_is_the_operators(stranger: Caller, route: Route) -> None:
    """The answer is 403 whether the named tenant exists or not."""
    answers = {stranger.ask("admin", route[0], route[1].format(tenant), {}) for tenant in ("default", "nobody")}
    assert {status for status, _ in answers} == {403}
    assert len(answers) == 1


def test_owner_finds_objects_that_a_stranger_cannot(kelvin: Installation, theirs: Names) -> None:
    """Negative control: the same calls with a key of `default` find the objects."""
    owner = Caller(kelvin, _keys_of_default(kelvin))
    unkept = ("GET", "/push/v1/originals/{}")  # the model was pushed as safetensors, so it has no original file
    harmless = [route for route in CALLS if route[0] == "GET" and route != unkept] + [
        ("PUT", "/admin/v1/models/{}/scale"),
        ("POST", "/v1/completions"),
        ("POST", "/push/v1/plans/{}/missing"),
    ]
    for route in harmless:
        assert owner.call(route, theirs)[0] != 404, route
        assert owner.call(route, theirs) != owner.call(route, NOBODYS)
    assert "llama" in owner.ask("infer", "GET", "/v1/models")[1]
