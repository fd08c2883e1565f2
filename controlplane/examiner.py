"""Run processes that read all rows of the ledger. A caller waits a while, and asks again until its process is done."""

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from contracts.billing import Examining
from contracts.errors import Internal, Refused
from contracts.problem import from_wire
from contracts.traffic_errors import Overloaded
from contracts.wire import decode, encode
from controlplane.examine import Failed, Order, Read, Report
from controlplane.postgres_place import PostgresPlace, words_of

log = logging.getLogger(__name__)

WAIT_S: Final = 10.0  # for an answer
ABANDONED_S: Final = 60.0  # after the last who asked
RUNNING_LIMIT: Final = 3
PROGRAM: Final = (sys.executable, "-P", "-m", "controlplane.examine")
_LINE_BYTES: Final = 16 << 20

Key = tuple[str, str, str | None]


@dataclass(slots=True, eq=False)
class _Examination:
    """One process, and how far it is."""

    task: asyncio.Task[bytes]
    seen: Examining
    abandoned: asyncio.TimerHandle


class Examiner:
    """Runs at most RUNNING_LIMIT examinations at once; a tenant may have no more than are free. A caller that asks for
    the same one joins it. Close it where you opened it.
    """

    def __init__(self, database: Path | PostgresPlace, spools: Path, program: Sequence[str] = PROGRAM) -> None:
        self._command = (*program, *words_of(database), str(spools))
        self._all: dict[Key, _Examination] = {}

    def __repr__(self) -> str:
        return f"<Examiner running={len(self._running())}/{RUNNING_LIMIT}>"

    async def answer(self, order: Order) -> bytes | Examining:
        """The report's JSON, or how far it is: then ask again. Raises Refused: Overloaded, Internal, or as the
        database's other readers.
        """
        key = (order.kind, order.tenant, order.month)
        examination = self._all.get(key) or self._begin(key, order)
        self._expect(key, examination)
        done, _ = await asyncio.wait({examination.task}, timeout=WAIT_S)
        if not done:
            return examination.seen
        self._drop(key, examination)  # whoever asks next wants to know how it is then
        return examination.task.result()

    async def close(self) -> None:
        """End all processes."""
        tasks = [examination.task for examination in self._all.values()]
        for key, examination in tuple(self._all.items()):
            self._drop(key, examination)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _running(self) -> list[str]:
        """Return the tenant of each examination that runs."""
        return [tenant for (_, tenant, _), examination in self._all.items() if not examination.task.done()]

    def _begin(self, key: Key, order: Order) -> _Examination:
        running = self._running()
        if running.count(order.tenant) >= RUNNING_LIMIT - len(running):
            raise Refused(Overloaded("the list of those who read the ledger", RUNNING_LIMIT, 5.0))
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._run(key, order), name=f"{order.kind} {order.tenant}")
        examination = _Examination(task, Examining(rows=0, of=0), loop.call_later(ABANDONED_S, lambda: None))
        self._all[key] = examination
        return examination

    def _expect(self, key: Key, examination: _Examination) -> None:
        """Keep the examination for another ABANDONED_S, since a caller has asked for it."""
        examination.abandoned.cancel()
        later = asyncio.get_running_loop().call_later
        examination.abandoned = later(ABANDONED_S, self._drop, key, examination)

    def _drop(self, key: Key, examination: _Examination) -> None:
        examination.abandoned.cancel()
        examination.task.cancel()
        if self._all.get(key) is examination:
            del self._all[key]

    async def _run(self, key: Key, order: Order) -> bytes:
        process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE, limit=_LINE_BYTES)
        try:
            assert process.stdin is not None
            process.stdin.write(encode(order))
            process.stdin.close()
            return await self._listen(key, process)
        finally:
            with suppress(ProcessLookupError):  # it has ended
                process.kill()
            await process.wait()

    async def _listen(self, key: Key, process: Process) -> bytes:
        """Read lines up to the report, and return it."""
        assert process.stdout is not None
        while (raw := await process.stdout.readline()).endswith(b"\n"):  # a killed process leaves half a line
            match decode(raw, Read | Report | Failed):  # type: ignore[arg-type]
                case Report(answer=answer):
                    return bytes(answer)
                case Failed(failure=failure):
                    raise Refused(from_wire(failure))
                case Read(rows=rows, of=of):
                    if (examination := self._all.get(key)) is not None:
                        examination.seen = Examining(rows=rows, of=of)
        log.error("the ledger was not read to its end", extra={"order": key[0], "tenant": key[1]})
        raise Refused(Internal())
