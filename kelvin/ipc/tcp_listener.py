"""TCP sockets: the front door's listener, made by a process that outlives the activator, and those between hosts."""

import socket
from typing import Final

BACKLOG: Final = 2048
# Bytes that the kernel buffers for a client that does not read. With a small buffer, the producer stops earlier.
SEND_BUFFER: Final = 64 << 10
LISTENER_VARIABLE: Final = "KELVIN_LISTENER_FD"
# A lost host sends no FIN. Keep-alive notices it this long after its last packet.
KEEPALIVE_IDLE_S: Final = 10
KEEPALIVE_INTERVAL_S: Final = 5
KEEPALIVE_PROBES: Final = 3


def listen(host: str, port: int) -> socket.socket:
    """Return a bound, listening socket that children don't inherit by default. Raises OSError."""
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
    """Make a connection break within half a minute after the other host is lost (tcp(7))."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    sock.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, (KEEPALIVE_IDLE_S + KEEPALIVE_INTERVAL_S * KEEPALIVE_PROBES) * 1000
    )
