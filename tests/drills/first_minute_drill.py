"""Kill processes in the first minute: before the first key, version, lease and record, and while each is made.

An installation has each of these moments once, so each process is killed on its own installations. Two of them pass
through all stages (`CHAINS`): after a drilled stage its operation has succeeded, and the next stage continues from
there.
"""

import calendar
import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import psutil

from coldstart_bench.clock import SteppedClock
from coldstart_bench.harness.request_outcome import (
    ANSWERED,
    GONE,
    NOT_CONCERNED,
    RequestEnd,
    RequestOutcome,
    bill_totals_of,
)
from kelvin.contracts.accounting.usage import KILLED
from tests.drills import leftovers
from tests.drills.bill_checks import outcome_problems
from tests.drills.drill_installation import SERVED, DrillInstallation, wait
from tests.drills.drill_models import TinyModels
from tests.drills.matrix import FirstStage, VictimProcess, first_expected
from tests.drills.operations import KelvinCommand, Operation, PreconditionFailed
from tests.drills.stage_drill import (
    ENDS_INSTALLATION,
    DrillContext,
    billed,
    check_group,
    choose_victims,
    kill,
    run_cell,
)
from tests.drills.stages import STAGED, HeldOperation, decode, drafts, sent, waiting_for_lease

# One installation has the first push, request and record, the other the moments before them.
CHAINS: Final = (
    (FirstStage.START, FirstStage.BEFORE_PUSH, FirstStage.BEFORE_LEASE, FirstStage.CLOSING),
    (FirstStage.START, FirstStage.PUSH, FirstStage.REQUEST, FirstStage.RECORD),
)
SERVICES: Final = 6  # processes that the supervisor starts by itself
HOUR_S: Final = 3600


class StageMissed(PreconditionFailed):
    """The operation was not at its stage when the kill was due."""


@dataclass(slots=True)
class HeldFirstStage:
    """A first stage. `held` is the operation in progress. Without it, `again` starts one after the kill."""

    is_there: Callable[[], bool]
    held: HeldOperation | None = None
    again: Callable[[], Operation] | None = None


class StartingInstallation:
    """`kelvin up`, until it is ready."""

    def __init__(self, installation: DrillInstallation) -> None:
        self._ground = installation
        self.pid = installation.begin()
        self._outcome: RequestOutcome | None = None

    def __repr__(self) -> str:
        return f"<Starting pid={self.pid} {self._outcome or ''}>"

    def is_over(self) -> bool:
        return self._outcome is not None

    def outcome(self) -> RequestOutcome:
        if self._outcome is None and self._ground.wait_ready():
            self._outcome = ANSWERED
        elif self._outcome is None:
            if self._ground.wait_exit() != KILLED:
                raise PreconditionFailed(f"`kelvin up` is not ready: {self._ground.errors.read_text()[-800:]}")
            self._outcome = GONE
        return self._outcome

    def endings(self) -> Sequence[RequestEnd]:
        return ()

    def close(self) -> None:
        """See `Operation`. The installation goes on."""


@contextlib.contextmanager
def start(installation: DrillInstallation, models: TinyModels) -> Iterator[HeldFirstStage]:
    """The data directory does not exist yet, and `kelvin up` starts."""
    # The victim is killed as soon as it exists.
    held = HeldOperation(StartingInstallation(installation), lambda: True, None)
    yield HeldFirstStage(held.is_there, held)


@contextlib.contextmanager
def before_push(installation: DrillInstallation, models: TinyModels) -> Iterator[HeldFirstStage]:
    """All processes are idle, and no version was ever pushed."""
    yield HeldFirstStage(
        lambda: not _has_versions(installation), again=lambda: installation.push(models.served, SERVED)
    )


@contextlib.contextmanager
def push(installation: DrillInstallation, models: TinyModels) -> Iterator[HeldFirstStage]:
    """Some chunks of the first push are staged, and the push is still sending."""
    running = installation.push(models.served, SERVED, "96K")
    held = HeldOperation(running, lambda: not running.is_over() and not drafts(installation.data), None)
    with contextlib.closing(held):
        wait(lambda: sent(installation.data) >= STAGED or running.is_over(), "chunks are staged")
        yield HeldFirstStage(held.is_there, held, lambda: installation.push(models.served, SERVED))


