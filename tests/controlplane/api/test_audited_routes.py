"""Every route that changes something leaves an audit entry. Each route is called over the socket and its entry looked
up.

A new route fails here until it is in the table and leaves its entry.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.audit import audit_rows
from controlplane.audit.audit_rows import ALL_TENANTS, verify_audit
from controlplane.db.database import disposing, reading_engine, snapshot
from tests.controlplane.builders import digest, registration
from tests.controlplane.control_plane_server import (
    ACME,
    ADMIN,
    OPERATOR,
    ControlPlaneClient,
    push,
    running_control_plane,
)
from tests.controlplane.route_list import admin_routes

WHO = {**ADMIN, "x-request-id": "req_0123456789"}
Before = Callable[[ControlPlaneClient], Awaitable[object]]


@dataclass(frozen=True)
class AuditedCall:
    """A call, the calls that prepare it, and the audit entry that it must leave."""

    action: str
    subject: str
    path: str
    body: Any = None
    tenant: str = "default"
    before: tuple[Before, ...] = ()
    status: int = 200
    changed: Any = None
    refused: tuple[str, ...] = ()  # the details of further entries


def asking(method: str, path: str, body: object = None) -> Before:
    return lambda client: client.admin(method, path, body)


def pushing(letter: str) -> Before:
    return lambda client: push(client, letter=letter)


ACME_IS = asking("POST", "/tenants", {"tenant": "acme"})
KEY = {"name": "k", "scopes": ["infer"]}
FIVE = {"rpm": 5}
NO_ACCESS = {"days": {"access": 0}}
AUDITED_CALLS: dict[tuple[str, str], AuditedCall] = {
    ("POST", "/tenants"): AuditedCall("tenant.created", "acme", "/tenants", {"tenant": "acme"}, "acme", status=201),
    ("POST", "/tenants/{tenant}/suspend"): AuditedCall(
        "tenant.suspended", "acme", "/tenants/acme/suspend", None, "acme", (ACME_IS,)
    ),
    ("POST", "/tenants/{tenant}/resume"): AuditedCall(
        "tenant.resumed", "acme", "/tenants/acme/resume", None, "acme",
        (ACME_IS, asking("POST", "/tenants/acme/suspend")),
    ),
    ("PUT", "/tenants/{tenant}/limits"): AuditedCall(
        "tenant.limited", "acme", "/tenants/acme/limits", FIVE, "acme", (ACME_IS,), changed={"rpm": [None, 5]}
    ),
    ("DELETE", "/tenants/{tenant}"): AuditedCall(
        "tenant.deleted", "acme", "/tenants/acme", None, "acme", (ACME_IS,), status=204
    ),
    ("POST", "/keys"): AuditedCall(
        "key.created", "{key}", "/keys", KEY, status=201, changed={"name": [None, "k"], "scopes": [None, ["infer"]]}
    ),
    ("POST", "/keys/{key_id}/rotate"): AuditedCall(
        "key.rotated", "{old}", "/keys/{old}/rotate", {"overlap_s": 60}, before=(asking("POST", "/keys", KEY),),
        status=201,
    ),
    ("POST", "/keys/{key_id}/revoke"): AuditedCall(
        "key.revoked", "{old}", "/keys/{old}/revoke", before=(asking("POST", "/keys", KEY),)
    ),
    ("PUT", "/models/{model}/grants/{grantee}"): AuditedCall(
        "model.granted", "m", "/models/m/grants/acme", before=(ACME_IS, pushing("a")),
        changed={"grantee": [None, "acme"]},
    ),
    ("DELETE", "/models/{model}/grants/{grantee}"): AuditedCall(
        "model.revoked", "m", "/models/m/grants/acme",
        before=(ACME_IS, pushing("a"), asking("PUT", "/models/m/grants/acme")), changed={"grantee": ["acme", None]},
    ),
    ("POST", "/models/{model}/deploy"): AuditedCall(
        "model.deployed", "m", "/models/m/deploy", {"version": digest("b")}, before=(pushing("a"), pushing("b")),
        changed={"prod": [digest("a"), digest("b")]},
    ),
    ("PUT", "/models/{model}/split"): AuditedCall(
        "model.split", "m", "/models/m/split", {"weights": {digest("a"): 9, digest("b"): 1}},
        before=(pushing("a"), pushing("b")), changed={"split": [{}, {digest("a"): 9, digest("b"): 1}]},
    ),
    ("PUT", "/models/{model}/scale"): AuditedCall(
        "model.scaled", "m", "/models/m/scale", {"max": 3, "grace_s": 30.0}, before=(pushing("a"),),
        changed={"max": [1, 3]},
    ),
    ("PUT", "/models/{model}/ladder"): AuditedCall(
        "model.ladder", "m", "/models/m/ladder", {"steps": [{"step": "cap-output", "tokens": 64}]},
        before=(pushing("a"),), changed={"ladder": [[], ['{"step":"cap-output","tokens":64,"wait_s":null}']]},
    ),
    ("POST", "/models/{model}/restart"): AuditedCall(
        "model.restarted", "m", "/models/m/restart", before=(pushing("a"),), status=202
    ),
    ("POST", "/models/{model}/stop"): AuditedCall(
        "model.stopped", "m", "/models/m/stop", before=(pushing("a"),), status=202
    ),
    ("DELETE", "/models/{model}"): AuditedCall("model.deleted", "m", "/models/m?force=true", before=(pushing("a"),)),
    ("DELETE", "/models/{model}/versions/{version}"): AuditedCall(
        "version.deleted", "m", f"/models/m/versions/{digest('b')}", before=(pushing("a"), pushing("b")),
        changed={"version": [digest("b"), None]},
    ),
    # No cache agent runs here. One entry is written before the call, one after its failure.
    ("POST", "/cache/evict"): AuditedCall(
        "cache.evicted", "cache", "/cache/evict", {"tier": "host"}, status=503, changed={"tier": [None, "host"]},
        refused=("refused: unavailable",),
    ),
    ("POST", "/billing/close"): AuditedCall(
        "month.closed", "2020-01", "/billing/close", {"tenant": "default", "month": "2020-01"}
    ),
    ("PUT", "/audit/windows"): AuditedCall(
        "audit.kept", "default", "/audit/windows", {"days": {"keys": 30}}, changed={"keys": [365, 30]}
    ),
    ("POST", "/audit/expire"): AuditedCall(
        "audit.expired", "access", "/audit/expire?tenant=acme", None, "acme",
        (ACME_IS, asking("GET", "/audit?tenant=acme"), asking("PUT", "/audit/windows?tenant=acme", NO_ACCESS)),
    ),
}  # fmt: skip
READ_ONLY_ROUTES = {("POST", "/cache/check")}  # it reads the cache and reports faults


def test_every_route_that_changes_something_is_in_the_table() -> None:
    """The routes are read from the application."""
    assert {route for route in admin_routes() if route[0] != "GET"} == AUDITED_CALLS.keys() | READ_ONLY_ROUTES


async def trail(client: ControlPlaneClient, tenant: str) -> list[Any]:
    status, found = await client.admin("GET", f"/audit?tenant={tenant}")
    assert status == 200
    return list(found["events"])


async def call_with_setup(data: Path, route: tuple[str, str]) -> list[Any]:
    """Return the entries that the call left, without earlier ones."""
    act = AUDITED_CALLS[route]
    async with running_control_plane(data) as client:
        old = "none"
        for each in act.before:
            if isinstance(made := await each(client), tuple) and isinstance(made[1], dict) and "key" in made[1]:
                old = made[1]["key"]["key_id"]
        there = {each["sequence"] for each in await trail(client, act.tenant)} if act.tenant == "default" else set()
        path = f"/admin/v1{act.path.replace('{old}', old)}"
        status, answer = await client.request(route[0], path, act.body, WHO)
        assert status == act.status, answer
        key = answer["key"]["key_id"] if isinstance(answer, dict) and "key" in answer else "none"
        subject = act.subject.replace("{old}", old).replace("{key}", key)
        news = [each for each in await trail(client, act.tenant) if each["sequence"] not in there]
        with disposing(reading_engine(data / "kelvin.db")) as engine, snapshot(engine) as connection:
            assert verify_audit(connection, ALL_TENANTS).sound
        return [each for each in news if (each["action"], each["subject"]) == (act.action, subject)]


@pytest.mark.parametrize("route", AUDITED_CALLS, ids=" ".join)
async def test_a_change_leaves_its_entry(data: Path, route: tuple[str, str]) -> None:
    """There is one entry, with the actor, the request id and the changed fields. Every chain holds."""
    *refusals, entry = await call_with_setup(data, route)
    assert tuple(each["detail"] for each in refusals) == AUDITED_CALLS[route].refused
    assert (entry["actor"], entry["request_id"], entry["tenant"]) == (
        "k",
        "req_0123456789",
        AUDITED_CALLS[route].tenant,
    )
    if (changed := AUDITED_CALLS[route].changed) is not None:
        assert entry["changed"] == changed


async def test_missing_audit_entry_is_noticed(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with a `record` that writes nothing, no entry is found."""
    monkeypatch.setattr(audit_rows, "record", lambda *_, **__: None)
    assert await call_with_setup(data, ("PUT", "/tenants/{tenant}/limits")) == []


