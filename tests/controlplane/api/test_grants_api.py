"""Grants over the socket: permissions, feed rows, stored data and audit entries. Runs on both backends."""

import asyncio
import json
from pathlib import Path

import pytest

from controlplane.registry import grants
from kelvin.contracts.serving.control_messages import Feed
from tests.controlplane.control_plane_server import (
    ACME,
    OPERATOR,
    ControlPlaneClient,
    call_admin,
    open_feed,
    push,
    running_control_plane,
)

OTHER = {"x-kelvin-principal": json.dumps({"key_id": "other-k", "tenant": "other", "scopes": ["admin"]})}
CALLER = {"x-kelvin-principal": json.dumps({"key_id": "acme-i", "tenant": "acme", "scopes": ["infer"]})}
GRANT = {"owner": "acme", "model": "m", "grantee": "other", "told": True}

pytestmark = pytest.mark.usefixtures("backend")


async def _stage(client: ControlPlaneClient) -> None:
    """Create two tenants and a model of acme."""
    for tenant in ("acme", "other"):
        await call_admin(client, OPERATOR, "POST", "/tenants", {"tenant": tenant}, status=201)
    await push(client, tenant="acme")


async def _grantees(client: ControlPlaneClient) -> list[tuple[str, ...]]:
    """Return the grantees of all models, as a new activator receives them."""
    async with open_feed(client) as reader:
        snapshot: Feed = await reader.line()
    return [row.grantees for row in snapshot.models]


async def _actions(client: ControlPlaneClient) -> list[tuple[str, str, str, str]]:
    events = (await call_admin(client, ACME, "GET", "/audit"))["events"]
    return [(each["actor"], each["action"], each["subject"], each["detail"]) for each in events]


async def test_grant_is_given_published_and_revoked(data: Path) -> None:
    """A repeated grant changes nothing. Each change is durable, in the audit once, and published before the answer."""
    async with running_control_plane(data) as client:
        await _stage(client)
        async with open_feed(client) as reader:
            await reader.line()
            for _ in range(2):
                given = asyncio.create_task(call_admin(client, ACME, "PUT", "/models/m/grants/other"))
                assert [row.grantees for row in (await reader.line()).models] == [("other",)]
                assert await given == GRANT
        assert (await call_admin(client, ACME, "GET", "/models/m"))["grantees"] == ["other"]
        assert await call_admin(client, ACME, "GET", "/grants") == {"given": [GRANT], "had": []}
        assert await call_admin(client, OTHER, "GET", "/grants") == {"given": [], "had": [GRANT]}
    async with running_control_plane(data) as client:  # a second control plane over the same data
        assert await _grantees(client) == [("other",)]
        async with open_feed(client) as reader:
            await reader.line()
            taken = asyncio.create_task(call_admin(client, ACME, "DELETE", "/models/m/grants/other"))
            assert [row.grantees for row in (await reader.line()).models] == [()]
            assert await taken == GRANT
        missing = await call_admin(client, ACME, "DELETE", "/models/m/grants/other", status=404)
        assert "m to other" in missing["detail"]
        assert (await _actions(client))[:2] == [
            ("acme-k", "model.revoked", "m", "from other"),
            ("acme-k", "model.granted", "m", "to other"),
        ]


async def test_only_owner_or_operator_manages_grants(data: Path) -> None:
    """Only the owner's admin, or an operator who names the owner, may grant. For others the model does not exist."""
    async with running_control_plane(data) as client:
        await _stage(client)
        unknown = await call_admin(client, OTHER, "PUT", "/models/m/grants/default", status=404)
        assert unknown["code"] == "model_not_found"
        await call_admin(client, OTHER, "DELETE", "/models/m/grants/default", status=404)
        await call_admin(client, OTHER, "PUT", "/models/m/grants/other?tenant=acme", status=404)
        await call_admin(client, OTHER, "GET", "/grants?tenant=acme", status=404)
        await call_admin(client, CALLER, "PUT", "/models/m/grants/other", status=403)
        await call_admin(
            client, OPERATOR, "PUT", "/models/m/grants/other", status=404
        )  # the default tenant has no such model
        await call_admin(client, OPERATOR, "PUT", "/models/m/grants/other?tenant=acme")
        assert (await _actions(client))[0][:2] == ("operator", "model.granted")
        assert (await call_admin(client, OPERATOR, "GET", "/grants?tenant=other"))["had"] == [GRANT]
        await call_admin(client, OPERATOR, "GET", "/grants?tenant=nobody", status=404)
        assert await _grantees(client) == [("other",)]


