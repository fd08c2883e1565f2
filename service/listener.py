"""The listening TCP socket of the front door: made by whoever outlives the process that accepts from it."""

import socket
from typing import Final

BACKLOG: Final = 2048
# What the kernel holds for a client that does not read: the less, the sooner its producer stops.
SEND_BUFFER: Final = 64 << 10
LISTENER_VARIABLE: Final = "KELVIN_LISTENER_FD"


def listen(host: str, port: int) -> socket.socket:
    """Bound and listening, not inherited unless it is passed on. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
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
