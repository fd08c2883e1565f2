"""Start the command `kelvin`. Ctrl-C ends it without a traceback, also while its modules are still being imported."""

import sys


def main() -> None:
    """Run the command line; `kelvin/cli/main.py` has its commands."""
    try:
        from kelvin.cli.main import main as command
    except KeyboardInterrupt:
        print("Aborted!", file=sys.stderr)
        sys.exit(1)  # as click ends a command that is interrupted
    command()
