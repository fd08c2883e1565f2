"""Grants over the socket: permissions, feed rows, stored data and audit entries. Runs on both backends."""

import asyncio
import json
from pathlib import Path

import pytest

from controlplane.registry import grants
from kelvin.contracts.serving.control_messages import Feed
from tests.controlplane.control_plane_server import ACME, OPERATOR, ControlPlaneClient, ask, feed, opened, push

OTHER = {"x-kelvin-principal": json.dumps({"key_id": "other-k", "tenant": "other", "scopes": ["admin"]})}
CALLER = {"x-kelvin-principal": json.dumps({"key_id": "acme-i", "tenant": "acme", "scopes": ["infer"]})}
GRANT = {"owner": "acme", "model": "m", "grantee": "other", "told": True}

pytestmark = pytest.mark.usefixtures("backend")


async def _stage(door: ControlPlaneClient) -> None:
    """Create two tenants and a model of acme."""
    for tenant in ("acme", "other"):
        await ask(door, OPERATOR, "POST", "/tenants", {"tenant": tenant}, status=201)
    await push(door, tenant="acme")


async def _grantees(door: ControlPlaneClient) -> list[tuple[str, ...]]:
    """Return the grantees of all models, as a new activator receives them."""
    async with feed(door) as reader:
        snapshot: Feed = await reader.line()
    return [row.grantees for row in snapshot.models]


async def _actions(door: ControlPlaneClient) -> list[tuple[str, str, str, str]]:
    events = (await ask(door, ACME, "GET", "/audit"))["events"]
    return [(each["actor"], each["action"], each["subject"], each["detail"]) for each in events]


async def test_grant_is_given_published_and_revoked(data: Path) -> None:
    """A repeated grant changes nothing. Each change is durable, in the audit once, and published before the answer."""
    async with opened(data) as door:
        await _stage(door)
        async with feed(door) as reader:
            await reader.line()
            for _ in range(2):
                given = asyncio.create_task(ask(door, ACME, "PUT", "/models/m/grants/other"))
                assert [row.grantees for row in (await reader.line()).models] == [("other",)]
                assert await given == GRANT
        assert (await ask(door, ACME, "GET", "/models/m"))["grantees"] == ["other"]
        assert await ask(door, ACME, "GET", "/grants") == {"given": [GRANT], "had": []}
        assert await ask(door, OTHER, "GET", "/grants") == {"given": [], "had": [GRANT]}
    async with opened(data) as door:  # a second control plane over the same data
        assert await _grantees(door) == [("other",)]
        async with feed(door) as reader:
            await reader.line()
            taken = asyncio.create_task(ask(door, ACME, "DELETE", "/models/m/grants/other"))
            assert [row.grantees for row in (await reader.line()).models] == [()]
            assert await taken == GRANT
        missing = await ask(door, ACME, "DELETE", "/models/m/grants/other", status=404)
        assert "m to other" in missing["detail"]
        assert (await _actions(door))[:2] == [
            ("acme-k", "model.revoked", "m", "from other"),
            ("acme-k", "model.granted", "m", "to other"),
        ]


async def test_only_owner_or_operator_manages_grants(data: Path) -> None:
    """Only the owner's admin, or an operator who names the owner, may grant. For others the model does not exist."""
    async with opened(data) as door:
        await _stage(door)
        unknown = await ask(door, OTHER, "PUT", "/models/m/grants/default", status=404)
        assert unknown["code"] == "model_not_found"
        await ask(door, OTHER, "DELETE", "/models/m/grants/default", status=404)
        await ask(door, OTHER, "PUT", "/models/m/grants/other?tenant=acme", status=404)
        await ask(door, OTHER, "GET", "/grants?tenant=acme", status=404)
        await ask(door, CALLER, "PUT", "/models/m/grants/other", status=403)
        await ask(door, OPERATOR, "PUT", "/models/m/grants/other", status=404)  # the default tenant has no such model
        await ask(door, OPERATOR, "PUT", "/models/m/grants/other?tenant=acme")
        assert (await _actions(door))[0][:2] == ("operator", "model.granted")
        assert (await ask(door, OPERATOR, "GET", "/grants?tenant=other"))["had"] == [GRANT]
        await ask(door, OPERATOR, "GET", "/grants?tenant=nobody", status=404)
        assert await _grantees(door) == [("other",)]


async def test_what_can_be_granted(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing model can be granted to another existing tenant, up to a limit."""
    async with opened(data) as door:
        await _stage(door)
        for path, status, words in (
            ("/models/no/grants/other", 404, "no"),
            ("/models/m/grants/nobody", 404, "nobody"),
            ("/models/m/grants/acme", 400, "must be another tenant than the model's own"),
            ("/models/m/grants/No.Name", 400, "must be a DNS label"),
        ):
            assert words in (await ask(door, ACME, "PUT", path, status=status))["detail"]
        monkeypatch.setattr(grants, "MAX_GRANTEES", 1)
        await ask(door, ACME, "PUT", "/models/m/grants/other")
        full = await ask(door, ACME, "PUT", "/models/m/grants/default", status=507)
        assert "grants of a model" in full["detail"]
        await ask(door, ACME, "PUT", "/models/m/grants/other")  # an existing grant stays
        assert await _grantees(door) == [("other",)]


async def test_a_grant_goes_with_the_model(data: Path) -> None:
    """A new model of the same name has no grants."""
    async with opened(data) as door:
        await _stage(door)
        await ask(door, ACME, "PUT", "/models/m/grants/other")
        await ask(door, ACME, "DELETE", "/models/m?force=true")
        assert (await ask(door, OTHER, "GET", "/grants"))["had"] == []
        await push(door, tenant="acme")
        assert await _grantees(door) == [()]
    async with opened(data) as door:
        assert await _grantees(door) == [()]


async def test_a_grant_goes_with_either_tenant(data: Path) -> None:
    """Deleting the grantee is in the owner's audit. Deleting the owner deletes its models."""
    async with opened(data) as door:
        await _stage(door)
        await ask(door, OPERATOR, "POST", "/tenants", {"tenant": "third"}, status=201)
        for grantee in ("other", "third"):
            await ask(door, ACME, "PUT", f"/models/m/grants/{grantee}")
        await ask(door, OPERATOR, "DELETE", "/tenants/other", status=204)
        assert await _grantees(door) == [("third",)]
        assert (await _actions(door))[0] == ("operator", "model.revoked", "m", "from other, which was deleted")
    async with opened(data) as door:
        assert await _grantees(door) == [("third",)]
        await ask(door, OPERATOR, "DELETE", "/tenants/acme?force=true", status=204)
        assert await _grantees(door) == []
        assert (await ask(door, OPERATOR, "GET", "/grants?tenant=third"))["had"] == []


async def test_a_key_may_be_held_to_a_granted_model(data: Path) -> None:
    """The grant need not exist yet. The tenant's own name before a model is removed."""
    async with opened(data) as door:
        await _stage(door)
        body = {"name": "k", "scopes": ["infer"], "models": ["acme/m", "other/mine", "n"]}
        made = await ask(door, OTHER, "POST", "/keys", body, status=201)
        assert made["key"]["models"] == ["acme/m", "mine", "n"]
        bad = await ask(door, OTHER, "POST", "/keys", {**body, "models": ["a/b/c"]}, status=400)
        assert "'a/b/c': must be MODEL or OWNER/MODEL" in bad["detail"]
