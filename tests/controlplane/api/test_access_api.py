"""Tenants, keys and their audit over the socket: permissions, feed rows, and stored data. Runs on both backends."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from controlplane.registry import key_store, tenant_store
from kelvin.contracts.serving.control_messages import Feed, TenantLimits, TenantRow
from tests.controlplane.control_plane_server import (
    ACME,
    OPERATOR,
    ControlPlaneClient,
    call_admin,
    open_feed,
    push,
    running_control_plane,
)

pytestmark = pytest.mark.usefixtures("backend")


async def make(client: ControlPlaneClient, who: dict[str, str], name: str = "k", **more: object) -> Any:
    return await call_admin(client, who, "POST", "/keys", {"name": name, "scopes": ["infer"], **more}, status=201)


NO_LIMITS: dict[str, int | str | None] = dict.fromkeys(TenantLimits.__struct_fields__)


def ids(line: Feed) -> set[str]:
    return {row.key_id for row in line.keys}


async def test_tenant_is_created_suspended_resumed_deleted(data: Path) -> None:
    """Activators receive each change. The name of a deleted tenant cannot be used again."""
    async with running_control_plane(data) as client, open_feed(client) as reader:
        assert [row.tenant for row in (await reader.line()).tenants] == ["default"]
        made = await call_admin(client, OPERATOR, "POST", "/tenants", {"tenant": "acme"}, status=201)
        assert {**made, "created_at_s": 0} == {
            "tenant": "acme", "state": "active", "created_at_s": 0, "models": 0, "keys": 0,
            "limits": NO_LIMITS,
        }  # fmt: skip
        assert [(row.tenant, row.suspended) for row in (await reader.line()).tenants] == [("acme", False)]
        await call_admin(client, OPERATOR, "POST", "/tenants", {"tenant": "acme"}, status=409)
        await call_admin(client, OPERATOR, "POST", "/tenants", {"tenant": "v1"}, status=400)
        found = await call_admin(
            client, OPERATOR, "POST", "/keys?tenant=acme", {"name": "a", "scopes": ["admin"]}, status=201
        )
        key_id = found["key"]["key_id"]
        assert ids(await reader.line()) == {key_id}
        suspended = asyncio.create_task(call_admin(client, OPERATOR, "POST", "/tenants/acme/suspend"))
        assert [(row.tenant, row.suspended) for row in (await reader.line()).tenants] == [("acme", True)]
        assert (await suspended)["state"] == "suspended"
        resumed = asyncio.create_task(call_admin(client, OPERATOR, "POST", "/tenants/acme/resume"))
        assert [(row.tenant, row.suspended) for row in (await reader.line()).tenants] == [("acme", False)]
        assert (await resumed)["keys"] == 1
        left = await call_admin(client, OPERATOR, "DELETE", "/tenants/acme", status=409)
        assert left["detail"] == f"tenant 'acme': is not empty: keys {key_id}; with `force` they are deleted, too"
        await call_admin(client, OPERATOR, "POST", f"/keys/{key_id}/revoke?tenant=acme")
        assert (await reader.line()).removed_keys == (key_id,)
        await call_admin(client, OPERATOR, "DELETE", "/tenants/acme", status=204)
        assert (await reader.line()).removed_tenants == ("acme",)
        again = await call_admin(client, OPERATOR, "POST", "/tenants", {"tenant": "acme"}, status=409)
        assert "its name is not given again" in again["detail"]
        await call_admin(client, OPERATOR, "POST", "/keys?tenant=acme", {"name": "a", "scopes": ["infer"]}, status=404)
        actions = [
            each["action"] for each in (await call_admin(client, OPERATOR, "GET", "/audit?tenant=acme"))["events"]
        ]
        assert actions == [
            "tenant.deleted", "key.revoked", "tenant.resumed", "tenant.suspended", "key.created", "tenant.created",
        ]  # fmt: skip


async def test_a_tenant_with_a_model_is_not_deleted(data: Path) -> None:
    """The operators' own tenant is neither suspended nor deleted."""
    async with running_control_plane(data) as client:
        await push(client)
        left = await call_admin(client, OPERATOR, "DELETE", "/tenants/default", status=409)
        assert "stays active" in left["detail"]
        assert (
            "stays active"
            in (await call_admin(client, OPERATOR, "POST", "/tenants/default/suspend", status=409))["detail"]
        )