async def test_what_can_be_granted(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing model can be granted to another existing tenant, up to a limit."""
    async with running_control_plane(data) as client:
        await _stage(client)
        for path, status, words in (
            ("/models/no/grants/other", 404, "no"),
            ("/models/m/grants/nobody", 404, "nobody"),
            ("/models/m/grants/acme", 400, "must be another tenant than the model's own"),
            ("/models/m/grants/No.Name", 400, "must be a DNS label"),
        ):
            assert words in (await call_admin(client, ACME, "PUT", path, status=status))["detail"]
        monkeypatch.setattr(grants, "MAX_GRANTEES", 1)
        await call_admin(client, ACME, "PUT", "/models/m/grants/other")
        full = await call_admin(client, ACME, "PUT", "/models/m/grants/default", status=507)
        assert "grants of a model" in full["detail"]
        await call_admin(client, ACME, "PUT", "/models/m/grants/other")  # an existing grant stays
        assert await _grantees(client) == [("other",)]


async def test_a_grant_goes_with_the_model(data: Path) -> None:
    """A new model of the same name has no grants."""
    async with running_control_plane(data) as client:
        await _stage(client)
        await call_admin(client, ACME, "PUT", "/models/m/grants/other")
        await call_admin(client, ACME, "DELETE", "/models/m?force=true")
        assert (await call_admin(client, OTHER, "GET", "/grants"))["had"] == []
        await push(client, tenant="acme")
        assert await _grantees(client) == [()]
    async with running_control_plane(data) as client:
        assert await _grantees(client) == [()]


async def test_a_grant_goes_with_either_tenant(data: Path) -> None:
    """Deleting the grantee is in the owner's audit. Deleting the owner deletes its models."""
    async with running_control_plane(data) as client:
        await _stage(client)
        await call_admin(client, OPERATOR, "POST", "/tenants", {"tenant": "third"}, status=201)
        for grantee in ("other", "third"):
            await call_admin(client, ACME, "PUT", f"/models/m/grants/{grantee}")
        await call_admin(client, OPERATOR, "DELETE", "/tenants/other", status=204)
        assert await _grantees(client) == [("third",)]
        assert (await _actions(client))[0] == ("operator", "model.revoked", "m", "from other, which was deleted")
    async with running_control_plane(data) as client:
        assert await _grantees(client) == [("third",)]
        await call_admin(client, OPERATOR, "DELETE", "/tenants/acme?force=true", status=204)
        assert await _grantees(client) == []
        assert (await call_admin(client, OPERATOR, "GET", "/grants?tenant=third"))["had"] == []


async def test_a_key_may_be_held_to_a_granted_model(data: Path) -> None:
    """The grant need not exist yet. The tenant's own name before a model is removed."""
    async with running_control_plane(data) as client:
        await _stage(client)
        body = {"name": "k", "scopes": ["infer"], "models": ["acme/m", "other/mine", "n"]}
        made = await call_admin(client, OTHER, "POST", "/keys", body, status=201)
        assert made["key"]["models"] == ["acme/m", "mine", "n"]
        bad = await call_admin(client, OTHER, "POST", "/keys", {**body, "models": ["a/b/c"]}, status=400)
        assert "'a/b/c': must be MODEL or OWNER/MODEL" in bad["detail"]
