"""`listen` returns a TCP socket or raises OSError."""

import socket

import pytest

from kelvin.ipc.tcp_listener import listen


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".example"], ids=["an empty label", "a label that is too long"])
def test_invalid_host_name_is_refused(host: str) -> None:
    """Python's resolver raises UnicodeError, and callers of `listen` expect OSError."""
    with pytest.raises(socket.gaierror, match="not a valid host name"):
        listen(host, 0)
