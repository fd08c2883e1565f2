"""`kelvin billing reconcile` names each planted difference, and agrees without one."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from coldstart_bench.harness.installation import Installation
from kelvin.spool.spool import Spool
from tests.e2e.https_client import complete, post
from tests.e2e.installation_state import change, is_recorded, reconciled, rows

pytestmark = pytest.mark.deep


@dataclass(frozen=True)
class Planted:
    """A change of the database, its undo, and the expected difference. `:life` is a replica, `:request` one of its
    requests."""

    do: str
    undo: str
    kind: str
    figure: str = ""  # a figure of the difference, and its expected value
    is_: int | None = None
    fails: bool = True


LIFE = "UPDATE ledger_lifetimes SET {} WHERE runtime_id = :life"
PLANTED = [
    pytest.param(
        Planted(LIFE.format("requests = requests + 3"), LIFE.format("requests = requests - 3"), "requests_missing",
                "requests", 3),
        id="three requests that no record names",
    ),
    pytest.param(
        Planted(LIFE.format("requests = requests - 1"), LIFE.format("requests = requests + 1"), "requests_extra",
                "requests", 1),
        id="an answer that its replica did not give",
    ),
    pytest.param(
        Planted(LIFE.format("total_us = total_us + 3600000000"), LIFE.format("total_us = total_us - 3600000000"),
                "time_unaccounted"),
        id="an hour that no record accounts for",
    ),
    pytest.param(
        Planted("UPDATE ledger_runtime_totals SET device_us = device_us + 90000000 WHERE runtime_id = :life",
                "UPDATE ledger_runtime_totals SET device_us = device_us - 90000000 WHERE runtime_id = :life",
                "device_time_over"),
        id="more device time than there was",
    ),
    pytest.param(
        Planted("UPDATE ledger_runtime_totals SET requests = requests + 2 WHERE runtime_id = :life",
                "UPDATE ledger_runtime_totals SET requests = requests - 2 WHERE runtime_id = :life", "total_wrong",
                "requests", 2),
        id="a replica's total",
    ),
    pytest.param(
        Planted("INSERT INTO ledger_runtime_totals SELECT 'ghost', tenant, 1, 1, 5, first_at_us - 600000000, "
                "first_at_us - 600000000, owner FROM ledger_runtime_totals WHERE runtime_id = :life",
                "DELETE FROM ledger_runtime_totals WHERE runtime_id = 'ghost'", "lifetime_missing"),
        id="a replica without a life",
    ),
    pytest.param(
        Planted("UPDATE ledger_received SET last = last + 5 WHERE source = :source; "
                "INSERT INTO ledger_received SELECT source, last + 4, last + 9 FROM ledger_received "
                "WHERE source = :source; UPDATE ledger_received SET last = last - 5 WHERE source = :source "
                "AND first = 1",
                "DELETE FROM ledger_received WHERE source = :source AND first != 1", "sequence_hole", "requests", 8),
        id="eight records that never arrived",
    ),
    pytest.param(
        Planted("INSERT INTO ledger_conflicts SELECT 'd', tenant, 'x', ended_at_us, 'a reason', '{}', month, 0, '' "
                "FROM ledger_requests WHERE request_id = :request",
                "DELETE FROM ledger_conflicts WHERE digest = 'd'", "conflict", "amount_micros", None),
        id="a record that was kept aside",
    ),
    pytest.param(
        Planted("UPDATE ledger_device_totals SET active_us = active_us + 1000000 WHERE rowid = (SELECT "
                "MIN(rowid) FROM ledger_device_totals WHERE tenant = 'default')",
                "UPDATE ledger_device_totals SET active_us = active_us - 1000000 WHERE rowid = (SELECT "
                "MIN(rowid) FROM ledger_device_totals WHERE tenant = 'default')", "total_wrong",
                "device_us", 1_000_000),
        id="a total of device time",
    ),
    pytest.param(
        Planted("UPDATE ledger_requests SET origin = 'orphan', orphan_of = runtime_id WHERE request_id = :request",
                "UPDATE ledger_requests SET origin = 'activator', orphan_of = '' WHERE request_id = :request",
                "charged_by_receipt", "tokens", 64, fails=False),
        id="a request that is charged by its last acknowledgement",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def named(kelvin: Installation) -> dict[str, str]:
    """The ids of an ended replica, of its request, and of the source of the request's record."""
    kelvin.scale_to_zero("llama")  # the next replica serves only this request
    request = complete(kelvin, "llama", "w1 w2", max_tokens=3).headers["x-request-id"]
    kelvin.wait(lambda: is_recorded(kelvin, request), "the request is in the ledger")
    query = "SELECT runtime_id, source FROM ledger_requests WHERE request_id = :request"
    ((life, source),) = rows(kelvin, query, {"request": request})
    kelvin.scale_to_zero("llama")
    kelvin.wait(
        lambda: bool(rows(kelvin, "SELECT 1 FROM ledger_lifetimes WHERE runtime_id = :life", {"life": life})),
        "its life, too",
    )
    return {"life": life, "request": request, "source": source}


