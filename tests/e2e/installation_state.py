"""What a test may look at inside an installation: counters of the cache, a replica's report, a manifest, the ledger."""

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
    """The cache agent's state and counters."""
    return kelvin.admin.request("GET", "/admin/v1/cache")


def chunk_reads(kelvin: Installation) -> int:
    """Chunks read from NVMe or the store since the agent started."""
    counted: dict[str, int] = cache(kelvin)["chunk_reads"]
    return counted.get("nvme", 0) + counted.get("store", 0)


def wait_cache_idle(kelvin: Installation) -> None:
    """Wait until the cache prefetches nothing and admits nothing. Its counters then stand still until the next call."""

    def is_resting() -> bool:
        now = cache(kelvin)
        return bool(now["prefetches"]["running"] == now["prefetches"]["waiting"] == now["chunks_to_admit"] == 0)

    # Twice: what a push or a deploy asked for may be on its way to the cache at the first look.
    kelvin.wait(lambda: is_resting() and is_resting(), "the cache has nothing to do")


def log_lines(kelvin: Installation, name: str = "*") -> list[dict[str, Any]]:
    """Every line of that log, or of all; a last one that is just being written is left out."""
    files = sorted((kelvin.data / "logs").glob(f"{name}.log"))
    whole = [path.read_text().rpartition("\n")[0] for path in files]
    return [json.loads(line) for text in whole for line in text.splitlines()]


def chunks(kelvin: Installation, model: str) -> list[str]:
    """Digests of the chunks of the version that `prod` names."""
    version = kelvin.model(model)["version"]
    manifest = json.loads((kelvin.data / "store" / "default" / "manifests" / version).read_bytes())
    return [chunk["digest"] for chunk in manifest["chunks"]]


def pack_rows(kelvin: Installation, model: str) -> dict[Path, list[tuple[str, int, int]]]:
    """Chunks of the model by the pack file that holds them: (digest, offset, length)."""
    wanted, found = set(chunks(kelvin, model)), {}
    for index in (kelvin.data / "store").rglob("index/*"):
        if index.suffix:  # a file that is kept as it is
            continue
        rows = [tuple(row) for row in json.loads(index.read_bytes()) if row[0] in wanted]
        if rows:
            found[index.parent.parent / "packs" / index.name] = rows
    return found


def sole_rows(kelvin: Installation, model: str) -> tuple[Path, list[tuple[str, int, int]]]:
    """The pack that holds most of the model's chunks, and those that lie in no other: no copy heals them."""
    packs = pack_rows(kelvin, model)
    most = max(packs, key=lambda pack: len(packs[pack]))
    elsewhere = {digest for pack, rows in packs.items() if pack != most for digest, _, _ in rows}
    return most, [row for row in packs[most] if row[0] not in elsewhere]


def replicas(kelvin: Installation, model: str) -> list[Any]:
    """What the control plane says of the model's processes."""
    return [replica for version in kelvin.model(model)["versions"] for replica in version["replicas"]]


def living(kelvin: Installation) -> int:
    """Replicas of all models."""
    return sum(
        len(replicas(kelvin, model["model"])) for model in kelvin.admin.request("GET", "/admin/v1/models")["models"]
    )


def sole_replica(kelvin: Installation, model: str) -> Any:
    """The model's only replica, once those that were stopped or killed before it are gone from the list."""
    found: list[Any] = []

    def is_alone() -> bool:
        found[:] = replicas(kelvin, model)
        return len(found) == 1

    kelvin.wait(is_alone, f"{model} has one replica")
    return found[0]


def report(kelvin: Installation, model: str) -> RuntimeReport:
    """What the model's only replica says of itself."""
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
    """This month's report of the default tenant."""
    month = time.strftime("%Y-%m", time.gmtime())
    return kelvin.admin.request("GET", f"/admin/v1/billing/report?tenant=default&month={month}")


def rows(kelvin: Installation, query: str, values: Sequence[str] | Mapping[str, str] = ()) -> list[sqlite3.Row]:
    """Rows of the installation's database."""
    with contextlib.closing(sqlite3.connect(f"file:{kelvin.data}/kelvin.db?mode=ro", uri=True)) as database:
        database.row_factory = sqlite3.Row
        return database.execute(query, values).fetchall()


def change(kelvin: Installation, query: str, values: Sequence[str | int] | Mapping[str, str]) -> int:
    """Change the installation's database by hand, beside it; the number of rows that this changed."""
    with contextlib.closing(sqlite3.connect(kelvin.data / "kelvin.db", timeout=60)) as database, database:
        return database.execute(query, values).rowcount


def is_recorded(kelvin: Installation, request_id: str) -> bool:
    """Whether the request's record is in the ledger; records of one activator arrive in order."""
    return bool(rows(kelvin, "SELECT 1 FROM ledger_requests WHERE request_id = ?", (request_id,)))


def record(kelvin: Installation, answer: Answer) -> dict[str, Any]:
    """The request's row in the ledger, once it is there."""
    request_id = answer.headers["x-request-id"]
    kelvin.wait(lambda: is_recorded(kelvin, request_id), "the record is in the ledger")
    return dict(rows(kelvin, "SELECT * FROM ledger_requests WHERE request_id = ?", (request_id,))[0])


def reconciled(kelvin: Installation, code: int) -> Any:
    """What the command says as JSON; its exit code must be `code`."""
    return json.loads(run(kelvin, "billing", "reconcile", "--json", code=code, errors=False))
