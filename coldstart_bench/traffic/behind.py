"""One activator as it is run, replicas of a fixed speed behind it, and the open loop before it: each on its core."""

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from coldstart_bench.front_tools import on_core
from coldstart_bench.installation import free_port
from coldstart_bench.patience import comes
from coldstart_bench.programs import Program
from coldstart_bench.services import activator
from coldstart_bench.traffic.exchange import Payload, Plan, Ran
from contracts.usage import RequestRecord
from contracts.wire import decoder

MODEL: Final = "m"
PATIENT: Final = {"KELVIN_HEAD_S": "60"}  # connections that are open before the beginning say nothing for a while
RECORDED_S: Final = 20.0
BEYOND_S: Final = 120.0  # what the open loop takes beside the plan: connections, and the report
TWO_CORES_NOTE: Final = "the activator has a core to itself; the open loop and the replicas share another one"
ONE_CORE_NOTE: Final = "one core for all: times say nothing"


class Behind(msgspec.Struct, frozen=True):
    """What is behind the activator: `slots` at once, each taken for `slot_s` and so much for each token."""

    keys: dict[str, str]  # of each tenant; the first owns the model
    slots: int
    slot_s: float
    prompt_token_s: float = 0.0
    token_s: float = 0.0


class Seen(msgspec.Struct, frozen=True):
    """What the replicas answered, how many they had at once, and the records that were shipped."""

    answered: int
    most_inside: int
    records: tuple[RequestRecord, ...]


def keys_for(tenants: Sequence[str]) -> dict[str, str]:
    """One for each, as they look."""
    return {tenant: f"kv-benchbenchbe-{secrets.token_hex(21)}" for tenant in tenants}


def room_for(requests: int) -> dict[str, str]:
    """Settings of an activator that refuses none of so many."""
    limits = ("QUEUE_REQUESTS", "QUEUE_REQUESTS_PER_TENANT", "QUEUE_REQUESTS_IN_ALL", "CONNECTIONS", "REQUESTS")
    return PATIENT | {f"KELVIN_{limit}": str(requests) for limit in limits}


def cores() -> tuple[int, int]:
    """For who is measured, and for all others; the same where there is one."""
    mine = sorted(os.sched_getaffinity(0))
    return mine[0], mine[-1]


def cores_note() -> str:
    """Of this machine."""
    return ONE_CORE_NOTE if cores()[0] == cores()[1] else TWO_CORES_NOTE


class Door:
    """An activator that is ready; `pid` is its process."""

    def __init__(self, scratch: Path, port: int, pid: int, upstream: Program) -> None:
        self.port, self.pid = port, pid
        self._scratch, self._upstream = scratch, upstream

    def seen(self, records: int) -> Seen:
        """Once so many records were shipped; the last of them are given time."""
        comes(lambda: int(self._upstream.ask()["records"]) >= records, RECORDED_S)
        into = self._scratch / "seen"
        self._upstream.ask(into=str(into))
        return decoder(Seen).decode(into.read_bytes())


@contextmanager
def standing(scratch: Path, behind: Behind, settings: Mapping[str, str]) -> Iterator[Door]:
    """Until the block ends. Raises InstallationFailed, PeerFailed."""
    data, (front, rest), port = scratch / "data", cores(), free_port()
    (data / "run").mkdir(parents=True, mode=0o700)
    (scratch / "behind").touch(mode=0o600)
    (scratch / "behind").write_bytes(msgspec.json.encode(behind))
    with ExitStack() as stack:
        with on_core(rest):
            upstream = stack.enter_context(Program("slotted_upstream", str(data), str(scratch / "behind")))
        with on_core(front):
            pid = stack.enter_context(activator(data, port, settings))
        yield Door(scratch, port, pid, upstream)


class Loop:
    """The open loop, a process of its own."""

    def __init__(self, scratch: Path, program: Program) -> None:
        self._scratch, self._program = scratch, program

    @property
    def pid(self) -> int:
        """Its process."""
        return self._program.pid

    def run(self, plan: Plan) -> Ran:
        """To the last answer, or to the end of its patience. Raises PeerFailed where there is no door."""
        asked, into = self._scratch / "plan", self._scratch / "ran"
        asked.touch(mode=0o600)
        asked.write_bytes(msgspec.json.encode(plan))
        last_s = (plan.arrivals[-1][0] if plan.arrivals else 0) / 1e6
        self._program.answer_s = last_s + plan.patience_s + BEYOND_S
        self._program.ask(plan=str(asked), into=str(into))
        return decoder(Ran).decode(into.read_bytes())

    def alone(self, port: int, payloads: Sequence[Payload], patience_s: float) -> Ran:
        """Each by itself: one after another, on one connection, by a client that reads at once."""
        quick = tuple(Payload(each.key, each.path, each.body, each.headers) for each in payloads)
        return self.run(Plan(port, quick, tuple((0, number) for number in range(len(quick))), 0, 1, patience_s))


@contextmanager
def looping(scratch: Path) -> Iterator[Loop]:
    """On the core of all but who is measured, until the block ends."""
    with on_core(cores()[1]):
        program = Program("open_loop")
    with program:
        yield Loop(scratch, program)
