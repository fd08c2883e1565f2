"""The zygote: a process that has imported everything and forks standbys. It holds no model and computes nothing.

No event loop, no threads, no device: one blocking poll over its lifeline, a wake-up for signals and a SEQPACKET socket.
Started as `python -m runtime.app.zygote`; the standby's own life begins in `standby.py`.

A standby is forked twice, so that its parent is whoever reaps orphans, and known by a pidfd that names no other.
Forking copies one thread: a lock that another held stays locked for ever in the child. So there must be no other.
"""

import gc
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from kelvin.contracts.backoff import should_log
from kelvin.contracts.errors import Conflict, Failure, Internal, Refused
from kelvin.contracts.names import require_dns_label
from kelvin.contracts.problem import WireFailure, to_wire
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.contracts.wire import Wire, decode, encode
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.log import configure_logging
from kelvin.process.procfs import is_orphaned
from kelvin.process.settings import log_level
from kelvin.process.startup import only_checks, refusing_bad_settings
from runtime.app.settings import RuntimeSettings, from_environment

log = logging.getLogger(__name__)

SOCKET: Final = "zygote.sock"
MAX_MESSAGE: Final = 4096
MAX_CONNECTIONS: Final = 16
ACCEPT_PAUSE_S: Final = 0.1
FORK_TIMEOUT_S: Final = 10.0  # how long the process between may take: two forks of a large process on a busy machine


class Fork(Wire, frozen=True, tag_field="op", tag="fork"):
    """Bear a standby of this name."""

    runtime_id: str


class Ping(Wire, frozen=True, tag_field="op", tag="ping"):
    """Is it there, and fit to fork?"""


class Reply(Wire, frozen=True, omit_defaults=True):
    """The answer to either; a fork's carries the pidfd as its one descriptor."""

    ok: bool
    pid: int | None = None
    threads: int | None = None
    failure: WireFailure | None = None


class Zygote:
    """The loop. `serve` returns None when it is to end, and the runtime id in each process that it bore."""

    def __init__(self, listener: socket.socket, stop_fds: tuple[int, ...]) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._stop_fds = stop_fds
        self._connections: dict[int, socket.socket] = {}
        self._failures = 0  # of accepts, in a row

    def __repr__(self) -> str:
        return f"<Zygote connections={len(self._connections)} threads={count_threads()}>"

    def serve(self) -> str | None:
        """Answer until one of `stop_fds` becomes readable or ends. Closes its connections, not the listener."""
        poll = select.poll()
        for fd in (*self._stop_fds, self._listener.fileno()):
            poll.register(fd, select.POLLIN)
        try:
            while True:
                for fd, _ in poll.poll():
                    if fd in self._stop_fds:
                        return None
                    if fd == self._listener.fileno():
                        self._accept(poll)
                    elif (born := self._answer(fd, poll)) is not None:
                        return born
        finally:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    def _accept(self, poll: select.poll) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # gone again before we looked
        except OSError as error:
            # Descriptors or memory ran out. The connection stays in the backlog, so poll would return at once.
            self._failures += 1
            if should_log(self._failures):
                log.error("accept failed", extra={"error": str(error), "failures": self._failures})
            time.sleep(ACCEPT_PAUSE_S)
            return
        self._failures = 0
        connection.setblocking(False)  # one that does not read its answers is dropped, not waited for
        if len(self._connections) >= MAX_CONNECTIONS:
            _reply(connection, _refusal(Overloaded("the zygote", MAX_CONNECTIONS, 1.0, "connections")))
            connection.close()
            return
        self._connections[connection.fileno()] = connection
        poll.register(connection, select.POLLIN)

    def _answer(self, fd: int, poll: select.poll) -> str | None:
        """Answer one message of one connection. Return the runtime id in the new process, None in the zygote."""
        connection = self._connections[fd]
        try:
            message = connection.recv(MAX_MESSAGE)
        except BlockingIOError:
            return None
        except OSError:
            message = b""
        answered = False
        if message:
            try:
                request = decode(message, Fork | Ping, what="message")  # type: ignore[arg-type]
                match request:
                    case Ping():
                        answered = _reply(connection, Reply(ok=True, threads=count_threads()))
                    case Fork(runtime_id=runtime_id):
                        require_dns_label(runtime_id, "runtime_id")
                        if (orphan := fork_detached()) is None:
                            return runtime_id
                        try:
                            answered = _reply(connection, Reply(ok=True, pid=orphan.pid), orphan.pidfd)
                            if not answered:  # the asker has left, and nobody else knows of it
                                with suppress(ProcessLookupError):
                                    signal.pidfd_send_signal(orphan.pidfd, signal.SIGKILL)
                        finally:
                            os.close(orphan.pidfd)
                        log.info("born", extra={"runtime_id": runtime_id, "pid": orphan.pid})
            except Refused as refused:
                log.warning("refused", extra={"code": refused.failure.code, "why": refused.failure.message})
                answered = _reply(connection, _refusal(refused.failure))
            except OSError:  # No descriptor was left to count threads with. The next request may find one.
                log.exception("failed")
                answered = _reply(connection, _refusal(Internal()))
        if not answered:
            poll.unregister(connection)
            del self._connections[fd]
            connection.close()
        return None