@contextlib.contextmanager
def before_lease(installation: DrillInstallation, models: TinyModels) -> Iterator[HeldFirstStage]:
    """A version exists, and none of its bytes was ever read."""
    yield HeldFirstStage(lambda: not installation.replicas(), again=lambda: installation.call(10))


@contextlib.contextmanager
def request(installation: DrillInstallation, models: TinyModels) -> Iterator[HeldFirstStage]:
    """The first request waits for the first lease."""
    with waiting_for_lease(installation) as held:
        yield HeldFirstStage(held.is_there, held, lambda: installation.call(10))


@contextlib.contextmanager
def record(installation: DrillInstallation, models: TinyModels) -> Iterator[HeldFirstStage]:
    """A month has begun while a replica was idle, and the request of its first record has some tokens."""
    next_month(installation, 10)
    with decode(installation, models) as held:
        yield HeldFirstStage(lambda: held.is_there() and not bill_totals_of(installation.bill()).requests, held)


@contextlib.contextmanager
def closing(installation: DrillInstallation, models: TinyModels) -> Iterator[HeldFirstStage]:
    """The first month with a record is over, and its closing has begun. The control plane is stopped."""
    month = installation.month
    next_month(installation, 2 * HOUR_S)
    runtime, control = installation.replica(), installation.process(VictimProcess.CONTROL_PLANE)

    def close() -> KelvinCommand:
        return KelvinCommand(["billing", "close", "--month", month, "--data", str(installation.data)])

    control.suspend()
    command = close()
    held = HeldOperation(
        command, lambda: control.status() == psutil.STATUS_STOPPED and not command.is_over(), runtime, [control]
    )
    with contextlib.closing(held):
        installation.wait_for_connection(command.pid)
        yield HeldFirstStage(held.is_there, held, close)


def next_month(installation: DrillInstallation, seconds: int) -> None:
    """Step the clock into the next month, once all earlier requests are on the bill and a replica is idle."""
    installation.replica_at_work()
    if wrong := installation.settle_bill([]):
        raise PreconditionFailed(f"before the month ends: {wrong}")
    now_s = time.time()
    today = time.gmtime(now_s)
    begins_s = calendar.timegm((today.tm_year, today.tm_mon + 1, 1, 0, 0, 0))
    installation.step(int(begins_s - now_s) + seconds)


def _has_versions(installation: DrillInstallation) -> bool:
    return any((installation.data / "store").glob("*/manifests/*"))


FIRST_STAGE_CONTEXTS: Final[
    Mapping[FirstStage, Callable[[DrillInstallation, TinyModels], AbstractContextManager[HeldFirstStage]]]
] = {
    FirstStage.START: start,
    FirstStage.BEFORE_PUSH: before_push,
    FirstStage.PUSH: push,
    FirstStage.BEFORE_LEASE: before_lease,
    FirstStage.REQUEST: request,
    FirstStage.RECORD: record,
    FirstStage.CLOSING: closing,
}


def drill_first_stage(
    installation: DrillInstallation, models: TinyModels, stage: FirstStage, process: VictimProcess | None
) -> tuple[RequestOutcome, list[str]]:
    """Kill the process at the stage, if one is given. Return the client's outcome and all problems.

    Raises StageMissed.
    """
    wrong: list[str] = []
    with FIRST_STAGE_CONTEXTS[stage](installation, models) as first:
        if process is not None:
            _kill_when_there(installation, process, first)
        # A replica that stays stopped would make the activator cut its stream, as no drain reaches it.
        if process is VictimProcess.SUPERVISOR and stage is not FirstStage.RECORD:
            _wait_for_orphans(installation)
        if first.held is not None:
            first.held.release()
        if stage is FirstStage.START:
            seen, endings = _ended(first)  # before it is started again
        if process in ENDS_INSTALLATION:
            installation.restart()
        if stage is not FirstStage.START:
            seen, endings = _ended(first)
        installation.wait_until_whole()
        if seen != ANSWERED and first.again is not None:
            repeated, more = _ended(HeldFirstStage(first.is_there, None, first.again))
            endings += more
            wrong += [] if repeated == ANSWERED else [f"the same again is {repeated}"]
    if stage in (FirstStage.BEFORE_PUSH, FirstStage.PUSH):
        installation.call_admin("PUT", f"/admin/v1/models/{SERVED}/scale", {"max": 1})
    elif stage is not FirstStage.START:
        installation.expect_answer()
    return seen, wrong + installation.settle_bill(billed(process, endings))


