"""An activator that reports which modules of this project each connection executed. Run as a program. One line of JSON
per connection, from `connection_made` to `connection_lost`, is appended to KELVIN_TRACE.
"""

import json
import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]


def main() -> None:
    """Install the tracer and run the activator."""
    from activator import __main__
    from activator.http.http1_protocol import Http1Protocol
    from activator.http.transports import TlsHandshakeProtocol

    modules: dict[CodeType, str | None] = {}
    seen = set[str]()
    begin, end = TlsHandshakeProtocol.connection_made, Http1Protocol.connection_lost

    def look(frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code not in modules:
            modules[frame.f_code] = _module(frame)
        if (module := modules[frame.f_code]) is not None:
            seen.add(module)

    def begun(self: TlsHandshakeProtocol, transport: Any) -> None:
        seen.clear()
        sys.setprofile(look)
        begin(self, transport)

    def ended(self: Http1Protocol, exc: Exception | None) -> None:
        end(self, exc)
        sys.setprofile(None)
        with Path(os.environ["KELVIN_TRACE"]).open("a") as trace:
            trace.write(json.dumps(sorted(seen)) + "\n")

    TlsHandshakeProtocol.connection_made, Http1Protocol.connection_lost = begun, ended  # type: ignore[method-assign]
    __main__.main()


def _module(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    return None if ".venv" in path.parts or not path.is_relative_to(ROOT) else str(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
