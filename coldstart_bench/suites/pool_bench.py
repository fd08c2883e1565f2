"""`kelvin bench pool`: time the first token from zero, by starting a pod of the version and by binding a waiting pod.

Both use the same version and store and real processes, in turn within one run. Steps common to both are left out: the
first request's report, the decision, and passing an order to a cluster. Steps of a pod's start alone are left out, too:
scheduler, image, sandbox. So the real ratio is larger.
"""

import http.client
import json
import os
import shutil
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from coldstart_bench.harness.capacity_check import ResourceNeed, find_shortage
from coldstart_bench.harness.installation import (
    InstallationFailed,
    free_port,
    free_ports,
    running_installation,
    translate_call_errors,
)
from coldstart_bench.harness.machine_state import load_1m
from coldstart_bench.harness.polling import poll_until_true
from coldstart_bench.harness.process_stats import IdleDetector, child_commands, cpu_ticks
from coldstart_bench.harness.program_runner import make_model
from coldstart_bench.harness.service_runner import running_service
from coldstart_bench.harness.temporary_certificates import make_inner
from coldstart_bench.report.bench_report import ClaimVerdict, Figures, MissingFigure, at_least, ratio_or_none
from coldstart_bench.report.cold_report import ColdRow, cold_rows, table
from coldstart_bench.suites.bench_runner import Bench, BenchPlan, option
from kelvin.contracts.artifacts.runtime_control import BindPodRequest
from kelvin.contracts.roles import Role
from kelvin.contracts.serving.stream_frames import FrameDecoder, FrameKind
from kelvin.contracts.wire import encode
from kelvin.process.option_types import FiniteNumber
from kelvin.process.python_command import python_command

OWN, WAITING = "a Service of its own", "a pod that waits"
TIMES: Final = 5.0
CLASS: Final = "cpu-1"
HOST: Final = "127.0.0.1"
PROBE: Final = {"k-network-probe": "queue"}
BODY: Final = {"prompt": [1, 2, 3, 4], "max_tokens": 1, "temperature": 0, "stream": True}
CALL_S: Final = 120.0
NEED: Final = ResourceNeed(disk_times=5.0, memory_times=4.0)
TENANT, MODEL = "default", "bench"
PARK_S: Final = 60.0
NOTE: Final = (
    "no cluster: both lack the time of its control plane, and the start of a pod lacks scheduling, image and sandbox; "
    "both read the store through an empty cache of their own, and the store's files may be in the page cache"
)


class PoolFigures(Figures, frozen=True):
    """Times to the first token of both systems."""

    size_bytes: int
    rows: tuple[ColdRow, ...]


def judge(figures: PoolFigures) -> tuple[ClaimVerdict, ...]:
    """Judge how much sooner the first token arrives. The claim does not decide."""
    medians = {row.system: row.median_s for row in figures.rows}
    times = ratio_or_none(medians.get(OWN), medians.get(WAITING))
    claim = "first token from zero, a pod's start to a bind"
    return (at_least(claim, times, TIMES, "", figures.size_bytes, decides=False),)


@dataclass(frozen=True, slots=True)
class PodConfig:
    """Common settings of all pods of a run: parent directory, store URL, environment, certificates."""

    place: Path
    store: str
    settings: Mapping[str, str]
    inner: Path


@contextmanager
def running_pod(config: PodConfig, version: str, name: str) -> Iterator[int]:
    """Start a pod of the version and yield its port once it takes requests. Its files are removed after the block."""
    port = free_port()
    words = [version, "--tenant", TENANT, "--model", MODEL]
    with _pod(config, words, name, port, {}, lambda: _takes_requests(port)):
        yield port


