"""Run an activator on its own core. Fake replicas of a fixed speed and the open loop share another core."""

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from coldstart_bench.harness.front_tools import on_core
from coldstart_bench.harness.installation import InstallationFailed, free_port
from coldstart_bench.harness.load_protocol import LoadResult, OpenLoopPlan, RequestTemplate
from coldstart_bench.harness.polling import poll_until_true
from coldstart_bench.harness.program_runner import Program
from coldstart_bench.harness.service_runner import running_activator_process
from kelvin.contracts.accounting.usage import RequestRecord
from kelvin.contracts.artifacts.manifest import Limits
from kelvin.contracts.serving.control_messages import Feed, KeyRow, ModelRow, ReplicaRow, Scope, TenantRow, VersionRow
from kelvin.contracts.wire import decoder, encode

MODEL: Final = "m"
VERSION: Final = "be" * 32
_LIMITS: Final = Limits(1 << 20, 1 << 20, 4096, 8 << 20)
# Connections that are opened before the load send nothing for a while.
LONG_HEAD_TIMEOUT: Final = {"KELVIN_HEAD_S": "60"}
RECORDED_S: Final = 20.0
EXTRA_ANSWER_S: Final = 120.0  # time of the open loop beyond the plan: connecting, and the report
TWO_CORES_NOTE: Final = "the activator has a core to itself; the open loop and the replicas share another one"
ONE_CORE_NOTE: Final = "all processes share one core: the times are meaningless"


class UpstreamConfig(msgspec.Struct, frozen=True):
    """The control plane and replicas behind the activator: the feed, and how long a completion occupies a slot. That is
    `slot_s` plus a time for each token. See `programs/fake_upstream.py`.
    """

    feed: Feed
    slot_s: float = 0.0
    prompt_token_s: float = 0.0
    token_s: float = 0.0  # also the time between tokens of a streamed chat
    keeps_records: bool = True  # if False, records are only counted


class UpstreamReport(msgspec.Struct, frozen=True):
    """Number of answers, largest number of requests at once, and the usage records that arrived."""

    answered: int
    most_inside: int
    records: tuple[RequestRecord, ...]


def keys_for(tenants: Sequence[str]) -> dict[str, str]:
    """Return an API key for each tenant, in the form of real keys."""
    return {tenant: f"kv-benchbenchbe-{secrets.token_urlsafe(32)}" for tenant in tenants}


def one_model(keys: Mapping[str, str], slots: int) -> Feed:
    """Return a feed of one model with one replica of `slots`. Its owner is the first tenant in `keys`."""
    owner, *guests = keys
    digests = {tenant: hashlib.sha256(key.encode()).hexdigest() for tenant, key in keys.items()}
    replica = ReplicaRow(
        runtime_id="slots",
        tenant=owner,
        model=MODEL,
        version=VERSION,
        address="rt-slots.sock",
        max_streams=slots,
        draining=False,
        restore=(),
    )
    return Feed(
        revision=1,
        full=True,
        tenants=tuple(TenantRow(each, suspended=False) for each in keys),
        keys=tuple(KeyRow(each, digest, each, (Scope.INFER,)) for each, digest in digests.items()),
        models=(ModelRow(owner, MODEL, {"prod": VERSION}, 1, grantees=tuple(guests)),),
        versions=(VersionRow(owner, MODEL, VERSION, _LIMITS, 1),),
        replicas=(replica,),
    )


def settings_for_requests(requests: int) -> dict[str, str]:
    """Return settings for an activator that accepts this many requests at once."""
    limits = ("QUEUE_REQUESTS", "QUEUE_REQUESTS_PER_TENANT", "QUEUE_REQUESTS_IN_ALL", "CONNECTIONS", "REQUESTS")
    return LONG_HEAD_TIMEOUT | {f"KELVIN_{limit}": str(requests) for limit in limits}


def cores() -> tuple[int, int]:
    """Return the core of the activator and the core of all other processes. They are the same on a one-core machine."""
    mine = sorted(os.sched_getaffinity(0))
    return mine[0], mine[-1]


def cores_note() -> str:
    """Return the report's note about this machine's cores."""
    return ONE_CORE_NOTE if cores()[0] == cores()[1] else TWO_CORES_NOTE


