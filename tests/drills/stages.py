"""Bring an operation to a stage and hold it there, only with means from outside: the product has no hook for it.

SIGSTOP of the process that would end a stage holds it, so the stage still lasts at the kill. Only `last-byte` needs
more: the activator of `tests/e2e/failures/held_activator.py` stops itself between record and last byte.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from coldstart_bench.harness.polling import poll_until_true
from coldstart_bench.harness.request_outcome import ANSWERED
from tests.drills.drill_installation import SERVED, DrillInstallation, wait
from tests.drills.drill_models import TinyModels
from tests.drills.matrix import Stage, VictimProcess
from tests.drills.operations import Operation, PreconditionFailed, StreamedRequests
from tests.process_state import stop

TOKENS: Final = 150
LONG_TOKENS: Final = 3600  # more than a fast core computes in the two seconds without a supervisor
BEGUN_WORDS: Final = 5
QUIET_S: Final = 0.15
STAGED: Final = 3  # chunks, of about twenty


@dataclass(slots=True)
class HeldOperation:
    """An operation at its stage. `is_there` is called right before the kill. `runtime` serves or restores."""

    operation: Operation
    is_there: Callable[[], bool]
    runtime: psutil.Process | None
    stopped: list[psutil.Process] = field(default_factory=list)
    beside: StreamedRequests | None = None
    again: Callable[[], Operation] | None = None  # starts the same operation once more

    def stop(self, process: psutil.Process) -> psutil.Process:
        """Hold a process. Raises psutil.NoSuchProcess if it ends by itself."""
        try:
            stop(process.pid)
        except ProcessLookupError as error:
            raise psutil.NoSuchProcess(process.pid) from error
        self.stopped.append(process)
        return process

    def release(self) -> None:
        """Continue all held processes that live."""
        for process in self.stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self.stopped.clear()

    def close(self) -> None:
        """Release all processes and end the clients."""
        self.release()
        self.operation.close()
        if self.beside is not None:
            self.beside.close()


@contextlib.contextmanager
def upload(installation: DrillInstallation, models: TinyModels) -> Iterator[HeldOperation]:
    """Some chunks are staged, and the push is still sending."""
    runtime = installation.replica_at_work()
    directory = models.fresh()
    push = installation.push(directory, "uploaded", "96K")
    held = HeldOperation(push, lambda: not push.is_over() and not drafts(installation.data), runtime)
    held.again = lambda: installation.push(directory, "uploaded")
    with contextlib.closing(held):
        wait(lambda: sent(installation.data) >= STAGED or push.is_over(), "chunks are staged")
        yield held


@contextlib.contextmanager
def seal(installation: DrillInstallation, models: TinyModels) -> Iterator[HeldOperation]:
    """The draft is written, and the standby that has to seal it is stopped."""
    runtime = installation.replica_at_work()
    directory = models.fresh()
    push = installation.push(directory, "sealed", "192K")
    held = HeldOperation(push, lambda: bool(drafts(installation.data)) and not push.is_over(), runtime)
    held.again = lambda: installation.push(directory, "sealed")
    with contextlib.closing(held):
        wait(lambda: sent(installation.data) >= 1 or push.is_over(), "a chunk is staged")
        installation.wait_until_whole()
        for standby in installation.standbys(runtime):
            with contextlib.suppress(psutil.NoSuchProcess):  # the one that has just checked the headers
                held.stop(standby)
        wait(lambda: bool(drafts(installation.data)) or push.is_over(), "a draft waits to be sealed")
        yield held


@contextlib.contextmanager
def restore(installation: DrillInstallation, models: TinyModels) -> Iterator[HeldOperation]:
    """A process has the version and waits for a lease of its bytes: the cache is stopped."""
    installation.scale_to_zero()
    installation.wait_until_whole()
    with waiting_for_lease(installation) as held:
        yield held


@contextlib.contextmanager
def waiting_for_lease(installation: DrillInstallation) -> Iterator[HeldOperation]:
    """Start a request for the served model, which has no replica, and hold it there."""
    cache = installation.process(VictimProcess.CACHE)
    cache.suspend()
    call = installation.call(10)
    # The cache, until the restoring process is known.
    held = HeldOperation(
        call, lambda: bool(installation.replicas(SERVED, "restoring")) and not call.is_over(), cache, [cache]
    )
    with contextlib.closing(held):
        held.runtime = installation.replica("restoring")
        yield held


@contextlib.contextmanager
def queued(installation: DrillInstallation, models: TinyModels) -> Iterator[HeldOperation]:
    """The only replica is stopped with all its slots taken, and one more request is queued."""
    runtime = installation.replica_at_work()
    places = installation.replica_row()["max_streams"]
    runtime.suspend()
    others = installation.call(2, times=places, prompt="w7 w8")
    held = HeldOperation(others, lambda: True, runtime, [runtime], beside=others)
    with contextlib.closing(held):
        others.wait_for(lambda: others.stages() == {"prefilling"}, "all slots are taken")
        call = installation.call(5)
        held.operation = call
        call.wait_for(lambda: "queued" in call.stages(), "it is queued")
        held.is_there = lambda: call.stages() == {"queued"} and not call.is_over()
        yield held


@contextlib.contextmanager
def prefill(installation: DrillInstallation, models: TinyModels) -> Iterator[HeldOperation]:
    """A replica has the request and has answered no byte: it is stopped."""
    runtime = installation.replica_at_work()
    runtime.suspend()
    call = installation.call(10)
    held = HeldOperation(call, lambda: call.stages() == {"prefilling"} and call.words == 0, runtime, [runtime])
    with contextlib.closing(held):
        call.wait_for(lambda: "prefilling" in call.stages(), "it is prefilling")
        yield held


@contextlib.contextmanager
def decode(installation: DrillInstallation, models: TinyModels) -> Iterator[HeldOperation]:
    """Some tokens have arrived, others have not: the replica is stopped, and no byte is on its way."""
    runtime = installation.replica_at_work()
    call = installation.call(LONG_TOKENS)
    held = HeldOperation(call, lambda: 0 < call.words < LONG_TOKENS and not call.is_finished(), runtime)
    with contextlib.closing(held):
        call.wait_for(lambda: call.words >= BEGUN_WORDS, "tokens come")
        held.stop(runtime)
        poll_until_true(lambda: call.is_quiet(QUIET_S), 10)
        yield held


@contextlib.contextmanager
def last_byte(installation: DrillInstallation, models: TinyModels) -> Iterator[HeldOperation]:
    """The client has the whole text, the record is durable, and the activator has not sent the end of the stream."""
    runtime = installation.replica_at_work()
    activator = installation.process(VictimProcess.ACTIVATOR)
    (installation.data / "hold").write_text("synced")
    call = installation.call(TOKENS)
    held = HeldOperation(call, lambda: call.is_finished() and not call.is_over(), runtime, [activator])
    with contextlib.closing(held):
        wait(lambda: activator.status() == psutil.STATUS_STOPPED, "the activator stopped before the last byte")
        call.wait_for(call.is_finished, "the text is whole")
        yield held


@contextlib.contextmanager
def report(installation: DrillInstallation, models: TinyModels) -> Iterator[HeldOperation]:
    """A request is over and its record is durable. The control plane is stopped, so neither ledger nor bill has it."""
    runtime = installation.replica_at_work()
    control = installation.process(VictimProcess.CONTROL_PLANE)
    control.suspend()
    call = installation.call(10)
    held = HeldOperation(call, call.is_over, runtime, [control], beside=call)
    with contextlib.closing(held):
        call.wait_for(call.is_over, "it is answered without a control plane")
        if call.outcome() != ANSWERED:
            raise PreconditionFailed(f"without a control plane a request is {call.outcome()}")
        bill = installation.billing()
        held.operation, held.again = bill, installation.billing
        held.is_there = lambda: control.status() == psutil.STATUS_STOPPED and not bill.is_over()
        installation.wait_for_connection(bill.pid)
        yield held


def sent(data: Path) -> int:
    """Return how many chunks of weights open pushes have sent. Small files come with the plan."""
    found = 0
    for push in (data / "staging").glob("*/[!.]*/"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            small = json.loads((push / "plan.json").read_bytes())["file_digests"]
            found += sum(path.name not in small for path in (push / "chunks").glob("[!.]*"))
    return found


def drafts(data: Path) -> list[Path]:
    """Return the versions that wait to be sealed."""
    return list((data / "store").glob("*/drafts/[0-9a-f]*"))


STAGE_CONTEXTS: Final[
    Mapping[Stage, Callable[[DrillInstallation, TinyModels], AbstractContextManager[HeldOperation]]]
] = {
    Stage.UPLOAD: upload,
    Stage.SEAL: seal,
    Stage.RESTORE: restore,
    Stage.QUEUED: queued,
    Stage.PREFILL: prefill,
    Stage.DECODE: decode,
    Stage.LAST_BYTE: last_byte,
    Stage.REPORT: report,
}