async def test_tenant_limits_are_set_published_and_removed(data: Path) -> None:
    """Limits are set, kept and removed one by one. Activators and the snapshotter read them. The audit has each one."""
    async with running_control_plane(data) as client, open_feed(client) as reader:
        await reader.line()
        await call_admin(client, OPERATOR, "POST", "/tenants", {"tenant": "acme"}, status=201)
        await reader.line()
        news: dict[str, int | str | None] = {"store_bytes": 0, "requests": 2}
        found = await call_admin(client, OPERATOR, "PUT", "/tenants/acme/limits", news)
        want: dict[str, int | str | None] = NO_LIMITS | {"store_bytes": 0, "requests": 2}
        assert found["limits"] == want
        (row,) = (await reader.line()).tenants
        assert row == TenantRow(tenant="acme", suspended=False, limits=TenantLimits(store_bytes=0, requests=2))
        for _ in range(2):
            news = {"requests": None, "body_bytes": 4096, "rpm": 60, "context_tokens": 2}
            found = await call_admin(client, OPERATOR, "PUT", "/tenants/acme/limits", news)
            want = NO_LIMITS | {"store_bytes": 0, "body_bytes": 4096, "rpm": 60, "context_tokens": 2}
            assert found["limits"] == want
        plan: dict[str, int | str | None] = {"weight": 4, "priority": "standard", "plan": "free"}
        plan["deadline_max_s"] = 30
        found = await call_admin(client, OPERATOR, "PUT", "/tenants/acme/limits", plan)
        want |= plan
        assert found["limits"] == want
        while row.limits.weight != 4:  # changes made at the same time may arrive in one line or in several
            row = next(iter((await reader.line()).tenants), row)
        assert (row.limits.weight, row.limits.priority, row.limits.rpm) == (4, "standard", 60)
        assert (row.limits.plan, row.limits.deadline_max_s) == ("free", 30)
        own = {name: limit for name, limit in want.items() if limit is not None}
        assert await client.request("GET", "/internal/v1/tenants/acme/limits") == (200, own)
        assert (await client.request("GET", "/internal/v1/tenants/nobody/limits"))[0] == 404
        for body, says in (
            ({"requests": 0}, ">= 1"),
            ({"body_bytes": 10}, ">= 1024"),
            ({"store_bytes": -1}, ">= 0"),
            ({"rpm": 0}, ">= 1"),
            ({"tpm": -1}, ">= 1"),
            ({"output_tokens": 0}, ">= 1"),
            ({"context_tokens": 1}, ">= 2"),
            ({"weight": 0}, ">= 1"),
            ({"weight": 1001}, "<= 1000"),
            ({"priority": "urgent"}, "Invalid enum value 'urgent'"),
            ({"deadline_max_s": 0}, ">= 1"),
            ({"plan": "Free!"}, "Expected `str` matching regex"),
            ({"store": 1}, "unknown field `store`"),
            ({"requests": "many"}, "Expected `int | null`"),
        ):
            assert (
                says in (await call_admin(client, OPERATOR, "PUT", "/tenants/acme/limits", body, status=400))["detail"]
            )
        await call_admin(client, OPERATOR, "PUT", "/tenants/nobody/limits", {}, status=404)
        await call_admin(client, ACME, "PUT", "/tenants/acme/limits", {}, status=403)
        events = (await call_admin(client, OPERATOR, "GET", "/audit?tenant=acme"))["events"]
        assert [each["detail"] for each in events if each["action"] == "tenant.limited"] == [
            "weight 4, priority standard, plan free, deadline_max_s 30",
            "requests default, body_bytes 4096, rpm 60, context_tokens 2", "store_bytes 0, requests 2",
        ]  # fmt: skip
    async with running_control_plane(data) as client:
        (acme,) = (await call_admin(client, ACME, "GET", "/tenants"))["tenants"]
        assert acme["limits"] == want


