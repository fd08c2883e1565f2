"""The process itself: it serves, and ends on SIGTERM and with its supervisor. SIGKILL is test_push_killed's."""

import signal
import threading
from pathlib import Path

from tests.snapshotter.process import process_over, wait_until_healthy


def test_ends_as_told(tmp_path: Path) -> None:
    """SIGTERM: exit 0. The supervisor's end: it ends too."""
    never = threading.Event()
    with process_over(tmp_path) as process:
        with process.client() as client:
            wait_until_healthy(client, never)
            assert client.get("/readyz").status_code == 200
        assert process.end(signal.SIGTERM) == 0
        process.start()
        with process.client() as client:
            wait_until_healthy(client, never)
        process.close()
        assert process.running is not None
        assert process.running.wait(30) == 0
