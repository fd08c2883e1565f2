"""Run checks of all rows of the ledger in processes. A caller waits a while, and asks again until a check is done."""

import asyncio
import logging
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controlplane.db.postgres_url import PostgresUrl, database_arguments
from controlplane.ledger_check.check_program import CheckFailure, CheckProgress, CheckRequest, CheckResult
from kelvin.contracts.accounting.billing_reports import Examining
from kelvin.contracts.errors import Internal, Refused
from kelvin.contracts.problem import from_wire
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.contracts.wire import decode, encode
from kelvin.process.python_command import python_command

log = logging.getLogger(__name__)

ANSWER_WAIT_S: Final = 10.0  # a caller waits so long before it gets the progress instead
UNCLAIMED_LIMIT_S: Final = 60.0  # a check ends so long after its last caller
RUNNING_LIMIT: Final = 3
PROGRAM: Final = tuple(python_command("controlplane.ledger_check.check_program"))
_LINE_BYTES: Final = 16 << 20

CheckKey = tuple[str, str, str | None]


@dataclass(slots=True, eq=False)
class _RunningCheck:
    """A check's process and its progress."""

    task: asyncio.Task[bytes]
    progress: Examining
    expiry_timer: asyncio.TimerHandle


class CheckRunner:
    """Runs at most RUNNING_LIMIT checks at once; a tenant may have no more than are free. A caller that asks for a
    running check joins it. Close it where you opened it.
    """

    def __init__(self, database: Path | PostgresUrl, spools: Path, program: Sequence[str] = PROGRAM) -> None:
        self._command = (*program, *database_arguments(database), str(spools))
        self._checks: dict[CheckKey, _RunningCheck] = {}

    def __repr__(self) -> str:
        return f"<CheckRunner running={len(self._running())}/{RUNNING_LIMIT}>"

    async def answer(self, check: CheckRequest) -> bytes | Examining:
        """Return the report's JSON, or the progress. Raises Refused: Overloaded, Internal, or as a read of the
        database.
        """
        key = (check.kind, check.tenant, check.month)
        examination = self._checks.get(key) or self._start(key, check)
        self._extend_expiry(key, examination)
        done, _ = await asyncio.wait({examination.task}, timeout=ANSWER_WAIT_S)
        if not done:
            return examination.progress
        self._drop(key, examination)  # the next caller wants a new check
        return examination.task.result()

    async def close(self) -> None:
        """End all processes and forget their checks."""
        tasks = [examination.task for examination in self._checks.values()]
        for key, examination in tuple(self._checks.items()):
            self._drop(key, examination)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _running(self) -> list[str]:
        """Return the tenant of each check that runs."""
        return [tenant for (_, tenant, _), examination in self._checks.items() if not examination.task.done()]

    def _start(self, key: CheckKey, check: CheckRequest) -> _RunningCheck:
        running = self._running()
        if running.count(check.tenant) >= RUNNING_LIMIT - len(running):
            raise Refused(Overloaded("the queue of ledger checks", RUNNING_LIMIT, 5.0))
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._run(key, check), name=f"{check.kind} {check.tenant}")
        examination = _RunningCheck(task, Examining(rows=0, of=0), loop.call_later(UNCLAIMED_LIMIT_S, lambda: None))
        self._checks[key] = examination
        return examination

    def _extend_expiry(self, key: CheckKey, examination: _RunningCheck) -> None:
        """Keep the check for another UNCLAIMED_LIMIT_S, because a caller has asked for it."""
        examination.expiry_timer.cancel()
        later = asyncio.get_running_loop().call_later
        examination.expiry_timer = later(UNCLAIMED_LIMIT_S, self._drop, key, examination)

    def _drop(self, key: CheckKey, examination: _RunningCheck) -> None:
        examination.expiry_timer.cancel()
        examination.task.cancel()
        if self._checks.get(key) is examination:
            del self._checks[key]

    async def _run(self, key: CheckKey, check: CheckRequest) -> bytes:
        process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE, limit=_LINE_BYTES)
        try:
            assert process.stdin is not None
            process.stdin.write(encode(check))
            process.stdin.close()
            return await self._read_result(key, process)
        finally:
            with suppress(ProcessLookupError):  # it has ended
                process.kill()
            await process.wait()

    async def _read_result(self, key: CheckKey, process: Process) -> bytes:
        """Read lines up to the result, and return its report."""
        assert process.stdout is not None
        while (raw := await process.stdout.readline()).endswith(b"\n"):  # a killed process leaves half a line
            match decode(raw, CheckProgress | CheckResult | CheckFailure):  # type: ignore[arg-type]
                case CheckResult(answer=answer):
                    return bytes(answer)
                case CheckFailure(failure=failure):
                    raise Refused(from_wire(failure))
                case CheckProgress(rows=rows, of=of):
                    if (examination := self._checks.get(key)) is not None:
                        examination.progress = Examining(rows=rows, of=of)
        log.error("a ledger check ended without a result", extra={"order": key[0], "tenant": key[1]})
        raise Refused(Internal())
