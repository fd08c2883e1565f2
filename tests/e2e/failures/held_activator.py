"""`kelvin up` with an activator that stops at a chosen point of a request's end. Only tests use it.

The test writes the point's name to DATA/hold. At that point the activator removes the file and stops itself (SIGSTOP),
so that the test can look around and SIGKILL it. At "disk waits" it delays its disk write until the replica has the
receipt of delivery, and stops then.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

# In the order in which a response passes them.
POINTS: Sequence[str] = ("end read", "disk waits", "synced", "finished", "told")
TOLD_S = 30.0  # longer than a replica needs; after that the test sees that no receipt was sent


def main() -> None:
    """Run the supervisor if there are arguments, otherwise the activator."""
    if len(sys.argv) == 1:
        _activator()
        return
    from kelvin.cli import main as command
    from kelvin.supervisor import child_group

    held = [
        replace(spec, module=__spec__.name) if spec.name == "activator" else spec for spec in child_group.CHILD_SPECS
    ]
    setattr(child_group, "CHILD_SPECS", tuple(held))  # noqa: B010 - mypy would have the name exported
    command.main()


def _is_held(point: str) -> bool:
    hold = Path(os.environ["KELVIN_DATA"]) / "hold"
    with suppress(FileNotFoundError):
        if hold.read_text() == point:
            hold.unlink()
            return True
    return False


def _stop_at(point: str) -> None:
    if _is_held(point):
        os.kill(os.getpid(), signal.SIGSTOP)


def _activator() -> None:
    from activator import __main__ as program
    from activator.accounting.request_account import Account
    from activator.accounting.usage_records import UsageRecords
    from activator.http.exchange import Exchange
    from activator.upstream.replica_sessions import ReceiptSender
    from kelvin.contracts.errors import Failure
    from kelvin.spool.segment_disk import SegmentDisk

    desks: set[ReceiptSender] = set()
    settled: list[Account] = []  # accounts settled here: the disk stops only at their records
    begin, settle, finish, tell, write, sync = (
        ReceiptSender._start_sending,
        UsageRecords.settle,
        Exchange.finish,
        ReceiptSender._send_receipts,
        SegmentDisk.write,
        SegmentDisk.sync,
    )

    async def held_settle(
        self: UsageRecords, account: Account, failure: Failure | None = None, status: int | None = None
    ) -> None:
        _stop_at("end read")
        settled.append(account)
        await settle(self, account, failure, status)

    async def held_finish(self: Exchange, data: bytes) -> None:
        await finish(self, data)
        if settled:  # requests for the bill finish here too, without an account
            _stop_at("finished")

    def seen_begin(self: ReceiptSender) -> None:
        desks.add(self)
        begin(self)

    async def held_tell(self: ReceiptSender) -> None:
        ends = any(receipt.recorded for receipt in self._due.values())
        await tell(self)
        if ends:
            _stop_at("told")

    def held_write(self: SegmentDisk, fd: int, payload: bytes, offset: int) -> None:
        if settled and _is_held("disk waits"):
            limit = time.monotonic() + TOLD_S
            while any(desk._send_task for desk in desks) and time.monotonic() < limit:
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGSTOP)
        write(self, fd, payload, offset)

    def held_sync(self: SegmentDisk, fd: int) -> None:
        sync(self, fd)
        if settled:
            _stop_at("synced")

    UsageRecords.settle, Exchange.finish, ReceiptSender._send_receipts = held_settle, held_finish, held_tell  # type: ignore[method-assign]
    ReceiptSender._start_sending = seen_begin  # type: ignore[method-assign]
    SegmentDisk.write, SegmentDisk.sync = held_write, held_sync  # type: ignore[method-assign]
    program.main()


if __name__ == "__main__":
    main()
