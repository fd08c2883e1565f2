"""A listening TCP socket, or an OSError."""

import socket

import pytest

from service.listener import listen


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".example"], ids=["an empty label", "a label that is too long"])
def test_host_that_no_name_server_is_asked_for_is_refused_as_unknown(host: str) -> None:
    """Python's resolver raises UnicodeError, which nobody who listens expects."""
    with pytest.raises(socket.gaierror, match="is no name of a host"):
        listen(host, 0)
