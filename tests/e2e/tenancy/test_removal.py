"""Models and tenants are deleted, and tenants get limits, by command line."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldstart_bench.harness.installation import Installation
from tests.e2e.commands import run
from tests.e2e.https_client import complete
from tests.e2e.installation_state import is_recorded
from tests.e2e.tenants import Tenant, make_tenant
from tests.e2e.tiny_models import make_tiny

pytestmark = pytest.mark.deep


@pytest.fixture
def charlie(kelvin: Installation, tmp_path: Path) -> Iterator[Tenant]:
    """A new tenant, deleted afterwards."""
    tenant = make_tenant(kelvin, f"charlie-{time.time_ns()}", tmp_path)
    yield tenant
    if tenant.name in run(kelvin, "tenants", "list", "--json"):
        run(kelvin, "tenants", "delete", tenant.name, "--force")


def test_a_model_from_push_to_end(kelvin: Installation, charlie: Tenant, tmp_path: Path) -> None:
    """A named model is deleted only by force. Its bytes can be collected, its bill stays, a new push works."""
    directory = make_tiny(tmp_path / "m", "llama", seed=31)
    charlie.run("push", str(directory), "--name", "m")
    assert charlie.complete().status == 200
    refused = charlie.run("models", "delete", "m", code=1)
    assert "the alias 'prod' names a version of it" in refused
    assert "deleted m, 1 versions" in charlie.run("models", "delete", "m", "--force")
    assert charlie.complete().status == 404
    assert json.loads(charlie.run("models", "--json")) == {"models": []}
    assert "model.deleted" in charlie.run("audit", "list")
    collection = json.loads(charlie.run("collect", "--dry-run", "--json"))
    assert len(collection["condemned"]) == 1
    month = time.strftime("%Y-%m", time.gmtime())
    words = ("billing", "report", "--tenant", charlie.name, "--month", month, "--format", "json")
    kelvin.wait(lambda: json.loads(charlie.run(*words))["requests"].get("ok", 0) == 1, "its request is billed")
    charlie.run("push", str(directory), "--name", "m")
    assert charlie.complete().status == 200


def test_deleted_tenant_takes_keys_and_models_along(kelvin: Installation, charlie: Tenant, tmp_path: Path) -> None:
    """A deleted tenant's keys stop at once, and an operator frees its bytes. Others serve on, and its record stays."""
    charlie.run("push", str(make_tiny(tmp_path / "m", "llama", seed=32)), "--name", "m")
    answered = charlie.complete()
    assert answered.status == 200
    assert "is not empty: models m" in run(kelvin, "tenants", "delete", charlie.name, code=1)
    assert f"--tenant {charlie.name}" in run(kelvin, "tenants", "delete", charlie.name, "--force")
    assert charlie.complete().status == 401
    assert charlie.name not in run(kelvin, "tenants", "list")
    assert "is not given again" in run(kelvin, "tenants", "create", charlie.name, code=1)
    collection = json.loads(run(kelvin, "collect", "--run", "--tenant", charlie.name, "--json"))
    assert len(collection["condemned"]) == 1
    assert complete(kelvin, "llama", "w1", max_tokens=1).status == 200
    kelvin.wait(lambda: is_recorded(kelvin, answered.headers["x-request-id"]), "its request is in the ledger")


def test_limits_of_a_tenant(kelvin: Installation, charlie: Tenant, tmp_path: Path) -> None:
    """Limits are set, shown and enforced: store bytes at the push, the others for requests."""
    assert "must be 'default' or a whole number from 1 to " in run(
        kelvin, "tenants", "set", charlie.name, "--requests", "0", code=2
    )
    said = run(kelvin, "tenants", "set", charlie.name, "--store-bytes", "1000", "--body-bytes", "2048")
    assert said.startswith(f"{charlie.name}: store_bytes 1000, requests default, body_bytes 2048, rpm default")
    directory = make_tiny(tmp_path / "m", "llama", seed=33)
    assert "the limit is 1000" in charlie.run("push", str(directory), "--name", "m", code=4)
    run(kelvin, "tenants", "set", charlie.name, "--store-bytes", "default", "--requests", "4", "--output-tokens", "5")
    run(kelvin, "tenants", "set", charlie.name, "--weight", "4", "--priority", "standard", "--plan", "pro")
    run(kelvin, "tenants", "set", charlie.name, "--deadline-max-s", "100")
    charlie.run("push", str(directory), "--name", "m")
    (row,) = json.loads(charlie.run("tenants", "list", "--json"))["tenants"]
    limits = {name: value for name, value in row["limits"].items() if value is not None}
    given = {"weight": 4, "priority": "standard", "plan": "pro", "deadline_max_s": 100}
    assert limits == {"requests": 4, "body_bytes": 2048, "output_tokens": 5, **given}
    assert "2048" in charlie.run("tenants", "list")
    assert charlie.complete(prompt="w1 " * 2000).status == 413
    assert "your tenant allows at most 5" in charlie.complete(max_tokens=6).raw.decode()
    run(kelvin, "tenants", "set", charlie.name, "--context-tokens", "3", "--rpm", "60")
    assert "your tenant allows at most 2" in charlie.complete(prompt="w1 w2 w3 w4", max_tokens=1).raw.decode()
    answered = charlie.complete(max_tokens=1)
    assert (answered.status, answered.headers["x-ratelimit-limit-requests"]) == (200, "60")
    run(kelvin, "tenants", "set", charlie.name, "--budget-micros", "0", "--rpm", "default")
    assert (charlie.complete().status, "insufficient_quota" in charlie.complete().raw.decode()) == (429, True)
    assert "tenant.limited" in charlie.run("audit", "list")
    assert "operator" in charlie.run("tenants", "set", charlie.name, "--requests", "9", code=1)
