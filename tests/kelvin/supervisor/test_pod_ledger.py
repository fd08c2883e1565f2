"""A pod reports its life, its end and its orphaned requests to a real control plane over mutual TLS."""

import http.client
import json
import os
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from coldstart_bench.harness.installation import free_port
from kelvin.contracts.accounting.usage import LifetimeRecord
from kelvin.contracts.roles import Role
from kelvin.contracts.serving.stream_frames import FrameDecoder, FrameKind
from kelvin.contracts.wire import decode
from tests.controlplane.control_plane_server import control_plane_process
from tests.kelvin.crypto.pki import Authority, write
from tests.kelvin.pods import LONG, PROMPT, pod
from tests.runtime.processes import DEADLINE_S, Installation, poll_until
from tests.weightcache.kit import TENANT, Version

LIFE_S = 1


class Books:
    """A control plane's address, settings and database."""

    def __init__(self, place: Path) -> None:
        self.data = place / "control"
        self.data.mkdir()
        inner, authority = place / "inner", Authority()
        for role in (Role.CONTROLPLANE, Role.RUNTIME):
            write(inner / role, authority.of(role), authority)
        port = free_port()
        self.listens = {"inner_tls": str(inner), "control_listen": f"127.0.0.1:{port}"}
        self.pods = {"INNER_TLS": str(inner), "CONTROL": f"https://127.0.0.1:{port}", "LIFE_S": str(LIFE_S)}

    def rows(self, query: str) -> list[dict[str, Any]]:
        """Return the rows of a query, none before the database exists."""
        try:
            with closing(sqlite3.connect(f"file:{self.data / 'kelvin.db'}?mode=ro", uri=True)) as database:
                database.row_factory = sqlite3.Row
                return [dict(row) for row in database.execute(query)]
        except sqlite3.OperationalError:
            return []

    def last_report(self) -> LifetimeRecord | None:
        """Return the last report of the only running pod."""
        rows = self.rows("SELECT record FROM ledger_open_lives")
        return decode(rows[0]["record"].encode(), LifetimeRecord) if rows else None

    def lives(self) -> list[dict[str, Any]]:
        """Return the recorded lifetimes."""
        return self.rows("SELECT * FROM ledger_lifetimes")


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path)


def open_stream(port: int, tokens: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Open a long stream whose record no activator acknowledges."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    body = PROMPT | {"max_tokens": tokens, "stream": True}
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"x-kelvin-request-id": "r9", "x-kelvin-source": "activator-1"}
    )
    return connection, connection.getresponse()


def test_a_drain_that_is_too_short_loses_nothing(
    sealed: tuple[Installation, Version], books: Books, tmp_path: Path
) -> None:
    """The control plane starts late and gets the life so far. A stream that outlives the drain fails. Its record, the
    pod's life and its exit status arrive before the pod ends, so its directory may be deleted then."""
    house, version = sealed
    with pod(house, version.id, tmp_path / "data", "--threads", "1", RUNTIME_DRAIN_S="1", **books.pods) as each:
        poll_until("it is ready", each.is_ready)
        with control_plane_process(books.data, **books.listens):
            connection, answer = open_stream(each.port, LONG - 100)
            name = answer.headers["x-kelvin-runtime"]
            first = answer.read(1)
            reported = poll_until("it tells of what it does", lambda: books.last_report() if _active(books) else None)
            assert (reported.runtime_id, reported.tenant, reported.version) == (name, TENANT, version.id)
            assert books.lives() == []
            each.process.send_signal(signal.SIGTERM)
            frames = FrameDecoder().feed(first + answer.read())
            connection.close()
            assert frames[-1].kind is FrameKind.FAILED
            assert each.process.wait(DEADLINE_S) == 0
            (life,) = books.lives()
            assert (life["runtime_id"], life["requests"], life["exit_status"]) == (name, 1, 0)
            assert life["total_us"] >= reported.total_us
            parts = sum(life[f"{part}_us"] for part in ("standby", "restore", "active", "idle"))
            assert abs(life["total_us"] - parts) < max(100_000, life["total_us"] // 100)
            assert books.last_report() is None, "what was said before counts no more"
            (record,) = books.rows("SELECT * FROM ledger_requests")
            assert (record["runtime_id"], record["origin"], record["outcome"]) == (name, "orphan", "cancelled")
            assert not list((tmp_path / "data" / "spool").iterdir())


def _active(books: Books) -> bool:
    reported = books.last_report()
    return reported is not None and reported.active_us > 0


def test_killed_runtime_is_still_recorded(sealed: tuple[Installation, Version], books: Books, tmp_path: Path) -> None:
    """If only the runtime is killed, its supervisor records the end and exits with the same status. If the whole pod
    and its directory are lost, the ledger keeps the last report, so at most one interval is lost."""
    house, version = sealed
    data = tmp_path / "data"
    with (
        control_plane_process(books.data, **books.listens),
        pod(house, version.id, data, "--threads", "1", **books.pods) as whole,
        pod(house, version.id, tmp_path / "other", "--threads", "1", **books.pods) as part,
    ):
        for each in (whole, part):
            poll_until("it is ready", each.is_ready)
        assert part.ask(PROMPT)[0] == 200
        os.kill(part.child("runtime.app.pod"), signal.SIGKILL)
        assert part.process.wait(DEADLINE_S) == 128 + signal.SIGKILL
        (life,) = books.lives()
        assert (life["exit_status"], life["requests"]) == (-signal.SIGKILL, 1)
        assert life["active_us"] > 0

        poll_until("it tells of its idleness", lambda: ((reported := books.last_report()) and reported.idle_us) or None)
        before_us = poll_until("it speaks again", _find_newer(books, books.last_report()))
        whole.process.kill()
        whole.process.wait(DEADLINE_S)
        shutil.rmtree(data, ignore_errors=True)
        reported = books.last_report()
        assert reported is not None
        assert reported.runtime_id != life["runtime_id"]
        assert reported.died_at_us >= before_us
        assert books.lives() == [life]
        assert len(books.rows("SELECT * FROM ledger_open_lives")) == 1


def _find_newer(books: Books, before: LifetimeRecord | None) -> Any:
    assert before is not None

    def newer() -> int | None:
        reported = books.last_report()
        return reported.died_at_us if reported is not None and reported.died_at_us > before.died_at_us else None

    return newer