@dataclass(frozen=True, slots=True)
class ParkedPod:
    """A standby pod. `pid` is its supervisor's."""

    port: int
    orders: int
    pid: int
    inner: Path

    def bind(self, take: BindPodRequest) -> None:
        """Bind a version. Returns once the pod serves it. Raises InstallationFailed."""
        self._order("POST", "/control/bind", encode(take))

    def release(self, take: BindPodRequest) -> None:
        """Release the version. Returns before the pod waits again. Raises InstallationFailed."""
        self._order("POST", "/control/release", encode(take))

    def waits(self) -> bool:
        """Return whether the pod would accept a version now."""
        try:
            return bool(json.loads(self._order("GET", "/control/state"))["state"] == "standby")
        except InstallationFailed:
            return False

    def _order(self, method: str, path: str, body: bytes | None = None) -> bytes:
        tls, own = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), self.inner / Role.CONTROLPLANE
        tls.check_hostname = False  # the role in the certificate is checked instead
        tls.load_verify_locations(own / "ca.crt")
        tls.load_cert_chain(own / "tls.crt", own / "tls.key")
        return _call(http.client.HTTPSConnection(HOST, self.orders, timeout=CALL_S, context=tls), method, path, body)


@contextmanager
def running_parked_pod(config: PodConfig, name: str) -> Iterator[ParkedPod]:
    """Start a standby pod and yield it once it waits. Its files are removed after the block."""
    port, orders = free_ports(2)
    more = {"KELVIN_STANDBY_LISTEN": f"{HOST}:{orders}", "KELVIN_INNER_TLS": str(config.inner)}
    parked = ParkedPod(port, orders, 0, config.inner)
    with _pod(config, ["--standby", CLASS], name, port, more, parked.waits) as pid:
        yield ParkedPod(port, orders, pid, config.inner)


@contextmanager
def _pod(
    config: PodConfig, words: list[str], name: str, port: int, more: Mapping[str, str], is_ready: Callable[[], bool]
) -> Iterator[int]:
    at = config.place / name
    at.mkdir()
    command = [
        *python_command("kelvin.cli.main"),
        "runtime",
        *words,
        "--threads",
        "1",
        "--store",
        config.store,
    ]
    command += ["--host", HOST, "--port", str(port), "--data", str(at / "data")]
    environment = {**os.environ, **config.settings, **more}
    try:
        with running_service(command, environment, at / "said", is_ready, f"the pod {name}") as pid:
            yield pid
    finally:
        shutil.rmtree(at, ignore_errors=True)  # its cache holds a copy of the model


def _takes_requests(port: int) -> bool:
    """Probe the pod as an activator does before the cluster reports the pod ready."""
    connection = http.client.HTTPConnection(HOST, port, timeout=CALL_S)
    try:
        return _call(connection, "GET", "/healthz", None, PROBE) == b"queue"
    except InstallationFailed:
        return False


def first_token(port: int) -> tuple[float, str]:
    """Return when the first token arrived (`time.perf_counter`), and its text. Reads the answer to its end. Raises
    InstallationFailed.
    """
    connection = http.client.HTTPConnection(HOST, port, timeout=CALL_S)
    with closing(connection), translate_call_errors(connection, "a completion of a pod"):
        connection.request("POST", "/v1/completions", json.dumps(BODY), {"x-kelvin-request-id": "bench"})
        answer, frames, came_s, text = connection.getresponse(), FrameDecoder(), 0.0, ""
        while part := answer.read1():
            for frame in frames.feed(part):
                if frame.kind is FrameKind.DATA and not came_s:
                    came_s, text = time.perf_counter(), _text(frame.payload)
        if not came_s:
            raise InstallationFailed(f"a pod answered {answer.status} without a token")
        return came_s, text


def _text(payload: bytes) -> str:
    event = payload.split(b"\n", 1)[0].removeprefix(b"data: ")
    return str(json.loads(event)["choices"][0]["text"])


