"""A fake zygote and standbys for tests of the actuator: real sockets, real processes, no model. `live` runs the zygote.

It imitates `runtime.app.zygote` and the processes that it forks (kelvin/contracts/artifacts/runtime_control.py,
runtime/lifecycle/replica.py):
- One SEQPACKET message goes in; one comes out, with the pidfd of the fork.
- A fork creates `rt-<id>.sock` some time after it was announced. It then answers `/control/state` as parked.
- A bind moves it to restoring and, when it is answered, to ready. After a refused bind it is failed and exits.
- A second bind is a conflict. An idle ready process can sleep, then drop its weights, and wake again. A seal ends it.
- `/control/drain` ends it once no request is in flight, `/control/condemn` at once.
- Runtimes outlive the process that bound them.

The model's name selects how a bind goes: `corrupt` is refused, `crash` exits, `held` waits for the file `release`,
`busy` reports one request in flight until the file `idle` exists, `full` is refused as overloaded while `crowded`
exists. Other files: `restless` delays the end of sleeps and drops, `drowsy` their begin; with `nightmare` a wake fails,
with `clinging` a drop; `snooze` delays a wake without weights. A process forked while `ignore-term` exists ignores
SIGTERM; one forked while `never-park` exists does not listen. Each call is one line in `calls.log`.
"""

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any, NoReturn

import msgspec

from kelvin.contracts.artifact_errors import ChunkCorrupt
from kelvin.contracts.artifacts.runtime_control import (
    BindRequest,
    BindResponse,
    Fingerprint,
    GateFacts,
    Probe,
    RuntimeReport,
    RuntimeState,
    SealAttestation,
    SealJob,
)
from kelvin.contracts.errors import Conflict, Failure, Internal, Unavailable
from kelvin.contracts.problem import PROBLEM_CONTENT_TYPE, problem_details
from kelvin.contracts.timeline import Stage, StageSpan
from kelvin.contracts.traffic_errors import Overloaded

GATE = GateFacts(
    architecture="LlamaForCausalLM",
    dtype="float32",
    layers=1,
    kv_heads=1,
    head_dim=1,
    value_dim=1,
    vocab_size=1,
    max_positions=1,
    kv_bytes_per_token=1,
    first_use=(),
)


class Standby:
    """The state of one forked process."""

    def __init__(self, run: Path, runtime_id: str) -> None:
        self.run = run
        self.runtime_id = runtime_id
        self.state = RuntimeState.STANDBY
        self.bound: BindRequest | None = None
        self.lock = threading.Lock()

    def note(self, what: str) -> None:
        """Append one line to the log. Appends this short are atomic."""
        with (self.run / "calls.log").open("a") as log:
            log.write(f"{what} {self.runtime_id} {time.monotonic_ns() // 1000}\n")

    def report(self) -> RuntimeReport:
        bind = self.bound
        busy = bind is not None and bind.model == "busy" and not (self.run / "idle").exists()
        return RuntimeReport(
            runtime_id=self.runtime_id,
            pid=os.getpid(),
            state=self.state,
            tenant=bind.tenant if bind else None,
            model=bind.model if bind else None,
            version=bind.version if bind else None,
            device_class=bind.device_class if bind else None,
            max_streams=4 if bind else 0,
            running=int(busy),
        )

    def take(self) -> Failure | None:
        with self.lock:
            if self.state is not RuntimeState.STANDBY:
                return Conflict("state", f"is {self.state}")
            self.state = RuntimeState.RESTORING
            return None

    def bind(self, bind: BindRequest) -> BindResponse | Failure:
        self.note(f"bind:{bind.model}")
        if (failure := self.take()) is not None:
            return failure
        self.bound = bind
        if bind.model == "crash":
            os._exit(9)
        if bind.model == "corrupt" and not (self.run / "healed").exists():
            self.state = RuntimeState.FAILED
            self.end_soon()
            return ChunkCorrupt("c" * 64, "nvme")
        if bind.model == "away" and not (self.run / "back").exists():
            self.state = RuntimeState.FAILED
            self.end_soon()
            if (self.run / "briefly").exists():
                (self.run / "back").touch()
            return Unavailable("the weight cache")
        if bind.model == "full" and (self.run / "crowded").exists():
            self.state = RuntimeState.FAILED
            self.end_soon()
            return Overloaded("the host tier of the weight cache", 1, 1.0, "slabs")
        while bind.model == "held" and not (self.run / "release").exists():
            time.sleep(0.002)
        self.state = RuntimeState.READY
        spans = (StageSpan(Stage.LEASED, 100), StageSpan(Stage.READY, 300))
        return BindResponse(runtime_id=self.runtime_id, max_streams=4, spans=spans, bytes_by_tier={"host": 1})

    def sleep(self) -> Failure | None:
        self.note("sleep")
        while (self.run / "drowsy").exists():  # the request is still on its way
            time.sleep(0.002)
        if self.state is not RuntimeState.READY or self.report().running:
            return Conflict("state", f"is {self.state} and busy")
        self.state = RuntimeState.ASLEEP
        while (self.run / "restless").exists():  # its device memory is not released yet
            time.sleep(0.002)
        return None

    def drop(self) -> Failure | None:
        self.note("drop")
        with self.lock:
            if self.state is not RuntimeState.ASLEEP:
                return Conflict("state", f"is {self.state}")
            while (self.run / "restless").exists():
                time.sleep(0.002)
            if (self.run / "clinging").exists():
                self.state = RuntimeState.FAILED
                self.end_soon()
                return Internal()
            self.state = RuntimeState.DEEP_SLEEP
            return None

    def wake(self, bind: BindRequest) -> BindResponse | Failure:
        self.note(f"wake:{bind.model}")
        with self.lock:
            return self._wake()

    def _wake(self) -> BindResponse | Failure:
        before = self.state
        if before not in (RuntimeState.ASLEEP, RuntimeState.DEEP_SLEEP):
            return Conflict("state", f"is {before}")
        while before is RuntimeState.DEEP_SLEEP and (self.run / "snooze").exists():
            time.sleep(0.002)
        if (self.run / "nightmare").exists():
            self.state = RuntimeState.FAILED
            self.end_soon()
            return ChunkCorrupt("c" * 64, "host")
        self.state = RuntimeState.READY
        leased = (StageSpan(Stage.LEASED, 40),) if before is RuntimeState.DEEP_SLEEP else ()
        spans = (*leased, StageSpan(Stage.READY, 50))
        return BindResponse(
            runtime_id=self.runtime_id, max_streams=4, spans=spans, bytes_by_tier={"nvme": 1} if leased else {}
        )

    def drain(self) -> None:
        self.note("drain")
        self.state = RuntimeState.DRAINING
        if not self.report().running:
            self.end_soon()

    def end_soon(self) -> None:
        """Exit shortly after the response was sent."""
        threading.Timer(0.05, os._exit, (0,)).start()


