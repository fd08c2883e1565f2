"""Tell in the summary how many histories were played, from which seeds."""

from collections.abc import Callable

import pytest

Tell = Callable[[str, object], None]  # the fixture `record_property`

PLAYED = "simulation"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each run of histories, also where workers played them."""
    for reports in terminalreporter.stats.values():
        for report in (each for each in reports if getattr(each, "when", "") == "call"):
            for name, value in getattr(report, "user_properties", ()):
                if name == PLAYED:
                    terminalreporter.write_line(f"simulation: {value}")
