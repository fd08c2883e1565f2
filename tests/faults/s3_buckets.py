"""An S3 server for tests that makes empty buckets."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Final

# The server checks no signature, so any credentials do. Pass them in the environment, never in a URL.
CREDENTIALS: Final = {"AWS_ACCESS_KEY_ID": "kelvin-tests", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}
_SIGNED: Final = f"AWS4-HMAC-SHA256 Credential={CREDENTIALS['AWS_ACCESS_KEY_ID']}/20260101/us-east-1/s3/aws4_request"
# Keep the machine's own AWS profile, role and region out of the tests.
ENVIRONMENT: Final = {
    **CREDENTIALS,
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(frozen=True)
class Buckets:
    """The server's address, and requests to it."""

    host: str
    port: int
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def make(self) -> str:
        """Make an empty bucket and return its name."""
        name = f"bucket-{next(self._numbers)}"
        self.ask("PUT", name)
        return name

    def get(self, path: str) -> bytes:
        """Read an object directly from the server, without a proxy. `path` begins with the bucket."""
        return self.ask("GET", path)

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Send one request and return the body of the answer."""
        connection = HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, f"/{path}", body, headers={"authorization": _SIGNED})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        assert answer.status < 300, (answer.status, content)
        return content

    def url(self, bucket: str, prefix: str = "", *, port: int | None = None, **parameters: object) -> str:
        """Return a URL for `KELVIN_STORE`. `port` is a proxy's."""
        rest = "".join(f"&{name}={value}" for name, value in parameters.items())
        return f"s3://{bucket}/{prefix}?endpoint=http://{self.host}:{port or self.port}{rest}"


@contextmanager
def serving() -> Iterator[Buckets]:
    """Run the server as long as the block."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.faults.s3_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Buckets("127.0.0.1", int(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()
