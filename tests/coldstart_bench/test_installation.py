"""Where an installation under measurement listens."""

import secrets
import socket
from pathlib import Path

import pytest

from coldstart_bench.installation import FIRST_PORT, free_port


def test_a_port_is_none_that_a_connection_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that somebody has: then another is drawn."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = free_port()
    assert FIRST_PORT <= port < low
    with socket.create_server(("127.0.0.1", port)):
        other = free_port()
        drawn = iter([each - FIRST_PORT for each in (port, port, other)])
        monkeypatch.setattr(secrets, "randbelow", lambda _: next(drawn))
        assert free_port() == other
