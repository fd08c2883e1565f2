"""An activator with a failing loop: it raises while the file KELVIN_FAILS exists. Run as a program."""

import asyncio
import os
from pathlib import Path


def main() -> None:
    """Break the loop that reports uses of API keys, and run the activator."""
    from activator import __main__
    from activator.auth import key_uses

    fails = Path(os.environ["KELVIN_FAILS"])

    async def run(_: key_uses.KeyUses) -> None:
        while not fails.exists():
            await asyncio.sleep(0.01)
        raise KeyError("a defect")

    vars(key_uses)["KeyUses"].run = run
    __main__.main()


if __name__ == "__main__":
    main()