@contextlib.contextmanager
def changed(kelvin: Installation, planted: Planted, names: dict[str, str]) -> Iterator[None]:
    """Change the running installation's database, and undo it afterwards."""
    try:
        assert sum(change(kelvin, each, names) for each in planted.do.split(";")) > 0
        yield
    finally:
        assert change(kelvin, planted.undo, names) > 0


def test_without_anything_planted_the_accounts_agree(kelvin: Installation, named: dict[str, str]) -> None:
    """Negative control: without a change, no difference is found."""
    report = reconciled(kelvin, 0)
    assert report["agrees"]
    assert report["compared"]["replicas"] > 0
    assert report["compared"]["rows"] > 1
    assert named["life"] not in {each["subject"] for each in report["differences"]}


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_difference_is_named(kelvin: Installation, named: dict[str, str], planted: Planted) -> None:
    """The difference is named by kind and size. Exit code 2, except for a known inexactness."""
    with changed(kelvin, planted, named):
        report = reconciled(kelvin, 2 if planted.fails else 0)
    found = [each for each in report["differences"] if each["kind"] == planted.kind]
    assert found, report
    assert {each["fails"] for each in found} == {planted.fails}
    if planted.figure:
        assert planted.is_ in [each[planted.figure] for each in found]


def test_cut_whole_answer_is_charged_and_the_accounts_agree(kelvin: Installation, named: dict[str, str]) -> None:
    """A whole answer cut by its deadline is billed for prompt and computed tokens, once, and the accounts agree."""
    complete(kelvin, "llama", "w1 w2", max_tokens=1)  # the model is ready from here on
    body = {"model": "llama", "prompt": "w1 w2 w3", "max_tokens": 4000, "temperature": 0}
    cut = post(kelvin, "/v1/completions", body, x_kelvin_deadline_ms="700")
    assert cut.status == 504, cut.raw
    request = cut.headers["x-request-id"]
    kelvin.wait(lambda: is_recorded(kelvin, request), "the request is in the ledger")
    query = (
        "SELECT outcome, prompt_tokens, completion_tokens, billable, device_us, origin FROM ledger_requests "
        "WHERE request_id = :request"
    )
    ((outcome, prompt, completion, billable, device_us, origin),) = rows(kelvin, query, {"request": request})
    assert (outcome, prompt, billable, origin) == ("deadline_exceeded", 3, 1, "activator")
    assert 1 < completion < 4000
    assert device_us > 0
    kelvin.scale_to_zero("llama")
    assert reconciled(kelvin, 0)["agrees"]


def test_spooled_records_are_named(kelvin: Installation) -> None:
    """Records that a living process has not shipped yet are named, and are no failure."""
    spool = Spool.open(kelvin.data / "spool", "activator-of-a-test")
    try:
        spool.append_blocking(lambda sequence: b"{}")
        (waiting,) = [each for each in reconciled(kelvin, 0)["differences"] if each["subject"] == "activator-of-a-test"]
    finally:
        spool.tail.acknowledge(1)  # no process ships it
        spool.close()
    assert (waiting["kind"], waiting["requests"], waiting["fails"]) == ("unshipped", 1, False)
