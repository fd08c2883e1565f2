"""An S3 server for tests, and places in it: a bucket of its own for each who asks."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Final

# Anything is believed: the server checks no signature. Handed to processes, never part of a URL.
CREDENTIALS: Final = {"AWS_ACCESS_KEY_ID": "kelvin-tests", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}
_SIGNED: Final = f"AWS4-HMAC-SHA256 Credential={CREDENTIALS['AWS_ACCESS_KEY_ID']}/20260101/us-east-1/s3/aws4_request"
# Whatever profile, role or region the machine has is not the tests' business.
ENVIRONMENT: Final = {
    **CREDENTIALS,
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(frozen=True)
class Buckets:
    """Where the server listens; `make` answers the name of an empty bucket."""

    host: str
    port: int
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def make(self) -> str:
        """An empty bucket's name."""
        name = f"bucket-{next(self._numbers)}"
        self.ask("PUT", name)
        return name

    def get(self, path: str) -> bytes:
        """An object, past every proxy; `path` begins with the bucket."""
        return self.ask("GET", path)

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """One request, and its answer's body."""
        connection = HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, f"/{path}", body, headers={"authorization": _SIGNED})
            answer = connection.getresponse()
            said = answer.read()
        finally:
            connection.close()
        assert answer.status < 300, (answer.status, said)
        return said

    def url(self, bucket: str, prefix: str = "", *, port: int | None = None, **parameters: object) -> str:
        """As `KELVIN_STORE` takes it; `port` is a proxy's."""
        rest = "".join(f"&{name}={value}" for name, value in parameters.items())
        return f"s3://{bucket}/{prefix}?endpoint=http://{self.host}:{port or self.port}{rest}"


@contextmanager
def serving() -> Iterator[Buckets]:
    """The server runs as long as the block."""
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