async def test_push_has_an_audit_entry(data: Path) -> None:
    """The entry has the key that the snapshotter names. The installation's own audit has price changes. Chains hold."""
    async with running_control_plane(data) as client:
        await push(client)
        await push(client)  # a second push changes nothing
        found = [each for each in await trail(client, "default") if each["action"] == "version.published"]
        assert [(each["subject"], each["changed"]) for each in found] == [("m", {"version": [None, digest("a")]})]
        body = msgspec.to_builtins(msgspec.structs.replace(registration(letter="b"), pushed_by="k9"))
        assert (await client.request("POST", "/internal/v1/versions", body))[0] == 201
        assert [each["actor"] for each in (await trail(client, "default"))[:1]] == ["k9"]
        assert [each["action"] for each in await trail(client, "")] == ["prices.changed"]
        while (answer := await client.admin("GET", "/audit/verify?all=true"))[0] == 202:
            pass  # verification takes longer than one answer waits
        status, report = answer
        assert (status, report["sound"]) == (200, True)
        assert {chain["tenant"] for chain in report["chains"]} == {"default", ""}


async def test_operator_access_is_in_the_tenants_audit(data: Path) -> None:
    """Reads of keys, grants and the audit are recorded. A tenant's own reads are not, nor any with a window of zero
    days.
    """
    async with running_control_plane(data) as client:
        await ACME_IS(client)
        for path in ("/keys", "/grants", "/audit"):
            assert (await client.request("GET", f"/admin/v1{path}?tenant=acme", None, OPERATOR))[0] == 200
            assert (await client.request("GET", f"/admin/v1{path}", None, ACME))[0] == 200
        looks = ["access.audit", "access.grants", "access.keys"]
        mine = (await client.request("GET", "/admin/v1/audit", None, ACME))[1]["events"]
        assert [each["action"] for each in mine] == [*looks, "tenant.created"]
        assert {each["actor"] for each in mine} == {"operator"}
        assert (await client.admin("PUT", "/audit/windows?tenant=acme", {"days": {"access": 0}}))[0] == 200
        await client.admin("GET", "/keys?tenant=acme")
        mine = (await client.request("GET", "/admin/v1/audit", None, ACME))[1]["events"]
        assert [each["action"] for each in mine] == ["audit.kept", *looks, "tenant.created"]
        assert (await client.admin("GET", "/audit?tenant=nobody"))[1] == {"events": []}


