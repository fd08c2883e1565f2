"""`kelvin billing report` prints the bill in three formats and fails if the ledger doesn't balance."""

import csv
import io
import json
import re

import msgspec
import pytest
from click.testing import CliRunner, Result

from kelvin.cli.tenants.billing_commands import CSV_COLUMNS, billing_command, format_money
from kelvin.contracts.accounting.billing_reports import Balance, BillingReport, BillLine, DeviceUse, Imbalance
from kelvin.contracts.wire import encode
from tests.kelvin.cli_targets import Installation, installation_answering

HOLE = Imbalance(
    kind="sequence_hole", subject="activator-1", detail="record 3 of this source never arrived; record 4 did"
)
GOOD = BillingReport(
    tenant="acme",
    month="2026-11",
    currency="EUR",
    requests={"ok": 1200, "overloaded": 1},
    prompt_tokens=1030,
    cached_tokens=12,
    completion_tokens=17,
    device=(DeviceUse(device_class="cpu-2", lifetimes=1, restore_us=250_000, active_us=2_000_000, idle_us=0),),
    lines=(
        BillLine(
            item="completion_tokens", model="m", device_class=None, since="2026-01-01", quantity=17, unit="token",
            price_micros=3_000_000, per=1_000_000, amount_micros=51,
        ),
        BillLine(
            item="device_active", model="m", device_class="cpu-2", since="2026-01-01", quantity=2_000_000,
            unit="device_us", price_micros=40, per=1_000_000, amount_micros=80,
        ),
    ),
    total_micros=131,
    open_runtimes=("rt-9",),
    balance=Balance(balanced=True, lifetimes=1, sources=2, problems=()),
    degraded={"fallback": 3, "cap-output": 41},
)  # fmt: skip
BAD = msgspec.structs.replace(GOOD, balance=Balance(balanced=False, lifetimes=1, sources=2, problems=(HOLE,), more=4))


def run(report: BillingReport, *arguments: str) -> tuple[Result, Installation]:
    installation = installation_answering(report)
    result = CliRunner().invoke(billing_command, ["report", *arguments], obj=installation, env={"COLUMNS": "160"})
    return result, installation


def test_billing_sends_tenant_and_month() -> None:
    """Both are sent as query parameters."""
    _, installation = run(GOOD, "--tenant", "acme", "--month", "2026-11")
    url = installation.requests[0].url
    assert len(installation.requests) == 1
    assert url.path == "/admin/v1/billing/report"
    assert dict(url.params) == {"tenant": "acme", "month": "2026-11"}


def test_the_month_is_the_current_one_by_default() -> None:
    """No tenant is sent, which means the key's own."""
    _, installation = run(GOOD)
    params = dict(installation.requests[0].url.params)
    assert "tenant" not in params
    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}", params["month"])


def test_billing_table_groups_digits_and_names_currency() -> None:
    """Thousands are grouped, money has its currency, and the verdict is printed."""
    result, _ = run(GOOD)
    assert result.exit_code == 0
    for text in ("requests, ok", "1,200", "1,030", "cpu-2", "0.250", "2.000", "0.000051", "0.000131", "EUR", "rt-9"):
        assert text in result.output
    assert re.search("less than asked, cap-output .*41 ", result.output)
    assert "ledger: balanced; 1 replicas, 2 sources compared" in result.output


@pytest.mark.parametrize("form", ["table", "csv"])
def test_bill_of_an_older_program_shows_no_degraded_requests(form: str) -> None:
    """A month closed before degraded requests were counted has no such rows."""
    result, _ = run(msgspec.structs.replace(GOOD, degraded=msgspec.UNSET), "--format", form)
    assert result.exit_code == 0
    assert "cap-output" not in result.output


def test_json_output_is_the_unchanged_response() -> None:
    """The response is printed unchanged."""
    result, _ = run(GOOD, "--format", "json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, json.loads(encode(GOOD)))


def test_csv_has_one_row_per_figure() -> None:
    """The table has named columns, and all numbers are integers."""
    result, _ = run(GOOD, "--format", "csv")
    assert result.exit_code == 0
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert [(row["section"], row["item"], row["quantity"]) for row in rows if row["section"] != "line"] == [
        ("requests", "ok", "1200"),
        ("requests", "overloaded", "1"),
        ("degraded", "cap-output", "41"),
        ("degraded", "fallback", "3"),
        ("tokens", "prompt_tokens", "1030"),
        ("tokens", "cached_tokens", "12"),
        ("tokens", "completion_tokens", "17"),
        ("device", "restore", "250000"),
        ("device", "active", "2000000"),
        ("device", "idle", "0"),
        ("total", "EUR", ""),
    ]
    lines = [row for row in rows if row["section"] == "line"]
    assert [(row["item"], row["device_class"], row["amount_micros"]) for row in lines] == [
        ("completion_tokens", "", "51"),
        ("device_active", "cpu-2", "80"),
    ]
    assert rows[-1]["amount_micros"] == "131"


@pytest.mark.parametrize("form", ["table", "csv", "json"])
def test_an_unbalanced_ledger_is_exit_code_2(form: str) -> None:
    """In every format the bill is on standard output and the missing record on standard error."""
    result, _ = run(BAD, "--format", form)
    assert result.exit_code == 2
    assert "the ledger of acme does not balance for 2026-11" in result.stderr
    assert "sequence_hole: activator-1: record 3 of this source never arrived" in result.stderr
    assert "and 4 more problems" in result.stderr
    assert "17" in result.stdout


@pytest.mark.parametrize(
    ("micros", "want"),
    [
        pytest.param(0, "0.00", id="nothing"),
        pytest.param(1, "0.000001", id="the least"),
        pytest.param(1_500_000, "1.50", id="two decimals at least"),
        pytest.param(123_456_789_012, "123,456.789012", id="all decimals where they are needed"),
        pytest.param(5_000_000_000, "5,000.00", id="thousands are grouped"),
    ],
)
def test_money_is_exact(micros: int, want: str) -> None:
    assert format_money(micros) == want
