"""A NUL character in a request is refused by every route, on both databases."""

from pathlib import Path
from typing import Any

import pytest

from controlplane.db.nul_characters import RULE, check_json
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.wire import encode
from tests.controlplane.builders import registration
from tests.controlplane.control_plane_server import ADMIN, push, running_control_plane
from tests.controlplane.database_backends import DatabaseBackend
from tests.controlplane.route_list import admin_routes
from tests.controlplane.usage_records import request_record

NUL = "a\0b"
BODIES: list[tuple[str, str, Any]] = [
    ("POST", "/admin/v1/tenants", {"tenant": NUL}),
    ("POST", "/admin/v1/keys", {"name": NUL, "scopes": ["infer"]}),
    ("POST", "/admin/v1/keys", {"name": "n", "scopes": ["infer"], "models": [NUL]}),
    ("POST", "/admin/v1/models/m/deploy", {"version": NUL}),
    ("PUT", "/admin/v1/models/m/split", {"weights": {NUL: 100}}),
    ("POST", "/admin/v1/billing/close", {"tenant": NUL, "month": "2026-01"}),
    ("PUT", "/admin/v1/audit/windows", {"tenant": NUL, "days": {}}),
    ("POST", "/internal/v1/keys/uses", {"used_at_s": {NUL: 1}}),
]


async def test_nul_in_a_path_or_query(backend: DatabaseBackend, data: Path) -> None:
    """Each name in a path of an admin route is tested, and queries and internal routes, too."""
    async with running_control_plane(data) as client:
        await push(client)
        paths = [(method, f"/admin/v1{path}") for method, path in sorted(admin_routes())]
        named = [(method, path.replace("{", "%00{")) for method, path in paths if "{" in path]
        asked = [(method, f"{path}?{name}=a%00b") for method, path in paths for name in ("tenant", "month")]
        internal = [
            ("GET", "/internal/v1/requests/a%00b/timeline?tenant=default"),
            ("GET", "/internal/v1/requests/a/timeline?tenant=a%00b"),
            ("GET", "/internal/v1/versions?tenant=a%00b"),
            ("GET", "/internal/v1/tenants/a%00b/limits"),
        ]
        for method, path in (*named, *asked, *internal):
            status, problem = await client.request(method, path.replace("{", "").replace("}", ""), {}, ADMIN)
            assert (status, problem["code"]) == (400, "invalid_request"), path
            assert RULE in problem["detail"]


async def test_nul_in_a_body(backend: DatabaseBackend, data: Path) -> None:
    """Bodies with a NUL are refused. A usage record's sender cannot correct it, so the record is set aside."""
    async with running_control_plane(data) as client:
        await push(client)
        bodies = [(method, path, encode(body)) for method, path, body in BODIES]
        bodies.append(("POST", "/internal/v1/versions", encode(registration()).replace(b'"m"', b'"m\\u0000"')))
        for method, path, body in bodies:
            status, problem = await client.request(method, path, body, ADMIN)
            assert (status, problem["code"]) == (400, "invalid_request"), path
            assert RULE in problem["detail"], path
        record = encode({"records": [request_record(1)]}).replace(b'"req-1"', b'"req\\u0000"')
        assert (await client.request("POST", "/internal/v1/usage/requests", record))[0] == 204


@pytest.mark.parametrize(
    ("raw", "has_nul"),
    [
        pytest.param(rb'"a\u0000b"', True, id="an escaped NUL"),
        pytest.param(rb'"a\\u0000b"', False, id="an escaped backslash and text"),
        pytest.param(rb'"a\\\u0000b"', True, id="an escaped backslash and a NUL"),
        pytest.param(rb'{"\u0000": 1}', True, id="in a key"),
        pytest.param(rb'"a\u00001"', True, id="digits behind it are text"),
        pytest.param(rb'"a\u0001"', False, id="another control character"),
    ],
)
def test_json_with_a_nul_is_refused(raw: bytes, has_nul: bool) -> None:
    """Only a NUL itself is refused, not a text that looks like one."""
    if not has_nul:
        check_json(raw)
        return
    with pytest.raises(Refused) as refused:
        check_json(raw)
    assert refused.value.failure == InvalidRequest("body", "(\\u0000)", RULE)
