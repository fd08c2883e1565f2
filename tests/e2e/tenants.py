"""Tenants of an installation, each with an admin key and an inference key."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldstart_bench.harness.installation import Installation, run_command
from tests.e2e.commands import run
from tests.e2e.https_client import Answer, ask
from tests.eventually import wait


@dataclass(frozen=True)
class Tenant:
    """A tenant with its two keys."""

    up: Installation
    name: str
    admin: Path
    infer: Path

    def kelvin(self, *words: str) -> tuple[int, str, str]:
        """Run a command with the admin's key as a process, so that threads can call it."""
        return run_command(self.up.data, *words, "--key", str(self.admin))

    def run(self, *words: str, code: int = 0) -> str:
        """Run a command in this process. It must exit with `code`. Return its output, or its errors if it fails."""
        return run(self.up, *words, "--key", str(self.admin), code=code)

    def push(self, directory: Path, model: str = "m") -> dict[str, Any]:
        """Push a model. Return the command's JSON, also of a refusal, with the exit code."""
        code, out, err = self.kelvin("push", str(directory), "--name", model, "--json")
        assert "Traceback" not in err, err
        found: dict[str, Any] = json.loads(out)
        return found | {"exit": code}

    def complete(self, prompt: str = "w1", model: str = "m", **fields: object) -> Answer:
        """Request a completion of two tokens by default."""
        body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
        return self.post("/v1/completions", body)

    def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> Answer:
        """POST JSON with the inference key."""
        return ask(self.up, "POST", path, self.infer, body, headers)

    def report(self) -> Any:
        """Return this month's bill."""
        month = time.strftime("%Y-%m", time.gmtime())
        answer = ask(self.up, "GET", f"/admin/v1/billing/report?tenant={self.name}&month={month}", self.admin)
        assert answer.status == 200, answer.raw
        return answer.json


def make_tenant(up: Installation, name: str, keys: Path, *limits: str) -> Tenant:
    """Create a tenant with two key files and with limits (options of `kelvin tenants set`).
    Waits for the control plane, which an earlier test may have killed."""
    wait(lambda: ask(up, "GET", "/admin/v1/status", up.data / "admin.key").status == 200, "the control plane answers")
    answer = ask(up, "POST", "/admin/v1/tenants", up.data / "admin.key", {"tenant": name})
    assert answer.status == 201, answer.raw
    made = Tenant(up, name, keys / f"{name}-admin.key", keys / f"{name}-infer.key")
    for path, scope in ((made.admin, "admin"), (made.infer, "infer")):
        body = {"name": scope, "scopes": [scope]}
        answer = ask(up, "POST", f"/admin/v1/keys?tenant={name}", up.data / "admin.key", body)
        assert answer.status == 201, answer.raw
        path.write_text(answer.json["secret"])
    if limits:
        run(up, "tenants", "set", name, *limits)
    return made


def default_tenant(up: Installation) -> Tenant:
    """Return the default tenant, whose admin is the operator."""
    return Tenant(up, "default", up.data / "admin.key", up.data / "default.key")