def _call(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    with closing(connection), translate_call_errors(connection, f"{method} {path}"):
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        raw = answer.read()
    if answer.status >= 400:
        raise InstallationFailed(f"{method} {path}: {answer.status} {raw.decode(errors='replace')[:500]}")
    return raw


@dataclass(frozen=True, slots=True)
class PoolPlan(BenchPlan):
    """Options of `kelvin bench pool`."""

    size_bytes: int
    repeats: int
    seed: int = 1


def refusal(plan: PoolPlan, free_disk: int, free_memory: int) -> str | None:
    """Return why disk or memory do not suffice, or None."""
    return find_shortage(NEED.disk(plan.size_bytes), NEED.memory(plan.size_bytes), free_disk, free_memory)


def run(plan: PoolPlan, scratch: Path) -> PoolFigures:
    """Run the bench. Raises InstallationFailed, ProgramFailed."""
    seconds: dict[str, list[float]] = {OWN: [], WAITING: []}
    config, take = _make_sealed_version(plan, scratch)
    with running_parked_pod(config, "parked") as parked:
        texts: set[str] = set()
        for turn in range(plan.repeats):
            plan.tell(f"round {turn + 1} of {plan.repeats}, load {load_1m():.2f}")
            for system in (OWN, WAITING) if turn % 2 == 0 else (WAITING, OWN):
                _wait_idle(parked)
                took_s, text = _time_own_pod(config, take, turn) if system == OWN else _time_parked_pod(parked, take)
                seconds[system].append(took_s)
                texts.add(text)
    rows = cold_rows({(plan.size_bytes, "store", system): each for system, each in seconds.items()})
    others = MissingFigure(WAITING, f"other tokens than a pod of its own: {sorted(texts)}", plan.size_bytes)
    return PoolFigures(plan.size_bytes, rows, failures=() if len(texts) == 1 else (others,), notes=(NOTE,))


def _make_sealed_version(plan: PoolPlan, scratch: Path) -> tuple[PodConfig, BindPodRequest]:
    """Push and seal a version, then stop its installation. Return the pods' settings and the bind request."""
    plan.tell("making and pushing a model")
    make_model(scratch / "model", plan.size_bytes, plan.seed)
    settings = {"KELVIN_HOST_BYTES": str(plan.size_bytes + plan.size_bytes // 8 + (1 << 29))}
    with running_installation(scratch / "data", settings=settings) as kelvin:
        kelvin.push(scratch / "model", MODEL)
        (version,) = [each["version"] for each in kelvin.model(MODEL)["versions"]]
    make_inner(scratch / "inner", (Role.CONTROLPLANE, Role.RUNTIME))
    (scratch / "pods").mkdir()
    store = (scratch / "data" / "store").as_uri()
    take = BindPodRequest(tenant=TENANT, model=MODEL, version=version, device_class=CLASS, store=store, weight_bytes=0)
    return PodConfig(scratch / "pods", store, settings, scratch / "inner"), take


def _time_own_pod(config: PodConfig, take: BindPodRequest, turn: int) -> tuple[float, str]:
    """Return the seconds from the start of the process to its first token, and the token's text."""
    began_s = time.perf_counter()
    with running_pod(config, take.version, f"own-{turn}") as port:
        came_s, text = first_token(port)
    return came_s - began_s, text


def _time_parked_pod(parked: ParkedPod, take: BindPodRequest) -> tuple[float, str]:
    """Return the seconds from the bind, including its handshake, to the first token, and the text. Then release."""
    began_s = time.perf_counter()
    parked.bind(take)
    came_s, text = first_token(parked.port)
    parked.release(take)
    return came_s - began_s, text


def _wait_idle(parked: ParkedPod) -> None:
    """Wait until the standby is parked and idle, so that a start is measured from rest."""
    rest = IdleDetector()
    # Two steps: probing the pod while its CPU time is sampled would keep it busy.
    if not poll_until_true(parked.waits, PARK_S) or not poll_until_true(
        lambda: rest.is_idle(cpu_ticks(child_commands(parked.pid)), time.monotonic()), PARK_S
    ):
        raise InstallationFailed(f"the pod is not at rest, {PARK_S:g} s after it was released")


BENCH: Final = Bench(
    "pool",
    """Time the first token from zero, by starting a pod and by binding a waiting pod.""",
    (
        option(
            "--size", 0.1, FiniteNumber(0.05, 22), "GB of the model.", "size_bytes", convert=lambda gb: int(gb * 1e9)
        ),
        option("--repeats", 7, click.IntRange(1, 1000), "Rounds."),
    ),
    PoolPlan,
    run,
    lambda found: table(found.rows),
    judge,
    refusal,
)
