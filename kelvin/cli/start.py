"""Start the command `kelvin`. Ctrl-C ends it without a traceback, even while its modules are being imported."""

import sys


def main() -> None:
    """Run the command line. Its commands are mounted in `kelvin/cli/main.py`."""
    try:
        from kelvin.cli.main import main as command
    except KeyboardInterrupt:
        print("Aborted!", file=sys.stderr)
        sys.exit(1)  # click ends an interrupted command with the same status
    command()
