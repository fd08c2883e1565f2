"""`kelvin up` with a control plane that can be kept from starting. Only tests use it.

While DATA/hold_control exists, a new control plane waits before it starts.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

HELD_S = 120.0  # longer than any test holds it


def main() -> None:
    """Run the supervisor if there are arguments, otherwise the control plane."""
    if len(sys.argv) == 1:
        _control()
        return
    from kelvin.cli import main as command
    from kelvin.supervisor import child_group

    held = [
        replace(spec, module=__spec__.name) if spec.name == "controlplane" else spec for spec in child_group.CHILD_SPECS
    ]
    setattr(child_group, "CHILD_SPECS", tuple(held))  # noqa: B010 - mypy would have the name exported
    command.main()


def _control() -> None:
    from controlplane import __main__ as program

    hold, limit = Path(os.environ["KELVIN_DATA"]) / "hold_control", time.monotonic() + HELD_S
    while hold.exists() and time.monotonic() < limit:
        time.sleep(0.02)
    program.main()


if __name__ == "__main__":
    main()