async def test_windows_over_the_socket(data: Path) -> None:
    """A tenant can read its windows and set none. Errors name the invalid value."""
    async with running_control_plane(data) as client:
        await ACME_IS(client)
        status, found = await client.request("GET", "/admin/v1/audit/windows", None, ACME)
        days = {"access": 90, "keys": 365, "models": 365, "tenants": 2557, "billing": 2557}
        assert (status, found) == (200, {"tenant": "acme", "days": days})
        assert (await client.request("PUT", "/admin/v1/audit/windows", {"days": {}}, ACME))[0] == 403
        assert (await client.request("POST", "/admin/v1/audit/expire", None, ACME))[0] == 403
        assert (await client.request("GET", "/admin/v1/audit/verify?all=true", None, ACME))[0] == 403
        assert (await client.request("GET", "/admin/v1/audit/verify?tenant=default", None, ACME))[0] == 404
        for wanted, says in (
            ({"keys": 0}, "windows.keys=0: must be 1 to 36500 days"),
            ({"access": -1}, "windows.access=-1: must be 0 to 36500 days"),
            ({"trail": 1}, "must be some of access, keys, models, tenants, billing"),
            ({"keys": "x"}, "Expected `int | null`"),
        ):
            status, problem = await client.admin("PUT", "/audit/windows?tenant=acme", {"days": wanted})
            assert status == 400
            assert says in problem["detail"]
        assert (await client.admin("PUT", "/audit/windows?tenant=nobody", {"days": {}}))[0] == 404
        await client.admin("PUT", "/audit/windows?tenant=", {"days": {"keys": 10}})
        assert (await client.request("GET", "/admin/v1/audit/windows", None, ACME))[1]["days"]["keys"] == 10
        await client.admin("PUT", "/audit/windows?tenant=acme", {"days": {"keys": 20}})
        await client.admin("PUT", "/audit/windows?tenant=acme", {"days": {"keys": None}})
        assert (await client.request("GET", "/admin/v1/audit/windows", None, ACME))[1]["days"]["keys"] == 10
