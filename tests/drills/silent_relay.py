"""A relay to the activator that can fall silent: it passes nothing on, and closes nothing.

The kernel still accepts bytes until the relay's small buffers are full. A peer that is switched off would not, but to
the sender both are a socket that accepts nothing.
"""

import contextlib
import select
import socket
import threading
from typing import Final, Self

_SMALL: Final = 4096
_POLL_S: Final = 0.05


class SilentRelay:
    """A relay from its own port to the activator's, for one connection at a time."""

    def __init__(self, port: int) -> None:
        self._door = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._silent, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay")

    @property
    def port(self) -> int:
        """The port for its client."""
        return int(self._listener.getsockname()[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        self._listener.close()

    def fall_silent(self) -> None:
        """Pass nothing on from now on. Both connections stay open until the end."""
        self._silent.set()

    def _run(self) -> None:
        self._listener.settimeout(_POLL_S)
        while not self._closed.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                with client, socket.socket() as door:
                    door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL)
                    door.connect(("127.0.0.1", self._door))
                    self._pass(client, door)

    def _pass(self, client: socket.socket, door: socket.socket) -> None:
        other = {client: door, door: client}
        while not self._closed.is_set():
            if self._silent.is_set():
                self._closed.wait(_POLL_S)
                continue
            for ready in select.select([client, door], [], [], _POLL_S)[0]:
                try:
                    data = ready.recv(_SMALL)
                    other[ready].sendall(data)
                except OSError:
                    return
                if not data:
                    return
