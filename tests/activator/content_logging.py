"""An activator that logs what KELVIN_LOGGED_PART names of a request: `headers`, `query` or `body`. Run as a program."""

import logging
import os
from typing import Any

log = logging.getLogger("activator.content_logging")


def main() -> None:
    """Install the logging and run the activator."""
    from activator import __main__
    from activator.http import exchange

    logged_part = os.environ["KELVIN_LOGGED_PART"]
    begin, read = exchange.Exchange.__init__, exchange.Exchange.read_body

    def begun(self: exchange.Exchange, *given: Any) -> None:
        begin(self, *given)
        if logged_part != "body":
            log.debug("a request", extra={"part": repr(getattr(self, logged_part))})

    async def read_body(self: exchange.Exchange, *given: Any) -> bytes:
        body = await read(self, *given)
        if logged_part == "body":
            log.debug("a body", extra={"part": body.decode(errors="replace")})
        return body

    vars(exchange)["Exchange"].__init__ = begun
    vars(exchange)["Exchange"].read_body = read_body
    __main__.main()


if __name__ == "__main__":
    main()
