"""An installation under drill, seen as its operator sees it: `kelvin up`, HTTPS, the command line, and processes."""

import contextlib
import http.client
import json
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from coldstart_bench.clock import SteppedClock
from coldstart_bench.harness import polling
from coldstart_bench.harness.installation import (
    Installation,
    InstallationFailed,
    KelvinUpProcess,
    free_port,
    run_command,
)
from coldstart_bench.harness.request_outcome import (
    ANSWERED,
    BillBounds,
    BillTotals,
    RequestEnd,
    bill_differences,
    bill_totals_of,
)
from tests.drills.bill_checks import bounds_of_all, remaining, unexplained_imbalance
from tests.drills.matrix import VictimProcess
from tests.drills.operations import KelvinCommand, PreconditionFailed, PushCommand, StreamedRequests

SERVED: Final = "served"
STANDBYS: Final = 2
STALL_S: Final = 3
SETTINGS: Final = {
    "KELVIN_HOST_BYTES": str(256 << 20),
    "KELVIN_SLAB_BYTES": str(16 << 20),
    "KELVIN_NVME_BYTES": str(64 << 20),
    "KELVIN_KV_BYTES": str(64 << 20),
    "KELVIN_CHUNK_BYTES": str(16 << 10),  # so that a tiny model has many chunks
    "KELVIN_STANDBYS": str(STANDBYS),
    "KELVIN_DEVICE_SLOTS": "4",
    "KELVIN_STALL_S": str(STALL_S),
    "KELVIN_FILTERS": "on",
}
SETTLED_S: Final = 30.0
WAIT_S: Final = 60.0
AWAY: Final = (OSError, http.client.HTTPException, InstallationFailed)
_MODULES: Final = {
    VictimProcess.ACTIVATOR: "activator",
    VictimProcess.CONTROL_PLANE: "controlplane",
    VictimProcess.SNAPSHOTTER: "snapshotter",
    VictimProcess.CACHE: "weightcache",
    VictimProcess.ZYGOTE: "runtime.app.zygote",
    VictimProcess.FILTERS: "kelvin.filters",
}


def wait(condition: Callable[[], bool], what: str, limit_s: float = WAIT_S) -> None:
    """Wait until `condition()`. Raises PreconditionFailed with `what` after `limit_s`."""
    if not polling.poll_until_true(condition, limit_s):
        raise PreconditionFailed(f"after {limit_s:g} s it is not so that {what}")


