"""`python -m tests.faults.s3_server`: moto's S3 on a free port, printed as the first line of output.

Writes run one at a time: moto checks and writes in two steps, where S3 is atomic. It checks no signatures. The server
ends when its standard input does, so it never outlives the tests.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

os.environ["S3_UPLOAD_PART_MIN_SIZE"] = "1024"  # S3's minimum is 5 MiB, which would make tests move much data
os.environ["MOTO_S3_DEFAULT_KEY_BUFFER_SIZE"] = str(64 << 20)

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server


class _Quiet(MotoRequestHandler):  # type: ignore[misc]
    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:
        """Log nothing."""


def main() -> None:
    """Serve until standard input ends."""
    inner = DomainDispatcherApplication(create_backend_app)
    write_lock = threading.Lock()

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return list(inner(environ, start))
        with write_lock:
            return list(inner(environ, start))

    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    print(server.server_port, flush=True)

    def end() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
