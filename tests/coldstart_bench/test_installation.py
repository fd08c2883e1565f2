"""Where an installation under measurement listens, and what becomes of one that does not come up."""

import secrets
import socket
from pathlib import Path

import pytest

from coldstart_bench.installation import FIRST_PORT, InstallationFailed, free_port, running


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


def test_what_it_says_of_itself_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that is larger than any pipe is written to its end, and its end is in the error."""
    program = "import sys; print('noise ' * 40_000, 'the reason', file=sys.stderr, flush=True); print('not today')"
    (tmp_path / "kelvin_noisy.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(InstallationFailed, match=r"(?s)not today.*the reason"):
        running(tmp_path, program="kelvin_noisy").__enter__()
