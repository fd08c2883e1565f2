"""`python -m controlplane`."""

import asyncio

from controlplane.app import run
from controlplane.settings import load
from service.log import configure_logging
from service.run import run_service


def main() -> None:
    """Read the environment, then serve until told to stop."""
    settings = load()
    configure_logging("controlplane")

    async def serve(stop: asyncio.Event) -> None:
        await run(settings, stop)

    run_service(serve, settings.lifeline_fd)


if __name__ == "__main__":
    main()
