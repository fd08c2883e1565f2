"""The zygote: a process that has imported everything and forks standbys. It holds no model and computes nothing.

It has no event loop, threads or device. It blocks in one poll over its lifeline, a signal wake-up descriptor and a
SEQPACKET socket. Started as `python -m runtime.app.zygote`; `standby.py` runs the forked process.

Each standby is forked twice, so that its parent is the process that reaps orphans. The zygote identifies it by a pidfd,
because a pid can be reused. A fork copies one thread: a lock that another thread held would stay locked in the child.
So the zygote must have one thread only.
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
from kelvin.process.startup import exit_on_bad_setting, is_check_only
from runtime.app.settings import RuntimeSettings, from_environment

log = logging.getLogger(__name__)

SOCKET: Final = "zygote.sock"
MAX_MESSAGE: Final = 4096
MAX_CONNECTIONS: Final = 16
ACCEPT_PAUSE_S: Final = 0.1
FORK_TIMEOUT_S: Final = 10.0  # limit for the intermediate process: two forks of a large process on a busy machine


class Fork(Wire, frozen=True, tag_field="op", tag="fork"):
    """The request to fork a standby with this runtime id."""

    runtime_id: str


class Ping(Wire, frozen=True, tag_field="op", tag="ping"):
    """The request to check that the zygote runs and is able to fork."""


class Reply(Wire, frozen=True, omit_defaults=True):
    """The reply to both requests. The reply to a fork carries the new process's pidfd as its only descriptor."""

    ok: bool
    pid: int | None = None
    threads: int | None = None
    failure: WireFailure | None = None


class Zygote:
    """The zygote's server loop over its listener, its connections and its stop descriptors."""

    def __init__(self, listener: socket.socket, stop_fds: tuple[int, ...]) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._stop_fds = stop_fds
        self._connections: dict[int, socket.socket] = {}
        self._failures = 0  # consecutive failures of accept

    def __repr__(self) -> str:
        return f"<Zygote connections={len(self._connections)} threads={count_threads()}>"

    def serve(self) -> str | None:
        """Serve until one of `stop_fds` becomes readable or closes. Closes the connections, not the listener. Return
        None in the zygote. In each forked process, return that process's runtime id.
        """
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
                    elif (runtime_id := self._answer(fd, poll)) is not None:
                        return runtime_id
        finally:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    def _accept(self, poll: select.poll) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the client closed the connection already
        except OSError as error:
            # Out of descriptors or memory. The connection stays in the backlog, so poll would return at once.
            self._failures += 1
            if should_log(self._failures):
                log.error("accept failed", extra={"error": str(error), "failures": self._failures})
            time.sleep(ACCEPT_PAUSE_S)
            return
        self._failures = 0
        connection.setblocking(False)  # a client that does not read its replies is dropped
        if len(self._connections) >= MAX_CONNECTIONS:
            _reply(connection, _refusal(Overloaded("the zygote", MAX_CONNECTIONS, 1.0, "connections")))
            connection.close()
            return
        self._connections[connection.fileno()] = connection
        poll.register(connection, select.POLLIN)

    def _answer(self, fd: int, poll: select.poll) -> str | None:
        """Answer one message of one connection. Return the runtime id in the forked process, None in the zygote."""
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
                request = decode(message, Fork | Ping, field="message")  # type: ignore[arg-type]
                match request:
                    case Ping():
                        answered = _reply(connection, Reply(ok=True, threads=count_threads()))
                    case Fork(runtime_id=runtime_id):
                        require_dns_label(runtime_id, "runtime_id")
                        if (child := fork_detached()) is None:
                            return runtime_id
                        answered = _hand_over(connection, runtime_id, child)
            except Refused as refused:
                log.warning("refused", extra={"code": refused.failure.code, "why": refused.failure.message})
                answered = _reply(connection, _refusal(refused.failure))
            except OSError:  # no descriptor left to count threads with; the next request may succeed
                log.exception("failed")
                answered = _reply(connection, _refusal(Internal()))
        if not answered:
            poll.unregister(connection)
            del self._connections[fd]
            connection.close()
        return None


def _hand_over(connection: socket.socket, runtime_id: str, child: "ForkedProcess") -> bool:
    """Send the forked process to the client. Return False if the client has gone; the process is then killed."""
    try:
        if _reply(connection, Reply(ok=True, pid=child.pid), child.pidfd):
            log.info("born", extra={"runtime_id": runtime_id, "pid": child.pid})
            return True
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        return False
    finally:
        os.close(child.pidfd)


def _refusal(failure: Failure) -> Reply:
    return Reply(ok=False, failure=to_wire(failure))