class DrillInstallation:
    """A data directory and the installation on it, which is started again after each kill."""

    def __init__(
        self,
        data: Path,
        *,
        program: str = "kelvin.cli.main",
        settings: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        clock: SteppedClock | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """`settings` are added to the drills' own. `step` sets the `clock`. `prefix` is a command that runs `kelvin
        up`.
        """
        self.data, self.port = data, free_port()
        self._clock, self._ahead_s = clock, 0
        self._program, self._options, self._prefix = program, options, prefix
        self._settings = {**SETTINGS, **(settings or {}), **(clock.settings if clock else {})}
        self._process: KelvinUpProcess | None = None
        self._processes: list[psutil.Process] = []
        self._up: Installation | None = None
        self._counted = BillTotals()
        self._late = BillBounds()  # what the bill may still gain from requests that are already counted
        self._unrecorded = 0  # requests that a replica had counted when everything was killed
        self._due: list[RequestEnd] = []  # the drill's own requests since the last look at the bill

    def __repr__(self) -> str:
        return f"<DrillInstallation {self.data} pid={self._process.pid if self._process else None}>"

    @property
    def up(self) -> Installation:
        """The clients of its APIs."""
        assert self._up is not None
        return self._up

    def start(self) -> None:
        """Start `kelvin up` and wait until it is ready."""
        self.begin()
        if not self.wait_ready():
            self.wait_exit()
            raise PreconditionFailed(f"`kelvin up` is not ready: {self.errors.read_text()[-800:]}")

    @property
    def errors(self) -> Path:
        """The file with the standard error of `kelvin up`."""
        return self.data.parent / f"{self.data.name}.errors"

    def begin(self) -> int:
        """Start `kelvin up` and return its process id."""
        self.data.parent.mkdir(parents=True, exist_ok=True)
        if self._process is not None:
            self._process.close()
        self._process = KelvinUpProcess(
            self.data, self.port, self._settings,
            options=self._options, program=self._program, prefix=self._prefix, errors=self.errors,
        )  # fmt: skip
        return self._process.pid

    def wait_ready(self) -> bool:
        """Wait until it reports that it is ready, or ends. Return whether it is ready."""
        assert self._process is not None
        if "ready" not in self._process.ready_line():
            return False
        self.connect()
        return True

    def connect(self) -> None:
        """Connect with the keys that are in the data directory now."""
        assert self._process is not None
        self._up = Installation(self.data, self.port, self._process.pid)

    def count_from(self, totals: BillTotals) -> None:
        """Set the totals that the bill has already, for a directory that another installation used before."""
        self._counted = totals

    def wait_exit(self) -> int:
        """Wait for the end of `kelvin up`. Return its exit status."""
        assert self._process is not None
        return self._process.wait_exit()

    def step(self, seconds: int) -> None:
        """Set the installation's wall clock ahead of this process's clock. A new month starts with an empty bill."""
        assert self._clock is not None
        before = self.month
        self._clock.step(seconds)
        self._ahead_s = seconds
        if self.month != before:
            self._counted, self._late = BillTotals(), BillBounds()

    @property
    def month(self) -> str:
        """The calendar month of the installation's clock."""
        return time.strftime("%Y-%m", time.gmtime(time.time() + self._ahead_s))

    def stop(self) -> None:
        """Stop it with SIGTERM. It must exit with 0, and no process may be left."""
        self.record_processes()
        assert self._process is not None
        # The activator would wait for the TLS close of our idle connections, which we read only with the next
        # response.
        self.up.close()
        self._process.send(signal.SIGTERM)
        status = self.wait_exit()
        self.wait_processes_gone()
        if status != 0:
            raise PreconditionFailed(f"`kelvin up` ended with {status}")

    def restart(self) -> None:
        """Start again after the supervisor's death, once all other processes have ended by themselves."""
        self.wait_processes_gone()
        self.start()

    def abandon(self) -> None:
        """Kill every process that is left."""
        if self._up is not None:
            self._up.close()
        self.record_processes()
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process is not None:
            self._process.send(signal.SIGKILL)
            self._process.close()

    def call_admin(self, method: str, path: str, body: object | None = None) -> Any:
        """Call the admin API. Raises one of AWAY if it does not answer."""
        try:
            return self.up.admin.request(method, path, body)
        except AWAY:
            self.up.admin.close()  # a broken-off exchange must not be continued on it
            raise

    def kelvin(self, *words: str) -> tuple[int, str, str]:
        """Run a command to its end. Return its exit code, standard output and standard error."""
        # The command gets the settings, too: it reads some of them. Its clock is not stepped.
        return run_command(self.data, *words, settings=self._settings, limit_s=2 * WAIT_S)

    def push(self, directory: Path, model: str, rate: str = "16M") -> PushCommand:
        return PushCommand(directory, model, self.data, rate)

    def call(
        self, tokens: int, *, times: int = 1, prompt: str = "w1 w2 w3", pace_s: float = 0.0, port: int | None = None
    ) -> StreamedRequests:
        """Start requests to the served model."""
        body = {"model": SERVED, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return StreamedRequests(self.address(port), body, times, pace_s)

    def address(self, port: int | None = None) -> dict[str, Any]:
        """Return the address and the key for an outside client."""
        key = (self.data / "default.key").read_text().strip()
        return {"port": port or self.port, "ca": str(self.data / "ca.pem"), "key": key}

    def replicas(self, model: str = SERVED, *states: str) -> list[dict[str, Any]]:
        """Return the replicas of all versions of the model, in these states or in any."""
        versions = self.call_admin("GET", f"/admin/v1/models/{model}")["versions"]
        rows = [row for version in versions for row in version["replicas"]]
        return [row for row in rows if not states or row["state"] in states]

    def replica_row(self, state: str = "ready") -> dict[str, Any]:
        """Wait until the served model has exactly one replica, in that state. Return its row."""
        found: list[dict[str, Any]] = []

        def is_alone() -> bool:
            found[:] = self.replicas()
            return len(found) == 1 and found[0]["state"] == state

        wait(is_alone, f"one replica is {state}")
        return found[0]

    def replica(self, state: str = "ready") -> psutil.Process:
        """Return the process of `replica_row`."""
        return psutil.Process(self.replica_row(state)["pid"])

    def standbys(self, runtime: psutil.Process | None) -> list[psutil.Process]:
        """Return the processes that have a meter page, except `runtime`."""
        waiting = self._metered() - ({runtime.pid} if runtime else set())
        return [child for child in self._children() if child.pid in waiting]

    def replica_at_work(self) -> psutil.Process:
        """Return the process of the served model's replica. Wake it first if none is ready."""
        if not self.replicas(SERVED, "ready"):
            self.expect_answer()
        return self.replica()

    def all_processes(self) -> list[psutil.Process]:
        """Return the supervisor and every process below it."""
        supervisor = self.process(VictimProcess.SUPERVISOR)
        return [supervisor, *supervisor.children(recursive=True)]

    def process(self, which: VictimProcess) -> psutil.Process:
        """Return the process of that service. The zygote is the process of its module that has no meter page."""
        if which is VictimProcess.SUPERVISOR:
            assert self._process is not None
            return psutil.Process(self._process.pid)
        metered = self._metered()
        module = _MODULES[which]
        for child in self._children():
            words = _words(child)
            if len(words) == 4 and words[3].endswith(module) and child.pid not in metered:
                return child
        raise PreconditionFailed(f"no {which} runs")

    def wait_until_whole(self) -> None:
        """Wait until every process is healthy and ready, and enough standbys are parked."""

        def is_whole() -> bool:
            try:
                found = self.call_admin("GET", "/admin/v1/status")
            except AWAY:
                return False
            ready = all(row["healthy"] and row["ready"] for row in found["processes"])
            return bool(ready and found["device"] and found["device"]["standbys"] >= STANDBYS)

        wait(is_whole, "every process is ready, and the standbys are parked")
        self.record_processes()

    def scale_to_zero(self) -> None:
        """Stop the served model, and wait until it has no replica."""

        def is_at_zero() -> bool:
            try:
                self.call_admin("POST", f"/admin/v1/models/{SERVED}/stop")
                return not self.replicas()
            except AWAY:
                return False

        wait(is_at_zero, "the model is at zero")

    def bill(self) -> Any:
        """Return this month's bill."""
        return self.call_admin("GET", f"/admin/v1/billing/report?month={self.month}")

    def settle_bill(self, endings: Iterable[RequestEnd]) -> list[str]:
        """Return the problems of the bill once it had time to include these requests. Later calls count from here."""
        endings = [*endings, *self._due]
        bounds = bounds_of_all(endings) + self._late
        self._unrecorded += sum(each.unrecorded and each.words > 0 for each in endings)
        self._due.clear()
        found = BillTotals()

        def amiss() -> list[str]:
            nonlocal found
            with contextlib.suppress(*AWAY):
                found = bill_totals_of(self.bill())
                return bill_differences(self._counted, found, bounds)
            return ["the bill can't be asked for"]

        wrong = polling.remaining(amiss, SETTLED_S)
        self._late = BillBounds() if wrong else remaining(self._counted, found, bounds)
        self._counted = found
        return wrong

    def unsettled_changes(self) -> list[str]:
        """Return what the bill has gained since `settle_bill` without a request."""
        return bill_differences(self._counted, bill_totals_of(self.bill()), self._late)

    def balance_problems(self) -> list[str]:
        """Return the problems in `kelvin billing report` of this month, without requests that can have no record."""
        status, out, err = self.kelvin("billing", "report", "--format", "json", "--month", self.month)
        if status not in (0, 2):
            return [f"kelvin billing report ends with {status}: {err.strip()}"]
        return unexplained_imbalance(json.loads(out), self._unrecorded)

    def expect_answer(self) -> None:
        """Send the next request. Raises PreconditionFailed if it is not answered."""
        with self.call(3) as call:
            (ending,) = call.endings()
        self._due.append(ending)
        if ending.outcome != ANSWERED:
            raise PreconditionFailed(f"the next request is {ending.outcome}")

    def billing(self) -> KelvinCommand:
        """Start a command that reads the bill."""
        return KelvinCommand(["billing", "report", "--format", "json", "--data", str(self.data)])

    def wait_for_connection(self, client: int) -> None:
        """Wait until that process is connected to the activator."""

        def is_connected() -> bool:
            ends = psutil.Process(client).net_connections("tcp")
            return any(end.status == psutil.CONN_ESTABLISHED and end.raddr.port == self.port for end in ends)

        wait(is_connected, "the client is connected")

    def _children(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        try:
            return psutil.Process(self._process.pid).children()
        except psutil.NoSuchProcess:
            return []

    def _metered(self) -> set[int]:
        """Return the process ids of standbys and runtimes."""
        return {int(page.name.partition(".")[0]) for page in (self.data / "run" / "meters").glob("[0-9]*")}

    def recorded_processes(self) -> list[psutil.Process]:
        """Return the noted processes, dead or alive."""
        return list(self._processes)

    def record_processes(self) -> None:
        """Note the running processes. All of them must end with their supervisor."""
        known = {process.pid for process in self._processes}
        self._processes += [child for child in self._children() if child.pid not in known]

    def wait_processes_gone(self) -> None:
        """Wait for the end of every noted process. Raises PreconditionFailed."""
        self.wait_exit()
        if self._up is not None:
            self._up.close()
        _, alive = psutil.wait_procs(self._processes, timeout=WAIT_S)  # a process that is still loading ends later
        if alive:
            raise PreconditionFailed(
                f"processes outlive their supervisor: {[(each.pid, _words(each)) for each in alive]}"
            )
        self._processes.clear()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


@contextlib.contextmanager
def running_drill_installation(installation: DrillInstallation, directory: Path) -> Iterator[DrillInstallation]:
    """Start the installation and serve the model in that directory. The block's end kills what is left: call
    `installation.stop()` to check a clean end.
    """
    try:
        installation.start()
        first = installation.push(directory, SERVED)
        if first.outcome() != ANSWERED:
            raise PreconditionFailed(f"the first push is {first.outcome()}: {json.dumps(first.outputs())}")
        installation.call_admin("PUT", f"/admin/v1/models/{SERVED}/scale", {"max": 1})
        installation.expect_answer()
        wrong = installation.settle_bill([])
        if wrong:
            raise PreconditionFailed(f"the first request: {wrong}")
        yield installation
    finally:
        installation.abandon()
