"""wrk and nginx where they are installed, or where `make bench-tools` unpacked Debian's packages of them."""

import datetime
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coldstart_bench.front_rows import Take
from coldstart_bench.peers import PeerFailed
from coldstart_bench.services import service

BEYOND_S: Final = 60.0  # what a loader takes beside the load itself
_FLOOR: Final = "coldstart_bench.loaders.floor_front"


def unpacked() -> Path:
    """Where `make bench-tools` puts them; the Makefile names the same directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kelvin-bench" / "tools"


def try_find(name: str) -> str | None:
    """The program of that name."""
    places = (os.environ.get("PATH", os.defpath), str(unpacked() / "usr/bin"), str(unpacked() / "usr/sbin"))
    return shutil.which(name, path=os.pathsep.join(places))


def environment() -> dict[str, str]:
    """In which an unpacked program finds its libraries."""
    own = ":".join(map(str, (unpacked() / "usr/lib").glob("*-linux-gnu")))
    before = os.environ.get("LD_LIBRARY_PATH")
    return {**os.environ, "LD_LIBRARY_PATH": own if before is None else f"{before}:{own}"}


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """What is started in this block stays on that core, and so do its children."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def nginx(binary: str, at: Path, port: int, upstream_port: int) -> Iterator[None]:
    """As a TLS proxy on that port until the block ends, with a certificate as ours are (P-256)."""
    make_certificate(at)
    command = [sys.executable, "-m", _FLOOR, "nginx", binary, str(at), str(port), str(upstream_port)]
    with service(command, environment(), at / "said", lambda: _listens(port), "nginx"):
        yield


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wrk(binary: str, at: Path, url: str, connections: int, seconds: int, body: str, key: str) -> Take:
    """One load. Raises PeerFailed with its last words."""
    words = ["wrk", binary, str(at), url, str(connections), str(seconds), body, key]
    try:
        done = subprocess.run(
            [sys.executable, "-m", _FLOOR, *words],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds + BEYOND_S,
        )
    except subprocess.TimeoutExpired as error:
        raise PeerFailed(f"wrk did not end within {error.timeout:g} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines or not lines[-1].startswith("{"):
        raise PeerFailed(f"wrk ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}")
    return take_of(json.loads(lines[-1]))


def take_of(said: dict[str, Any]) -> Take:
    """What a loader said."""
    return Take(said["requests"], said["us"], said["p50_us"], said["p99_us"], said["bad"])


def make_certificate(at: Path) -> tuple[Path, Path]:
    """Of this host, in a new directory: `cert.pem` and its `key.pem`."""
    at.mkdir()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    chain, private = at / "cert.pem", at / "key.pem"
    chain.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    return chain, private
