"""The billing routes: for administrators, about their own tenant and a valid month."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from controlplane.api import billing_api
from controlplane.api.billing_api import router
from controlplane.billing.billing_report import billing_report
from controlplane.billing.price_book import default_price_book
from controlplane.ledger_check.check_runner import CheckRunner
from kelvin.contracts.accounting.billing_reports import BillingReport, ReconcileReport, VerifyReport
from kelvin.contracts.serving.control_messages import Principal, Scope
from kelvin.contracts.wire import decode, encode
from kelvin.ipc.failure_responses import install_failure_handlers
from kelvin.ipc.principal import PRINCIPAL_HEADER
from tests.controlplane import database_backends
from tests.controlplane.builders import World
from tests.controlplane.usage_records import END_US, MONTH
from tests.eventually import PATIENCE_S

ADMIN = Principal(key_id="k", tenant="acme", scopes=(Scope.ADMIN,))
READER = Principal(key_id="k", tenant="acme", scopes=(Scope.INFER,))


@asynccontextmanager
async def billing(path: Path, principal: Principal | None = ADMIN) -> AsyncIterator[tuple[World, httpx.AsyncClient]]:
    """Yield the routes over a ledger with one request of a replica that is gone."""
    app, examiner = FastAPI(), CheckRunner(database_backends.place(path), path / "spool")
    install_failure_handlers(app)
    headers = {} if principal is None else {PRINCIPAL_HEADER: encode(principal).decode()}
    transport = httpx.ASGITransport(app=app)
    with closing(World(path)) as world:
        await world.enter(1)
        book = default_price_book()
        routes = router(world.ledger, book, examiner, live_runtimes=lambda: {"rt-7"}, wall_us=lambda: END_US)
        app.include_router(routes)
        async with httpx.AsyncClient(transport=transport, base_url="http://control", headers=headers) as client:
            yield world, client
        await examiner.close()


async def ask(
    path: Path, params: dict[str, str], principal: Principal | None = ADMIN, route: str = "report"
) -> httpx.Response:
    """Call the route until it is done."""
    async with billing(path, principal) as (_, client), asyncio.timeout(PATIENCE_S):
        while (answer := await client.get(f"/admin/v1/billing/{route}", params=params)).status_code == 202:
            pass  # it is still reading
        return answer


@pytest.mark.parametrize("params", [{"month": MONTH}, {"month": MONTH, "tenant": "acme"}])
async def test_an_administrator_sees_the_own_bill(tmp_path: Path, params: dict[str, str]) -> None:
    """The tenant may be named. By default it is the key's tenant."""
    answer = await ask(tmp_path, params, ADMIN)
    assert answer.status_code == 200
    report = decode(answer.content, BillingReport)
    assert (report.tenant, report.requests, report.currency) == ("acme", {"ok": 1}, "USD")
    assert [problem.kind for problem in report.balance.problems] == ["lifetime_missing"]


async def test_reports_of_one_tenant_leave_others_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of one tenant are read one at a time, and leave a database reader to others. Too many are refused."""
    going_on = threading.Event()

    def slow(*arguments: Any, **named: Any) -> BillingReport:
        assert going_on.wait(60)
        return billing_report(*arguments, **named)

    monkeypatch.setattr(billing_api, "billing_report", slow)
    async with billing(tmp_path) as (world, client):
        url = f"/admin/v1/billing/report?month={MONTH}"
        asking = [asyncio.create_task(client.get(url)) for _ in range(billing_api.MAX_WAITING_REPORTS + 1)]
        try:
            done, _ = await asyncio.wait(asking, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result().status_code for task in done] == [503]
            assert await asyncio.wait_for(world.database.read(lambda connection: True), 30)
        finally:
            going_on.set()
            answers = await asyncio.gather(*asking)
        assert [each.status_code for each in answers].count(200) == billing_api.MAX_WAITING_REPORTS
        assert (await client.get(url)).status_code == 200


@pytest.mark.usefixtures("backend")
async def test_the_ledger_is_read_for_its_tenant(tmp_path: Path) -> None:
    """Verification and audit cover one month or all. Another tenant or an invalid month is refused."""
    verified = decode((await ask(tmp_path, {"month": MONTH}, ADMIN, "verify")).content, VerifyReport)
    assert (verified.sound, [each.links for each in verified.months]) == (True, [1])
    found = decode((await ask(tmp_path, {"tenant": "acme"}, ADMIN, "reconcile")).content, ReconcileReport)
    assert [(each.kind, each.subject) for each in found.differences] == [("lifetime_missing", "rt-1")]
    assert (await ask(tmp_path, {"tenant": "other"}, ADMIN, "reconcile")).status_code == 404
    assert (await ask(tmp_path, {"month": "2026-13"}, ADMIN, "verify")).status_code == 400


@pytest.mark.parametrize(
    ("params", "principal", "status", "code"),
    [
        pytest.param({"month": MONTH, "tenant": "other"}, ADMIN, 404, "not_found", id="another tenant's is not there"),
        pytest.param({"month": MONTH}, READER, 403, "insufficient_scope", id="not for keys of inference"),
        pytest.param({"month": MONTH}, None, 401, "invalid_api_key", id="not without a caller"),
        pytest.param({"month": "november"}, ADMIN, 400, "invalid_request", id="not a month"),
        pytest.param({}, ADMIN, 400, "invalid_request", id="no month"),
    ],
)
async def test_refusals(
    tmp_path: Path, params: dict[str, str], principal: Principal | None, status: int, code: str
) -> None:
    answer = await ask(tmp_path, params, principal)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