async def test_a_tenant_that_is_deleted_with_all_it_has(data: Path) -> None:
    """Its keys are suspended first, then models, keys and name are deleted; activators and the audit see each step. The
    operators' tenant and an unknown one are refused.
    """
    async with running_control_plane(data) as client, open_feed(client) as reader:
        await push(client)
        await call_admin(client, OPERATOR, "DELETE", "/tenants/default?force=true", status=409)
        await call_admin(client, OPERATOR, "DELETE", "/tenants/nobody?force=true", status=404)
        assert (await client.admin("GET", "/models/m"))[0] == 200
        await call_admin(client, OPERATOR, "POST", "/tenants", {"tenant": "acme"}, status=201)
        made = await call_admin(
            client, OPERATOR, "POST", "/keys?tenant=acme", {"name": "a", "scopes": ["admin"]}, status=201
        )
        key_id = made["key"]["key_id"]
        await push(client, tenant="acme")
        left = await call_admin(client, OPERATOR, "DELETE", "/tenants/acme", status=409)
        assert left["detail"] == (
            f"tenant 'acme': is not empty: models m; keys {key_id}; with `force` they are deleted, too"
        )
        await call_admin(client, OPERATOR, "DELETE", "/tenants/acme?force=true", status=204)
        news: list[str] = []
        while "tenant" not in news:
            line = await reader.line()
            news += ["suspended" for row in line.tenants if row.tenant == "acme" and row.suspended]
            news += ["model" for tenant, _ in line.removed_models if tenant == "acme"]
            news += ["key" for removed in line.removed_keys if removed == key_id]
            news += ["tenant" for removed in line.removed_tenants if removed == "acme"]
        assert news == ["suspended", "model", "key", "tenant"]
        assert await client.request("GET", "/internal/v1/versions?tenant=acme") == (200, {"versions": []})
        await call_admin(client, OPERATOR, "DELETE", "/tenants/acme?force=true", status=404)
        await call_admin(client, OPERATOR, "POST", "/tenants", {"tenant": "acme"}, status=409)
        events = (await call_admin(client, OPERATOR, "GET", "/audit?tenant=acme"))["events"]
        assert [each["action"] for each in events[:4]] == [
            "tenant.deleted", "key.revoked", "model.deleted", "tenant.suspended",
        ]  # fmt: skip
        assert (await client.admin("GET", "/models/m"))[0] == 200, "another tenant's model of that name"


async def test_a_key_is_shown_once_and_kept_as_a_digest(data: Path) -> None:
    """The answer may not be cached. Lists, the audit and the database hold no secret; activators get its digest."""
    async with running_control_plane(data) as client, open_feed(client) as reader:
        await reader.line()
        url, body = "http://control/admin/v1/keys", json.dumps({"name": "ci", "scopes": ["push", "billing:read"]})
        async with client.session.post(url, data=body, headers=OPERATOR) as answer:
            made = await answer.json()
            assert answer.headers["cache-control"] == "no-store"
        secret: str = made["secret"]
        (row,) = (await reader.line()).keys
        assert row.secret_sha256 == hashlib.sha256(secret.encode()).hexdigest()
        assert row.scopes == ("push", "billing:read")
        listed = await call_admin(client, OPERATOR, "GET", "/keys")
        assert {key["name"] for key in listed["keys"]} == {"admin", "default", "ci"}
        assert secret not in json.dumps([listed, await call_admin(client, OPERATOR, "GET", "/audit")])
    assert secret.encode() not in b"".join(path.read_bytes() for path in data.glob("kelvin.db*"))


async def test_rotation_overlaps(data: Path) -> None:
    """Both keys are valid until the overlap ends. The new key has the same rights and lifetime. A key is rotated only
    once.
    """
    async with running_control_plane(data) as client, open_feed(client) as reader:
        await reader.line()
        old = (await make(client, OPERATOR, models=["m"], expires_in_s=1000))["key"]
        await reader.line()
        turned = await call_admin(
            client, OPERATOR, "POST", f"/keys/{old['key_id']}/rotate", {"overlap_s": 60}, status=201
        )
        new = turned["key"]
        assert (new["scopes"], new["models"], new["name"]) == (["infer"], ["m"], "k")
        assert new["expires_at_s"] - new["created_at_s"] == 1000
        assert turned["old"]["expires_at_s"] == new["created_at_s"] + 60
        assert turned["old"]["successor"] == new["key_id"]
        published = {row.key_id: row.expires_at_s for row in (await reader.line()).keys}
        assert published == {new["key_id"]: new["expires_at_s"], old["key_id"]: turned["old"]["expires_at_s"]}
        again = await call_admin(
            client, OPERATOR, "POST", f"/keys/{old['key_id']}/rotate", {"overlap_s": 60}, status=409
        )
        assert new["key_id"] in again["detail"]
        await call_admin(client, OPERATOR, "POST", f"/keys/{new['key_id']}/rotate", {"overlap_s": 0}, status=201)
        assert (await reader.line()).removed_keys == (new["key_id"],)
        await call_admin(client, OPERATOR, "POST", f"/keys/{new['key_id']}/rotate", {"overlap_s": 0}, status=409)


