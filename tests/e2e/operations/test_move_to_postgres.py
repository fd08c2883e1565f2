"""An installation moves to PostgreSQL: keys, models and bill go on."""

from pathlib import Path
from typing import Any

import pytest

from coldstart_bench.harness.installation import Installation, running_installation
from tests.controlplane.postgres_server import PostgresServer, database_name
from tests.e2e.commands import run_to_end
from tests.e2e.conftest import SETTINGS
from tests.e2e.https_client import complete
from tests.e2e.installation_state import bill, is_recorded


def _charged(kelvin: Installation) -> Any:
    """Return what the bill has of requests. Replica lifetimes are recorded only when they end."""
    found = bill(kelvin)
    return {name: found[name] for name in ("requests", "month", "currency")}


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_an_installation_moves(scratch: Path, llama: Path) -> None:
    """A backup is restored into PostgreSQL, and the next request is on the same bill."""
    data, backup = scratch / "moving", scratch / "moving.backup"
    with PostgresServer() as postgres:
        place = postgres.database(migrated=False)
        with running_installation(data, settings=SETTINGS) as kelvin:
            kelvin.push(llama, "llama")
            answer = complete(kelvin, "llama", "w1", max_tokens=2)
            kelvin.wait(lambda: is_recorded(kelvin, answer.headers["x-request-id"]), "it is in the ledger")
            charged = _charged(kelvin)
        for command in (
            ("backup", str(backup), "--data", str(data)),
            ("restore", str(backup), "--database", place.url),
        ):
            status, out, err = run_to_end(*command)
            assert status == 0, out + err
        with running_installation(data, settings={**SETTINGS, "KELVIN_DATABASE": place.url}) as kelvin:
            assert [model["id"] for model in kelvin.client.request("GET", "/v1/models")["data"]] == ["llama"]
            assert _charged(kelvin) == charged
            assert complete(kelvin, "llama", "w1", max_tokens=2).text == answer.text
            rows = "SELECT count(*) FROM ledger_requests"
            kelvin.wait(lambda: postgres.ask(rows, database_name(place)) == [(2,)], "the next one is in the ledger")
            assert _charged(kelvin)["requests"] == {"ok": 2}
