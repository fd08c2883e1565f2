"""TCP sockets: the front door's, made by whoever outlives the process that accepts from it, and those between hosts."""

import socket
from typing import Final

BACKLOG: Final = 2048
# What the kernel holds for a client that does not read: the less, the sooner its producer stops.
SEND_BUFFER: Final = 64 << 10
LISTENER_VARIABLE: Final = "KELVIN_LISTENER_FD"
# Another host that is gone says nothing. It is noticed so long after its last word, asked or not.
KEEPALIVE_IDLE_S: Final = 10
KEEPALIVE_INTERVAL_S: Final = 5
KEEPALIVE_PROBES: Final = 3


def listen(host: str, port: int) -> socket.socket:
    """Bound and listening, not inherited unless it is passed on. Raises OSError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, "not a valid host name") from error
    listener = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        listener.bind(address)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def enable_keepalive(sock: socket.socket) -> None:
    """Have a connection to another host break within half a minute of that host's loss (tcp(7))."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    sock.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, (KEEPALIVE_IDLE_S + KEEPALIVE_INTERVAL_S * KEEPALIVE_PROBES) * 1000
    )