async def test_a_revoked_key_stays_revoked(data: Path) -> None:
    """A second revocation changes nothing. After a restart activators do not get the key. It is listed as revoked."""
    async with running_control_plane(data) as client:
        key_id = (await make(client, OPERATOR))["key"]["key_id"]
        first = await call_admin(client, OPERATOR, "POST", f"/keys/{key_id}/revoke")
        assert (first["key"]["state"], first["told"]) == ("revoked", True)
        assert await call_admin(client, OPERATOR, "POST", f"/keys/{key_id}/revoke") == first
        events = (await call_admin(client, OPERATOR, "GET", "/audit"))["events"]
        assert [each["action"] for each in events].count("key.revoked") == 1
    async with running_control_plane(data) as client, open_feed(client) as reader:
        line = await reader.line()
        assert len(line.keys) == 2
        assert key_id not in ids(line)
        states = {key["key_id"]: key["state"] for key in (await call_admin(client, OPERATOR, "GET", "/keys"))["keys"]}
        assert states[key_id] == "revoked"


async def test_last_permanent_operator_key_is_not_revoked(data: Path) -> None:
    """A temporary second operator key is not enough. With a permanent second one the first can be revoked."""
    async with running_control_plane(data) as client:
        listed = (await call_admin(client, OPERATOR, "GET", "/keys"))["keys"]
        first = next(key["key_id"] for key in listed if "operator" in key["scopes"])
        await make(client, OPERATOR, scopes=["operator"], expires_in_s=60)
        assert "last key" in (await call_admin(client, OPERATOR, "POST", f"/keys/{first}/revoke", status=409))["detail"]
        await make(client, OPERATOR, scopes=["operator"])
        await call_admin(client, OPERATOR, "POST", f"/keys/{first}/revoke")


async def test_admin_reaches_own_tenant_only(data: Path) -> None:
    """Other tenants' keys, the tenants and the operators' keys are refused, as if they did not exist."""
    async with running_control_plane(data) as client:
        await call_admin(client, OPERATOR, "POST", "/tenants", {"tenant": "acme"}, status=201)
        theirs = (await make(client, OPERATOR))["key"]["key_id"]
        mine = (await make(client, ACME))["key"]["key_id"]
        assert [key["key_id"] for key in (await call_admin(client, ACME, "GET", "/keys"))["keys"]] == [mine]
        assert [each["tenant"] for each in (await call_admin(client, ACME, "GET", "/tenants"))["tenants"]] == ["acme"]
        for key_id in (theirs, "nothing"):
            for act, body in (("revoke", None), ("rotate", {"overlap_s": 0})):
                problem = await call_admin(client, ACME, "POST", f"/keys/{key_id}/{act}", body, status=404)
                assert problem["detail"] == f"key '{key_id}' does not exist"
        for tenant in ("default", "nothing"):
            for method, path in (("GET", "/keys"), ("GET", "/audit"), ("POST", "/keys")):
                wanted = {"name": "x", "scopes": ["infer"]} if method == "POST" else None
                problem = await call_admin(client, ACME, method, f"{path}?tenant={tenant}", wanted, status=404)
                assert problem["detail"] == f"tenant '{tenant}' does not exist"
        for method, path in (("POST", "/tenants"), ("DELETE", "/tenants/acme"), ("POST", "/tenants/acme/suspend")):
            assert (await call_admin(client, ACME, method, path, {}, status=403))["code"] == "insufficient_scope"
        await call_admin(client, ACME, "POST", "/keys", {"name": "x", "scopes": ["operator"]}, status=403)
        own = {"x-kelvin-principal": json.dumps({"key_id": "d", "tenant": "default", "scopes": ["admin"]})}
        listed = (await call_admin(client, own, "GET", "/keys"))["keys"]
        operators = next(key["key_id"] for key in listed if "operator" in key["scopes"])
        for act, body in (("revoke", None), ("rotate", {"overlap_s": 0})):
            await call_admin(client, own, "POST", f"/keys/{operators}/{act}", body, status=403)


async def test_audit_names_the_actor(data: Path) -> None:
    """An entry shows the key id, `installation`, or `operator` if the reader is another tenant. Pages are newest first.

    An operator sees every key, so a tenant's act is not taken for an operator's.
    """
    async with running_control_plane(data) as client:
        await call_admin(client, OPERATOR, "POST", "/tenants", {"tenant": "acme"}, status=201)
        key_id = (await make(client, ACME, name="app"))["key"]["key_id"]
        mine = (await call_admin(client, ACME, "GET", "/audit"))["events"]
        assert [(each["actor"], each["action"], each["subject"]) for each in mine] == [
            ("acme-k", "key.created", key_id),
            ("operator", "tenant.created", "acme"),
        ]
        assert mine[0]["detail"] == "'app', scopes infer"
        own = (await call_admin(client, OPERATOR, "GET", "/audit"))["events"]
        assert {each["actor"] for each in own} == {"installation"}
        first = (await call_admin(client, ACME, "GET", "/audit?limit=1"))["events"]
        rest = (await call_admin(client, ACME, "GET", f"/audit?limit=1&before={first[0]['sequence']}"))["events"]
        assert [*first, *rest] == mine
        every = (await call_admin(client, OPERATOR, "GET", "/audit?tenant=acme"))["events"]
        assert [(each["actor"], each["action"]) for each in every[-2:]] == [
            ("acme-k", "key.created"),
            ("oper", "tenant.created"),
        ]