def serve(run: Path, runtime_id: str) -> NoReturn:
    """Run a forked process until it exits."""
    standby = Standby(run, runtime_id)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self, value: object) -> None:
            status, kind, raw = 200, "application/json", b""
            if isinstance(value, Failure):
                status, kind, raw = value.status, PROBLEM_CONTENT_TYPE, problem_details(value)
            elif value is not None:
                raw = msgspec.json.encode(value)
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(raw)

        def do_GET(self) -> None:
            self._answer(standby.report())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            match self.path:
                case "/control/bind":
                    self._answer(standby.bind(msgspec.json.decode(body, type=BindRequest)))
                case "/control/sleep":
                    self._answer(standby.sleep())
                case "/control/drop":
                    self._answer(standby.drop())
                case "/control/wake":
                    self._answer(standby.wake(msgspec.json.decode(body, type=BindRequest)))
                case "/control/gate":
                    standby.note("gate")
                    self._answer(GATE)
                case "/control/seal":
                    standby.note("seal")
                    job = msgspec.json.decode(body, type=SealJob)
                    self._answer(standby.take() or _attestation(job))
                    standby.end_soon()
                case "/control/condemn":
                    standby.note("condemn")
                    standby.end_soon()
                    self._answer(None)
                case "/control/drain":
                    standby.drain()
                    self._answer(None)

        def log_message(self, *_: Any) -> None:
            """Write no access log."""

    class Server(ThreadingMixIn, UnixStreamServer):
        daemon_threads = True
        request_queue_size = 64

        def get_request(self) -> tuple[Any, Any]:
            connection, _ = super().get_request()
            return connection, ("runtime", 0)

    standby.note("born")
    while (run / "never-park").exists():
        time.sleep(0.01)
    Server(str(run / f"rt-{runtime_id}.sock"), Handler).serve_forever()
    os._exit(0)


def _attestation(job: SealJob) -> SealAttestation:
    return SealAttestation(
        version=job.version,
        fingerprint=Fingerprint(torch="0", dtype="float32", device_class="cpu"),
        threads=1,
        fast_bind=True,
        probe=Probe(token_ids=(), top_ids=(), top_logits=(), tolerance=0.0),
        gate=GATE,
    )


def live(run: Path) -> None:
    """Run the zygote in a session of its own until SIGTERM. All forked processes end with it."""
    os.setsid()
    children: list[int] = []

    def end(*_: object) -> NoReturn:
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaped by the kernel
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(run / "early.sock"))
    listener.listen(64)
    (run / "early.sock").rename(run / "zygote.sock")  # the socket appears only once it listens, as the real one does
    while True:
        connection, _ = listener.accept()
        with connection:
            question = msgspec.json.decode(connection.recv(4096))
            if question["op"] == "ping":
                connection.send(b'{"ok":true,"threads":1}')
                continue
            pid = os.fork()
            if pid == 0:
                listener.close()
                connection.close()
                signal.signal(signal.SIGTERM, signal.SIG_IGN if (run / "ignore-term").exists() else signal.SIG_DFL)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                serve(run, question["runtime_id"])
            children.append(pid)
            pidfd = os.pidfd_open(pid)
            with suppress(OSError):  # the client may have gone, which must not end the zygote
                socket.send_fds(connection, [msgspec.json.encode({"ok": True, "pid": pid})], [pidfd])
            os.close(pidfd)