class ActivatorUnderTest:
    """A ready activator and its upstream. `pid` is the activator's process."""

    def __init__(self, scratch: Path, port: int, pid: int, upstream: Program) -> None:
        self.port, self.pid, self.upstream = port, pid, upstream
        self._scratch = scratch

    def upstream_report(self, records: int) -> UpstreamReport:
        """Return the upstream's report once it has `records` usage records, or after RECORDED_S."""
        poll_until_true(lambda: int(self.upstream.call()["recorded"]) >= records, RECORDED_S)
        report_file = self._scratch / "seen"
        self.upstream.call(into=str(report_file))
        return decoder(UpstreamReport).decode(report_file.read_bytes())


@contextmanager
def running_activator(
    scratch: Path, upstream_config: UpstreamConfig, settings: Mapping[str, str] | None = None
) -> Iterator[ActivatorUnderTest]:
    """Run an activator and its upstream until the block ends. Raises InstallationFailed, ProgramFailed."""
    port = free_port()
    with running_upstream(scratch, upstream_config) as upstream, ExitStack() as stack:
        with on_core(cores()[0]):
            pid = stack.enter_context(running_activator_process(scratch / "data", port, settings))
        yield ActivatorUnderTest(scratch, port, pid, upstream)


@contextmanager
def running_upstream(scratch: Path, upstream_config: UpstreamConfig) -> Iterator[Program]:
    """Run the upstream of an activator with the data directory `scratch/data`. Raises ProgramFailed."""
    data, config = scratch / "data", scratch / "behind"
    (data / "run").mkdir(parents=True, mode=0o700)
    config.touch(mode=0o600)
    config.write_bytes(encode(upstream_config))
    with on_core(cores()[1]):
        program = Program("fake_upstream", str(data), str(config))
    with program:
        yield program


class OpenLoopClient:
    """The open loop, which runs as a process of its own."""

    def __init__(self, scratch: Path, program: Program) -> None:
        self._scratch, self._program = scratch, program

    @property
    def pid(self) -> int:
        """Process id of the open loop."""
        return self._program.pid

    def run(self, plan: OpenLoopPlan) -> LoadResult:
        """Run a plan until the last response, or until its patience ends. Raises ProgramFailed."""
        plan_file, result_file = self._scratch / "plan", self._scratch / "ran"
        plan_file.touch(mode=0o600)
        plan_file.write_bytes(msgspec.json.encode(plan))
        last_s = (plan.arrivals[-1][0] if plan.arrivals else 0) / 1e6
        self._program.answer_s = last_s + plan.patience_s + EXTRA_ANSWER_S
        self._program.call(plan=str(plan_file), into=str(result_file))
        return decoder(LoadResult).decode(result_file.read_bytes())

    def reference_texts(self, port: int, payloads: Sequence[RequestTemplate], patience_s: float) -> list[str]:
        """Return the text of each payload when it is sent alone. Raises InstallationFailed if one is not answered."""
        return answer_texts(self.run_sequentially(port, payloads, patience_s))

    def run_sequentially(self, port: int, payloads: Sequence[RequestTemplate], patience_s: float) -> LoadResult:
        """Send the payloads one after another on one connection, with a client that reads at once."""
        quick = tuple(RequestTemplate(each.key, each.path, each.body, each.headers) for each in payloads)
        return self.run(OpenLoopPlan(port, quick, tuple((0, number) for number in range(len(quick))), 0, 1, patience_s))


def answer_texts(ran: LoadResult) -> list[str]:
    """Return the text of each answer. Raises InstallationFailed if one is missing or empty."""
    texts = ran.answers()
    if lacking := [text for sent, text in zip(ran.sent, texts, strict=True) if not sent.is_ok or not text]:
        raise InstallationFailed(f"before the load, {len(lacking)} of {len(texts)} had no answer: {lacking[0]}")
    return texts


@contextmanager
def running_open_loop(scratch: Path) -> Iterator[OpenLoopClient]:
    """Run the open loop, on the core that the activator does not use, until the block ends."""
    with on_core(cores()[1]):
        program = Program("open_loop")
    with program:
        yield OpenLoopClient(scratch, program)
