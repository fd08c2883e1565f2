"""An activator that counts Python frames. For each request it writes a line to the file KELVIN_COUNTED: the frames of
our code entered since the head of the previous request. A coroutine enters its frame each time it resumes.

Run as a program. With KELVIN_PLANTED=N the front door calls one of its functions N more times per request.
"""

import os
import sys
from types import CodeType, FrameType
from typing import Any, Final

_OURS: Final = frozenset(("activator", "kelvin"))


class Count:
    """Profile function for `sys.setprofile`. `begins` is the code that each request enters once."""

    def __init__(self, begins: CodeType, path: str) -> None:
        self._begins = begins
        self._path = path
        self._entered = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Count a frame of the main thread, which runs the event loop."""
        if event != "call" or frame.f_globals.get("__name__", "").partition(".")[0] not in _OURS:
            return
        if frame.f_code is self._begins:
            with open(self._path, "a") as counted:
                counted.write(f"{self._entered}\n")
            self._entered = 0
        self._entered += 1


def main() -> None:
    """Install the counter and run the activator."""
    from activator import __main__
    from activator.api import front_door
    from activator.http.http1_protocol import Http1Protocol

    if (planted := int(os.environ.get("KELVIN_PLANTED", "0"))) > 0:
        from activator.routing.request_routes import parse_host

        def slower(hosts: list[bytes]) -> Any:
            for _ in range(planted):
                parse_host(hosts)
            return parse_host(hosts)

        vars(front_door)["parse_host"] = slower
    sys.setprofile(Count(Http1Protocol.on_headers_complete.__code__, os.environ["KELVIN_COUNTED"]))
    try:
        __main__.main()
    finally:
        sys.setprofile(None)


if __name__ == "__main__":
    main()