def _reply(connection: socket.socket, reply: Reply, *fds: int) -> bool:
    """Send a reply. Return whether it was sent."""
    with suppress(OSError):
        socket.send_fds(connection, [encode(reply)], fds)
        return True
    return False


@dataclass(frozen=True, slots=True)
class ForkedProcess:
    """A process that was forked. Its owner must close `pidfd`."""

    pid: int
    pidfd: int


def count_threads() -> int:
    """Return the number of this process's threads, including threads that Python does not know."""
    return len(list(Path("/proc/self/task").iterdir()))


def fork_detached() -> ForkedProcess | None:
    """Fork a process whose parent has exited. Return its handle here, and None in the new process.

    All signals are still blocked in the new process. Raises `Refused`: Conflict if this process has more than one
    thread, Internal if the fork fails or no descriptor is left.
    """
    try:
        if (threads := count_threads()) != 1:
            raise Refused(Conflict("fork", f"this process has {threads} threads, and must have 1"))
        zygote_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise Refused(Internal()) from error
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        intermediate_pid = os.fork()
        if intermediate_pid == 0 and _fork_and_report(zygote_end, child_end):
            return None
        child_end.close()
        orphan = _receive_child(zygote_end, intermediate_pid)
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise Refused(Internal()) from error
    finally:
        zygote_end.close()
        child_end.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return orphan


def _fork_and_report(zygote_end: socket.socket, child_end: socket.socket) -> bool:
    """Run the intermediate process: fork the orphan and send its pidfd to the zygote. Returns (True) only in the
    orphan, once the zygote has its pidfd. The intermediate process always exits here. The orphan exits here too if the
    zygote has given up.
    """
    pid = -1
    try:
        zygote_end.close()
        pid = os.fork()
        if pid == 0:
            if child_end.recv(1):
                return True
            _exit_process(1)
        # The orphan can't be reaped before this process ends, so its pid is not reused yet.
        socket.send_fds(child_end, [b"%d" % pid], [os.pidfd_open(pid)])
        _exit_process(0)
    except BaseException:
        if pid > 0:
            os.kill(pid, signal.SIGKILL)  # otherwise no process would know of it
        _exit_process(1)


def _exit_process(status: int) -> NoReturn:
    """Exit without the parent's exit handlers, buffers and `finally` blocks."""
    os._exit(status)


def _receive_child(zygote_end: socket.socket, intermediate_pid: int) -> ForkedProcess:
    """Return the handle that the intermediate process sends. That process is reaped afterwards, even on failure."""
    zygote_end.settimeout(FORK_TIMEOUT_S)
    try:
        message, fds, _, _ = socket.recv_fds(zygote_end, 32, 1)
    except OSError:
        os.kill(intermediate_pid, signal.SIGKILL)
        raise
    finally:
        os.waitpid(intermediate_pid, 0)
    if not message or not fds:
        raise OSError("the intermediate process ended without reporting a child")
    try:
        zygote_end.send(b"1")  # the orphan waits for this byte before it continues
    except OSError:
        os.close(fds[0])
        raise
    return ForkedProcess(int(message), fds[0])


@contextmanager
def _open_signal_fd(*numbers: signal.Signals) -> Iterator[int]:
    """Yield a descriptor that becomes readable on these signals. `standby.py` restores a child's handlers."""
    receiver, sender = socket.socketpair()
    with closing(receiver), closing(sender):
        sender.setblocking(False)
        for number in numbers:
            signal.signal(number, lambda *_: None)  # a handler is needed; the wake-up descriptor does the work
        signal.set_wakeup_fd(sender.fileno())
        yield receiver.fileno()
        signal.set_wakeup_fd(-1)


def run(settings: RuntimeSettings) -> str | None:
    """Serve on `zygote.sock`. Return the runtime id in a forked process, where these descriptors are closed."""
    gc.collect()
    gc.freeze()  # later collections skip the imported objects, so their pages stay shared with the children
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
    """Import everything, then fork on demand. The settings come first: they limit libraries to one thread."""
    with exit_on_bad_setting():
        settings = from_environment()
        configure_logging("zygote", log_level())
    if is_check_only():
        return
    from runtime.app import preload

    control = preload.load()
    # Loading took seconds. Another installation may use the same directory and own the socket's name by now.
    if is_orphaned(settings.lifeline_fd):
        log.warning("the supervisor is gone; not starting")
        return
    if (runtime_id := run(settings)) is not None:
        from runtime.app.standby import run_standby  # imported already: see preload

        run_standby(runtime_id, settings, control)


if __name__ == "__main__":
    main()