def _kill_when_there(installation: DrillInstallation, process: VictimProcess, first: HeldFirstStage) -> None:
    dying: list[psutil.Process] = []

    def is_there() -> bool:
        with contextlib.suppress(PreconditionFailed, psutil.Error):
            dying[:] = choose_victims(installation, process, first.held)
            return process not in ENDS_INSTALLATION or len(installation.all_processes()) > SERVICES
        return False

    wait(is_there, f"{process} is there to be killed")
    installation.record_processes()
    if not first.is_there():
        raise StageMissed("the operation was not at its stage")
    kill(dying)


def _wait_for_orphans(installation: DrillInstallation) -> None:
    """Wait until the processes that are not held have ended. Otherwise their order would depend on chance."""
    held = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)

    def are_gone() -> bool:
        return all(_status(process) in held for process in installation.recorded_processes())

    wait(are_gone, "the processes of a supervisor that was killed end")


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def _ended(first: HeldFirstStage) -> tuple[RequestOutcome, list[RequestEnd]]:
    """Wait for the operation. Start it now if it is not in progress."""
    if first.held is not None:
        return first.held.operation.outcome(), list(first.held.operation.endings())
    assert first.again is not None
    with contextlib.closing(first.again()) as operation:
        return operation.outcome(), list(operation.endings())


def drill_first(context: DrillContext, process: VictimProcess, wanted: Collection[FirstStage]) -> None:
    """Kill the process at each of these stages, then run the closing checks."""
    left = [stage for stage in wanted if first_expected(process, stage) != NOT_CONCERNED]
    for number, chain in enumerate(CHAINS):
        stages = [stage for stage in chain if stage in left]
        left = [stage for stage in left if stage not in stages]
        if stages:
            reached = max(
                2, chain.index(stages[-1]) + 1
            )  # at least as far as the push: the closing checks use its model
            _drill_chain(context, process, chain[:reached], stages, f"{process}-{number}")


def _drill_chain(
    context: DrillContext,
    process: VictimProcess,
    chain: Sequence[FirstStage],
    drilled: Collection[FirstStage],
    name: str,
) -> None:
    """Pass through the chain. After a cell of unknown outcome, a new installation continues without that kill."""
    shared, tries = leftovers.shared_memory(), count(1)
    done: set[FirstStage] = set()
    while True:
        with _installation(context.work / f"{name}-{next(tries)}") as installation:
            for stage in chain:
                if stage in done or stage not in drilled:
                    drill_first_stage(installation, context.models, stage, None)
                    continue
                result = run_cell(f"{process}/{stage}", partial(_cell, installation, context.models, stage, process))
                done.add(stage)
                context.tell(result)
                if result.seen is None:
                    break  # the state of the installation is unknown
            else:
                context.tell(run_cell(f"after {name}", partial(check_group, installation, shared)))
                return
            if done >= set(drilled):
                return


def _cell(
    installation: DrillInstallation, models: TinyModels, stage: FirstStage, process: VictimProcess
) -> tuple[RequestOutcome, list[str]]:
    seen, wrong = drill_first_stage(installation, models, stage, process)
    return seen, outcome_problems(first_expected(process, stage), seen) + wrong


@contextlib.contextmanager
def _installation(place: Path) -> Iterator[DrillInstallation]:
    """Yield an installation without a data directory, but with a clock."""
    place.mkdir(parents=True)
    installation = DrillInstallation(place / "data", clock=SteppedClock(place / "clock"))
    try:
        yield installation
    finally:
        installation.abandon()
