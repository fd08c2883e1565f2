"""Look inside an installation: cache counters, a replica's report, manifests and the ledger."""

import asyncio
import contextlib
import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coldstart_bench.harness.installation import Installation
from kelvin.contracts.artifacts.runtime_control import RuntimeReport
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from tests.e2e.commands import run
from tests.e2e.https_client import Answer


def cache(kelvin: Installation) -> Any:
    """Return the cache agent's state and counters."""
    return kelvin.admin.request("GET", "/admin/v1/cache")


def chunk_reads(kelvin: Installation) -> int:
    """Return the number of chunks read from NVMe or the store since the agent started."""
    counted: dict[str, int] = cache(kelvin)["chunk_reads"]
    return counted.get("nvme", 0) + counted.get("store", 0)


def wait_cache_idle(kelvin: Installation) -> None:
    """Wait until the cache prefetches and admits nothing, so that its counters stand still until the next call."""

    def is_resting() -> bool:
        now = cache(kelvin)
        return bool(now["prefetches"]["running"] == now["prefetches"]["waiting"] == now["chunks_to_admit"] == 0)

    # Check twice: a prefetch of a push or deploy may still be on its way at the first check.
    kelvin.wait(lambda: is_resting() and is_resting(), "the cache has nothing to do")


def log_lines(kelvin: Installation, name: str = "*") -> list[dict[str, Any]]:
    """Return all complete lines of one log, or of all logs."""
    files = sorted((kelvin.data / "logs").glob(f"{name}.log"))
    whole = [path.read_text().rpartition("\n")[0] for path in files]
    return [json.loads(line) for text in whole for line in text.splitlines()]


def chunks(kelvin: Installation, model: str) -> list[str]:
    """Return the digests of the chunks of the `prod` version."""
    version = kelvin.model(model)["version"]
    manifest = json.loads((kelvin.data / "store" / "default" / "manifests" / version).read_bytes())
    return [chunk["digest"] for chunk in manifest["chunks"]]


def pack_rows(kelvin: Installation, model: str) -> dict[Path, list[tuple[str, int, int]]]:
    """Return the model's chunks by pack file: (digest, offset, length)."""
    wanted, found = set(chunks(kelvin, model)), {}
    for index in (kelvin.data / "store").rglob("index/*"):
        if index.suffix:  # an uploaded file that is kept unchanged
            continue
        rows = [tuple(row) for row in json.loads(index.read_bytes()) if row[0] in wanted]
        if rows:
            found[index.parent.parent / "packs" / index.name] = rows
    return found


def sole_rows(kelvin: Installation, model: str) -> tuple[Path, list[tuple[str, int, int]]]:
    """Return the pack with most of the model's chunks, and its chunks in no other pack (no copy heals them)."""
    packs = pack_rows(kelvin, model)
    most = max(packs, key=lambda pack: len(packs[pack]))
    elsewhere = {digest for pack, rows in packs.items() if pack != most for digest, _, _ in rows}
    return most, [row for row in packs[most] if row[0] not in elsewhere]


def replicas(kelvin: Installation, model: str) -> list[Any]:
    """Return the model's processes as the control plane reports them."""
    return [replica for version in kelvin.model(model)["versions"] for replica in version["replicas"]]


def living(kelvin: Installation) -> int:
    """Return the number of replicas of all models."""
    return sum(
        len(replicas(kelvin, model["model"])) for model in kelvin.admin.request("GET", "/admin/v1/models")["models"]
    )


def sole_replica(kelvin: Installation, model: str) -> Any:
    """Return the model's only replica, once stopped or killed ones have left the list."""
    found: list[Any] = []

    def is_alone() -> bool:
        found[:] = replicas(kelvin, model)
        return len(found) == 1

    kelvin.wait(is_alone, f"{model} has one replica")
    return found[0]


def report(kelvin: Installation, model: str) -> RuntimeReport:
    """Return the report of the model's only replica."""
    replica = sole_replica(kelvin, model)

    async def ask() -> RuntimeReport:
        directory = SocketDirectory(kelvin.data / "run")
        client = ServiceClient(directory, f"rt-{replica['runtime_id']}.sock", "the replica")
        try:
            return await client.call("GET", "/control/state", RuntimeReport, timeout_s=5)
        finally:
            await client.close()
            directory.close()

    return asyncio.run(ask())


def bill(kelvin: Installation) -> Any:
    """Return this month's report of the default tenant."""
    month = time.strftime("%Y-%m", time.gmtime())
    return kelvin.admin.request("GET", f"/admin/v1/billing/report?tenant=default&month={month}")


def rows(kelvin: Installation, query: str, values: Sequence[str] | Mapping[str, str] = ()) -> list[sqlite3.Row]:
    """Query the installation's database."""
    with contextlib.closing(sqlite3.connect(f"file:{kelvin.data}/kelvin.db?mode=ro", uri=True)) as database:
        database.row_factory = sqlite3.Row
        return database.execute(query, values).fetchall()


def change(kelvin: Installation, query: str, values: Sequence[str | int] | Mapping[str, str]) -> int:
    """Change the installation's database directly. Return the number of changed rows."""
    with contextlib.closing(sqlite3.connect(kelvin.data / "kelvin.db", timeout=60)) as database, database:
        return database.execute(query, values).rowcount


def is_recorded(kelvin: Installation, request_id: str) -> bool:
    """Return whether the request's record is in the ledger. Records of one activator arrive in order."""
    return bool(rows(kelvin, "SELECT 1 FROM ledger_requests WHERE request_id = ?", (request_id,)))


def record(kelvin: Installation, answer: Answer) -> dict[str, Any]:
    """Return the request's row of the ledger, once it is there."""
    request_id = answer.headers["x-request-id"]
    kelvin.wait(lambda: is_recorded(kelvin, request_id), "the record is in the ledger")
    return dict(rows(kelvin, "SELECT * FROM ledger_requests WHERE request_id = ?", (request_id,))[0])


def reconciled(kelvin: Installation, code: int) -> Any:
    """Return the JSON output of `billing reconcile`. Its exit code must be `code`."""
    return json.loads(run(kelvin, "billing", "reconcile", "--json", code=code, errors=False))
