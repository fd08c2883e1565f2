"""Tenants and keys by command line, from a tenant's first key to its deletion."""

import json
from pathlib import Path

import pytest

from coldstart_bench.harness.installation import Installation
from tests.e2e.commands import run
from tests.e2e.https_client import ask


def _ask(kelvin: Installation, key: Path, path: str = "/v1/models") -> tuple[int, bytes]:
    """Return status and body of a call with the key."""
    answer = ask(kelvin, "GET", path, key)
    return answer.status, answer.raw


@pytest.mark.deep
def test_a_tenant_from_its_first_key_to_its_end(kelvin: Installation, tmp_path: Path) -> None:
    """An operator creates a tenant, its admin creates, rotates and revokes keys, and all is deleted."""
    admin, app = tmp_path / "admin.key", tmp_path / "app.key"
    run(kelvin, "tenants", "create", "bravo")
    run(kelvin, "keys", "create", "boss", "--tenant", "bravo", "--scope", "admin", "--output", str(admin))
    own = ("--key", str(admin))
    secret = run(kelvin, "keys", "create", "app", "--scope", "infer", "--model", "m", "--expires", "1d", *own)
    app.write_text(secret)
    assert len(secret.strip().splitlines()) == 1
    assert _ask(kelvin, app) == (200, b'{"data":[],"object":"list"}')
    found = json.loads(run(kelvin, "keys", "list", "--json", *own))["keys"]
    assert sorted((key["name"], key["models"], key["state"]) for key in found) == [
        ("app", ["m"], "active"),
        ("boss", [], "active"),
    ]
    key_id = secret.split("-")[1]
    run(kelvin, "keys", "rotate", key_id, "--overlap", "1h", "--output", str(tmp_path / "next.key"), *own)
    assert [_ask(kelvin, key)[0] for key in (app, tmp_path / "next.key")] == [200, 200]
    assert "revoked" in run(kelvin, "keys", "revoke", key_id, *own)
    assert [_ask(kelvin, key)[0] for key in (app, tmp_path / "next.key")] == [401, 200]
    trail = run(kelvin, "audit", "list", *own)
    for what in ("operator", "tenant.created", "key.created", "key.rotated", "key.revoked", key_id):
        assert what in trail
    assert "tenant.created" in run(kelvin, "audit", "list", "--tenant", "bravo")  # this read is recorded
    assert "access.audit" in run(kelvin, "audit", "list", *own)
    assert "access: 0 days" in run(kelvin, "audit", "windows", "--tenant", "bravo", "--set", "access=0")
    assert "bravo: 1 entries expired" in run(kelvin, "audit", "expire", "--tenant", "bravo")
    assert "1 of them expired" in run(kelvin, "audit", "verify", *own)
    assert "(the installation): " in run(kelvin, "audit", "verify", "--all")
    assert "prices.changed" in run(kelvin, "audit", "list", "--tenant", "")
    run(kelvin, "tenants", "suspend", "bravo")
    assert _ask(kelvin, tmp_path / "next.key")[0] == 403
    assert "suspended" in run(kelvin, "tenants", "list")
    run(kelvin, "tenants", "resume", "bravo")
    assert _ask(kelvin, tmp_path / "next.key")[0] == 200
    assert "is not empty: keys" in run(kelvin, "tenants", "delete", "bravo", code=1)
    for key in (tmp_path / "next.key", admin):
        path = f"/admin/v1/keys/{key.read_text().split('-')[1]}/revoke?tenant=bravo"
        kelvin.admin.request("POST", path)
    run(kelvin, "tenants", "delete", "bravo")
    assert "bravo" not in run(kelvin, "tenants", "list")
    assert _ask(kelvin, admin, "/admin/v1/models")[0] == 401
