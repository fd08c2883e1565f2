"""Fork a process twice, so that its parent is whoever reaps orphans, and get a pidfd of it that names no other.

Forking copies one thread: a lock that another held stays locked for ever in the child. So there must be no other.
"""

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from contracts.errors import Conflict, Internal, Refused

BIRTH_S: Final = 10.0  # how long the process between may take: two forks of a large process on a busy machine


@dataclass(frozen=True, slots=True)
class Orphan:
    """The process that was born. `pidfd` is the holder's to close."""

    pid: int
    pidfd: int


def count_threads() -> int:
    """Threads of this process, also those that Python knows nothing of."""
    return len(list(Path("/proc/self/task").iterdir()))


def fork_orphan() -> Orphan | None:
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
        between = os.fork()
        if between == 0 and _fork_and_tell(near, far):
            return None
        far.close()
        orphan = _receive(near, between)
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise Refused(Internal()) from error
    finally:
        near.close()
        far.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return orphan


def _fork_and_tell(near: socket.socket, far: socket.socket) -> bool:
    """In the process between: returns (True) only in the orphan; between ends here, whatever happens."""
    pid = -1
    try:
        near.close()
        pid = os.fork()
        if pid == 0:
            return True
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


def _receive(near: socket.socket, between: int) -> Orphan:
    """What the process between tells; it is dead and reaped afterwards, told or not."""
    near.settimeout(BIRTH_S)
    try:
        message, fds, _, _ = socket.recv_fds(near, 32, 1)
    except OSError:
        os.kill(between, signal.SIGKILL)
        raise
    finally:
        os.waitpid(between, 0)
    if not message or not fds:
        raise OSError("the process between ended without a birth")
    return Orphan(int(message), fds[0])
