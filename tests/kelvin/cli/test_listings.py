"""CLI listings without a terminal: each row is one line with whole cells, whatever `COLUMNS` says."""

import time
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from kelvin.cli.models.model_commands import grants_command, models_command, status_command
from kelvin.cli.models.version_commands import versions_command
from kelvin.cli.tenants.audit_commands import audit_command
from kelvin.cli.tenants.billing_commands import billing_command
from kelvin.cli.tenants.key_commands import keys_command
from kelvin.cli.tenants.tenant_commands import tenants_command
from tests.kelvin.cli.tenants.test_billing_commands import GOOD
from tests.kelvin.cli_targets import installation_answering

LONG = "a-name-of-thirty-or-more-characters"
MODEL = {
    "model": LONG, "aliases": {"prod": "a" * 64}, "versions": [], "state": "restoring", "replicas": 2,
    "scale": {"min": 1, "max": 12}, "split": {}, "grantees": ["b"], "last_restore": None,
}  # fmt: skip
STATUS = {
    "processes": [{"name": f"{LONG}-{LONG}-{LONG}", "healthy": True, "ready": False}],
    "device": None, "pools": [], "pending": [], "models": [MODEL],
}  # fmt: skip
KEY = {
    "key_id": "key_06gvi8bhshcsc57af1k1gbef9o", "name": LONG, "state": "good", "scopes": ["inference", "admin"],
    "models": ["m"], "created_at_s": 1_700_000_000, "expires_at_s": None, "last_used_at_s": None,
}  # fmt: skip
VERSION = {
    "version": "a" * 64, "aliases": [LONG, "prod"], "health": "good", "state": "ready",
    "architecture": "LlamaForCausalLM", "total_bytes": 1_500_000, "created_at_s": 1_700_000_000,
}  # fmt: skip
TENANT = {
    "tenant": LONG, "state": "active", "models": 3, "keys": 12, "created_at_s": 1_700_000_000,
    "limits": {"requests_per_minute_and_model": 1200},
}  # fmt: skip
EVENT = {
    "link": 7, "at_s": 1_700_000_000, "actor": KEY["key_id"], "action": "keys.create", "subject": LONG,
    "expired": False, "window": "keys", "detail": "made by the operator", "changed": {},
}  # fmt: skip
OPEN = tuple(f"rt-{number}-{LONG}" for number in range(4))
BILL = msgspec.structs.replace(
    GOOD, lines=tuple(msgspec.structs.replace(line, model=f"{LONG}-{LONG}") for line in GOOD.lines), open_runtimes=OPEN
)


@pytest.mark.parametrize(
    ("command", "words", "answer", "cells"),
    [
        pytest.param(keys_command, ["list"], {"keys": [KEY]}, [KEY["key_id"], LONG, "inference admin"], id="keys"),
        pytest.param(status_command, [], STATUS, [f"{LONG}-{LONG}-{LONG}", "yes", "NO"], id="status, processes"),
        pytest.param(status_command, [], STATUS, [LONG, "a" * 12, "restoring", "1-12"], id="status, models"),
        pytest.param(models_command, [], {"models": [MODEL]}, [LONG, "restoring", "1-12"], id="models"),
        pytest.param(
            versions_command, ["list", "m"], {"versions": [VERSION]}, ["a" * 12, f"{LONG}, prod", "1.5"], id="versions"
        ),
        pytest.param(
            tenants_command, ["list"], {"tenants": [TENANT]}, [LONG, "requests_per_minute_and_model 1200"], id="tenants"
        ),
        pytest.param(
            grants_command, [], {"given": [{"owner": "o", "model": LONG, "grantee": f"{LONG}-2"}], "had": []},
            [f"o/{LONG}", f"{LONG}-2"], id="grants",
        ),
        pytest.param(
            audit_command, ["list"], {"events": [EVENT]}, [KEY["key_id"], LONG, "made by the operator"], id="audit"
        ),
        pytest.param(
            billing_command, ["report"], BILL, [f"{LONG}-{LONG}", "completion tokens", "17", "0.000051"], id="billing"
        ),
        pytest.param(billing_command, ["report"], BILL, OPEN, id="billing, open replicas"),
    ],
)  # fmt: skip
def test_row_in_a_pipe_is_one_line(command: click.Command, words: list[str], answer: Any, cells: list[str]) -> None:
    """`grep` finds the row, and the ids in it can be used."""
    result = CliRunner().invoke(command, words, obj=installation_answering(answer), env={"COLUMNS": "40"})
    assert result.exit_code == 0, result.output
    assert "\N{HORIZONTAL ELLIPSIS}" not in result.output
    assert [line for line in result.output.splitlines() if all(cell in line for cell in cells)], result.output


def test_versions_were_pushed_at_a_time_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are in UTC as in every other listing, whatever the terminal's time zone."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        result = CliRunner().invoke(
            versions_command, ["list", "m"], obj=installation_answering({"versions": [VERSION]})
        )
    finally:
        monkeypatch.undo()
        time.tzset()
    assert "versions of m, UTC" in result.output
    assert "2023-11-14 22:13:20" in result.output