async def test_key_use_keeps_the_latest_time(data: Path) -> None:
    """The later of two times is kept. Unknown keys are ignored."""
    async with running_control_plane(data) as client:
        key_id = (await make(client, OPERATOR))["key"]["key_id"]
        for used in ({key_id: 120}, {key_id: 60, "nobody": 60}):
            status, _ = await client.request("POST", "/internal/v1/keys/uses", {"used_at_s": used})
            assert status == 204
        listed = (await call_admin(client, OPERATOR, "GET", "/keys"))["keys"]
        assert {key["key_id"]: key["last_used_at_s"] for key in listed}[key_id] == 120


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param({"name": "x", "scopes": ["root"]}, "Invalid enum value 'root'", id="no such scope"),
        pytest.param({"name": "x", "scopes": []}, "scopes=[]", id="no scope"),
        pytest.param({"name": "x", "scopes": ["infer"], "expires_in_s": 0}, ">= 1", id="expired at once"),
        pytest.param(
            {"name": "x", "scopes": ["infer"], "secret": "mine"},
            "unknown field `secret`",
            id="a secret chosen by the caller",
        ),
        pytest.param({"name": "x", "scopes": ["admin"], "models": ["m"]}, "models=m", id="an admin of one model"),
    ],
)
async def test_refusals(data: Path, body: object, says: str) -> None:
    """The error names the value and the rule. No key was made."""
    async with running_control_plane(data) as client:
        assert says in (await call_admin(client, OPERATOR, "POST", "/keys", body, status=400))["detail"]
        assert len((await call_admin(client, OPERATOR, "GET", "/keys"))["keys"]) == 2


async def test_rotation_makes_no_more_keys_than_a_tenant_may_have(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """During the overlap the old key counts, too. At the limit a key can only be rotated without an overlap."""
    monkeypatch.setattr(key_store, "MAX_KEYS", 2)
    async with running_control_plane(data) as client:
        await call_admin(client, OPERATOR, "POST", "/tenants", {"tenant": "acme"}, status=201)
        made = await make(client, ACME)
        body = {"overlap_s": 3600}
        made = await call_admin(client, ACME, "POST", f"/keys/{made['key']['key_id']}/rotate", body, status=201)
        again = f"/keys/{made['key']['key_id']}/rotate"
        refused = await call_admin(client, ACME, "POST", again, body, status=507)
        assert refused["code"] == "capacity_exceeded"
        await call_admin(client, ACME, "POST", again, {"overlap_s": 0}, status=201)
        states = [each["state"] for each in (await call_admin(client, ACME, "GET", "/keys"))["keys"]]
        assert sorted(states) == ["active", "active", "expired"]


async def test_deleted_tenants_do_not_count_to_the_limit(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of tenants may have been deleted before. One tenant over the limit is refused."""
    monkeypatch.setattr(tenant_store, "MAX_TENANTS", 3)
    async with running_control_plane(data) as client:
        for number in range(4):
            await call_admin(client, OPERATOR, "POST", "/tenants", {"tenant": f"gone-{number}"}, status=201)
            await call_admin(client, OPERATOR, "DELETE", f"/tenants/gone-{number}", status=204)
        for tenant in ("acme", "globex"):
            await call_admin(client, OPERATOR, "POST", "/tenants", {"tenant": tenant}, status=201)
        refused = await call_admin(client, OPERATOR, "POST", "/tenants", {"tenant": "one-more"}, status=507)
        assert refused["code"] == "capacity_exceeded"


async def test_audit_of_an_unknown_tenant_does_not_expire(data: Path) -> None:
    """An unknown name is refused. The audit of a deleted tenant exists and can expire."""
    async with running_control_plane(data) as client:
        await call_admin(client, OPERATOR, "POST", "/tenants", {"tenant": "gone"}, status=201)
        await call_admin(client, OPERATOR, "DELETE", "/tenants/gone", status=204)
        assert await call_admin(client, OPERATOR, "POST", "/audit/expire?tenant=gone") == {"entries": {}}
        assert await call_admin(client, OPERATOR, "POST", "/audit/expire?tenant=") == {"entries": {}}
        refused = await call_admin(client, OPERATOR, "POST", "/audit/expire?tenant=nobody", status=404)
        assert refused["code"] == "not_found"
