"""A model is granted, called, billed and revoked by command line and HTTPS."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldstart_bench.harness.installation import Installation
from tests.e2e.commands import run
from tests.e2e.tenants import Tenant, make_tenant
from tests.e2e.tiny_models import make_tiny

pytestmark = pytest.mark.deep


@pytest.fixture
def pair(kelvin: Installation, tmp_path: Path) -> Iterator[tuple[Tenant, Tenant]]:
    """An owner with a model, and another tenant. Both are deleted afterwards."""
    owner, guest = (make_tenant(kelvin, f"{name}-{time.time_ns()}", tmp_path) for name in ("owner", "guest"))
    owner.run("push", str(make_tiny(tmp_path / "m", "llama", seed=41)), "--name", "m")
    yield owner, guest
    for tenant in (owner, guest):
        run(kelvin, "tenants", "delete", tenant.name, "--force")


def test_a_grant_from_outside(kelvin: Installation, pair: tuple[Tenant, Tenant]) -> None:
    """A guest can call the model only while granted. Each tenant pays its part, and no prompt cache is shared."""
    owner, guest = pair
    theirs = f"{owner.name}/m"
    prompt = "w1 w2 w3 " * 20
    refused = guest.complete(model=theirs)
    assert refused.status == 404
    assert owner.run("models", "grant", "m", guest.name) == f"{guest.name} may call {theirs}\n"
    assert "must be another tenant" in owner.run("models", "grant", "m", owner.name, code=1)
    assert json.loads(owner.run("models", "--json"))["models"][0]["grantees"] == [guest.name]
    assert json.loads(guest.run("models", "grants", "--json"))["had"][0]["owner"] == owner.name
    assert theirs in guest.run("models", "grants")
    own = owner.complete(prompt=prompt)
    answered = guest.complete(model=theirs, prompt=prompt)
    assert (own.status, answered.status) == (200, 200)
    assert answered.json["choices"] == own.json["choices"]
    assert answered.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert guest.run("models", "delete", "m", code=1)  # a grant allows calls only
    owner.run("models", "revoke", "m", guest.name)
    kelvin.wait(lambda: guest.complete(model=theirs).status == 404, "the grant is gone")
    assert guest.complete(model=theirs).json["error"]["code"] == refused.json["error"]["code"]
    assert "does not exist" in owner.run("models", "revoke", "m", guest.name, code=1)
    owner.run("stop", "m")

    def billed(tenant: Tenant) -> dict[str, int]:
        month = time.strftime("%Y-%m", time.gmtime())
        words = ("billing", "report", "--tenant", tenant.name, "--month", month, "--format", "json")
        report = json.loads(tenant.run(*words))
        lines = [line for line in report["lines"] if line["model"] != (theirs if tenant is guest else "m")]
        assert lines == []
        return {**report["requests"], "lifetimes": sum(each["lifetimes"] for each in report["device"])}

    kelvin.wait(lambda: billed(owner) == {"ok": 1, "lifetimes": 1}, "the owner's request and its replica are billed")
    kelvin.wait(lambda: billed(guest) == {"ok": 1, "lifetimes": 0}, "the guest's request is")
    for tenant in pair:
        report = json.loads(tenant.run("billing", "reconcile", "--tenant", tenant.name, "--json"))
        assert report["differences"] == []
    assert "model.granted" in owner.run("audit", "list")
