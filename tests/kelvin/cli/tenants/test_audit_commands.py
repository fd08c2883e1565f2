"""`kelvin audit`: a broken chain gives exit code 2, and options are sent to the installation."""

import json

import pytest
from click.testing import CliRunner, Result

from kelvin.cli.tenants.audit_commands import audit_command, format_changes
from kelvin.contracts.accounting.audit_reports import AuditChain, AuditReport, AuditWindows
from tests.kelvin.cli_targets import Installation, installation_answering

HOLDS = AuditChain(tenant="", links=2, chain="c" * 64, expired=0)
BROKEN = AuditChain(tenant="acme", links=4, chain="d" * 64, expired=1, difference="link 5: an entry is missing")


def run(answer: object, *words: str) -> tuple[Result, Installation]:
    installation = installation_answering(answer)
    return CliRunner().invoke(audit_command, [*words], obj=installation), installation


def test_broken_audit_chain_exits_with_2() -> None:
    """A broken chain is printed with its first bad link, a sound one with its digest. The exit code is 0 if all
    hold."""
    result, installation = run(AuditReport(sound=False, chains=(HOLDS, BROKEN)), "verify", "--all")
    assert result.exit_code == 2
    assert f"(the installation): 2 entries hold, 0 of them expired, chain {'c' * 64}" in result.output
    assert "acme: link 5: an entry is missing" in result.output
    assert dict(installation.requests[0].url.params) == {"all": "true"}
    result, installation = run(AuditReport(sound=True, chains=(HOLDS,)), "verify", "--tenant", "")
    assert result.exit_code == 0
    assert dict(installation.requests[0].url.params) == {"tenant": ""}


def test_windows_are_set_by_name() -> None:
    """A window is set in days or reset to the installation's default. Invalid and repeated windows are refused before
    any request."""
    windows = AuditWindows(tenant="acme", days={"access": 0})
    result, installation = run(windows, "windows", "--set", "access=0", "--set", "keys=default", "--tenant", "acme")
    assert result.output == "access: 0 days\n"
    assert json.loads(installation.requests[0].content) == {"days": {"access": 0, "keys": None}}
    for wrong in (["access"], ["access=-1"], ["access=soon"], ["access=1", "access=2"], ["access=1", "access=default"]):
        result, installation = run(windows, "windows", *(word for each in wrong for word in ("--set", each)))
        assert (result.exit_code, installation.requests) == (2, [])
        assert "must be WINDOW=DAYS" in result.output


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        pytest.param({"rpm": [None, 5]}, "rpm none → 5", id="a number that was not set"),
        pytest.param({"prod": ["a" * 64, "b" * 64]}, "prod aaaaaaaaaaaa… → bbbbbbbbbbbb…", id="digests are cut"),
        pytest.param({"split": [{}, {"x": 1}]}, 'split {} → {"x": 1}', id="a split"),
    ],
)
def test_changes_are_formatted_in_a_line(fields: dict[str, object], want: str) -> None:
    assert format_changes(fields) == want