def _refusal(failure: Failure) -> Reply:
    return Reply(ok=False, failure=to_wire(failure))


def _reply(connection: socket.socket, reply: Reply, *fds: int) -> bool:
    """Whether it was sent."""
    with suppress(OSError):
        socket.send_fds(connection, [encode(reply)], fds)
        return True
    return False


@dataclass(frozen=True, slots=True)
class ForkedProcess:
    """The process that was born. `pidfd` is the holder's to close."""

    pid: int
    pidfd: int


def count_threads() -> int:
    """Threads of this process, also those that Python knows nothing of."""
    return len(list(Path("/proc/self/task").iterdir()))


def fork_detached() -> ForkedProcess | None:
    """Fork a process whose parent has ended. Return its handle here, and None in the new process, where all signals are
    still blocked.

    Raises `Refused`: Conflict if this process has more than one thread, Internal if the fork fails or no descriptor is
    left.
    """
    try:
        if (threads := count_threads()) != 1:
            raise Refused(Conflict("fork", f"this process has {threads} threads, and must have 1"))
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise Refused(Internal()) from error
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        intermediate_pid = os.fork()
        if intermediate_pid == 0 and _fork_and_report(near, far):
            return None
        far.close()
        orphan = _receive(near, intermediate_pid)
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise Refused(Internal()) from error
    finally:
        near.close()
        far.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return orphan


def _fork_and_report(near: socket.socket, far: socket.socket) -> bool:
    """In the process between: returns (True) only in the orphan, once the zygote knows of it. Between ends here in any
    case, and the orphan where the zygote has given up.
    """
    pid = -1
    try:
        near.close()
        pid = os.fork()
        if pid == 0:
            if far.recv(1):
                return True
            _end(1)
        # Not reaped before this process has ended, so the pid is nobody else's yet.
        socket.send_fds(far, [b"%d" % pid], [os.pidfd_open(pid)])
        _end(0)
    except BaseException:
        if pid > 0:
            os.kill(pid, signal.SIGKILL)  # nobody would ever know of it
        _end(1)


def _end(status: int) -> NoReturn:
    """Leave without the parent's exit handlers, buffers and `finally` blocks."""
    os._exit(status)


def _receive(near: socket.socket, intermediate_pid: int) -> ForkedProcess:
    """What the process between tells; it is dead and reaped afterwards, told or not."""
    near.settimeout(FORK_TIMEOUT_S)
    try:
        message, fds, _, _ = socket.recv_fds(near, 32, 1)
    except OSError:
        os.kill(intermediate_pid, signal.SIGKILL)
        raise
    finally:
        os.waitpid(intermediate_pid, 0)
    if not message or not fds:
        raise OSError("the process between ended without a birth")
    try:
        near.send(b"1")  # it may live: until then it waits
    except OSError:
        os.close(fds[0])
        raise
    return ForkedProcess(int(message), fds[0])


@contextmanager
def _open_signal_fd(*numbers: signal.Signals) -> Iterator[int]:
    """A descriptor that becomes readable with these signals. In a child, `standby` puts the defaults back."""
    receiver, sender = socket.socketpair()
    with closing(receiver), closing(sender):
        sender.setblocking(False)
        for number in numbers:
            signal.signal(number, lambda *_: None)  # the wake-up is what counts
        signal.set_wakeup_fd(sender.fileno())
        yield receiver.fileno()
        signal.set_wakeup_fd(-1)


def run(settings: RuntimeSettings) -> str | None:
    """Serve on `zygote.sock`. Returns the runtime id in a process that was born, where all of this is closed again."""
    gc.collect()
    gc.freeze()  # what was imported is never visited again, so its pages stay shared with the children
    directory = SocketDirectory(settings.run)
    with (
        closing(directory),
        _open_signal_fd(signal.SIGTERM, signal.SIGINT) as wakeup,
        closing(directory.listen(SOCKET, socket.SOCK_SEQPACKET)) as listener,
    ):
        lifeline = () if settings.lifeline_fd is None else (settings.lifeline_fd,)
        log.info("ready", extra={"threads": count_threads()})
        return Zygote(listener, (wakeup, *lifeline)).serve()


def main() -> None:
    """Import, then fork on demand. Imports come after the settings, which pin the libraries to one thread."""
    with refusing_bad_settings():
        settings = from_environment()
        configure_logging("zygote", log_level())
    if only_checks():
        return
    from runtime.app import preload

    control = preload.load()
    # Loading took seconds. Another installation may be on the same directory by now, and has the socket's name.
    if is_orphaned(settings.lifeline_fd):
        log.warning("the supervisor is gone; not starting")
        return
    if (runtime_id := run(settings)) is not None:
        from runtime.app.standby import run_standby  # imported already: see preload

        run_standby(runtime_id, settings, control)


if __name__ == "__main__":
    main()
