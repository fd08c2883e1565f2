"""Permissions of all admin routes, and separation of tenants."""

import errno
import json
import os
from pathlib import Path

import pytest

from tests.controlplane.control_plane_server import ADMIN, push, running_control_plane
from tests.controlplane.route_list import admin_calls


@pytest.mark.parametrize(
    ("principal", "status", "code"),
    [
        pytest.param(None, 401, "invalid_api_key", id="no principal"),
        pytest.param({"key_id": "k", "tenant": "default", "scopes": ["infer"]}, 403, "insufficient_scope", id="a user"),
        pytest.param({"key_id": "k", "tenant": "default"}, 400, "invalid_request", id="a header that does not decode"),
    ],
)
async def test_every_admin_route_requires_the_scope(data: Path, principal: object, status: int, code: str) -> None:
    """Without the scope `admin`, every route refuses to show or change anything."""
    headers = {} if principal is None else {"x-kelvin-principal": json.dumps(principal)}
    calls = admin_calls()
    assert {("GET", "/status"), ("DELETE", "/tenants/default"), ("POST", "/audit/expire")} <= {*calls}
    async with running_control_plane(data) as client:
        for method, path in calls:
            got, problem = await client.request(method, f"/admin/v1{path}", {}, headers)
            assert (path, got, problem["code"]) == (path, status, code)


async def test_status_shows_disk_space_to_operators(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk refuses pushes and then requests while every process is ready. A failing `statvfs` hides no other
    status.
    """

    def fail(path: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async with running_control_plane(data) as client:
        status, found = await client.request("GET", "/admin/v1/status", None, ADMIN)
        assert status == 200
        assert 0 < found["disk"]["free_bytes"] < found["disk"]["total_bytes"]
        monkeypatch.setattr(os, "statvfs", fail)
        status, found = await client.request("GET", "/admin/v1/status", None, ADMIN)
        assert (status, found["disk"]) == (200, None)
        assert found["processes"]


async def test_tenants_do_not_see_each_other(data: Path) -> None:
    """Another tenant's administrator sees no models, and gets the same answer as for a missing one."""
    other = {"x-kelvin-principal": json.dumps({"key_id": "k", "tenant": "other", "scopes": ["admin"]})}
    async with running_control_plane(data) as client:
        await push(client)
        assert (await client.request("GET", "/admin/v1/models", None, other))[1] == {"models": []}
        hidden: dict[str, object] = {
            "processes": [], "cache": None, "device": None, "models": [], "pending": [], "pools": [],
            "replica_exits": None, "disk": None,
        }  # fmt: skip
        assert await client.request("GET", "/admin/v1/status", None, other) == (200, hidden)
        assert (await client.request("GET", "/admin/v1/cache", None, other))[0] == 403
        assert (await client.request("POST", "/admin/v1/cache/check", None, other))[0] == 403
        for method, path in (
            ("GET", ""),
            ("DELETE", ""),
            ("DELETE", "?force=true"),
            ("POST", "/stop"),
            ("PUT", "/scale"),
            ("POST", "/deploy"),
        ):
            body = {"version": "a" * 12} if path == "/deploy" else {}
            status, problem = await client.request(method, f"/admin/v1/models/m{path}", body, other)
            assert (status, problem["detail"]) == (404, "the model 'm' does not exist")
