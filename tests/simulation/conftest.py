"""Report in the test summary how many histories were played, and with which seeds."""

from collections.abc import Callable

import pytest

RecordProperty = Callable[[str, object], None]  # the fixture `record_property`

PLAYED = "simulation"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line for each run of histories, also for runs in worker processes."""
    for reports in terminalreporter.stats.values():
        for report in (each for each in reports if getattr(each, "when", "") == "call"):
            for name, value in getattr(report, "user_properties", ()):
                if name == PLAYED:
                    terminalreporter.write_line(f"simulation: {value}")
