"""What `kelvin bench front` needs beside itself: wrk and nginx, and others in front of the same upstream.

wrk and nginx are those that are installed, or those that `make bench-tools` unpacked of Debian's packages. Ray Serve
and LiteLLM have an environment of their own each (`make bench-peers`).
"""

import http.client
import json
import os
import secrets
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from coldstart_bench.harness.program_runner import PROGRAMS, ProgramFailed
from coldstart_bench.harness.service_runner import running_service
from coldstart_bench.harness.temporary_certificates import make_certificate
from kelvin.process.python_command import python_command

BEYOND_S: Final = 60.0  # what a loader takes beside the load itself
RAY, LITELLM = "Ray Serve", "LiteLLM"
_FLOOR: Final = "coldstart_bench.programs.floors.floor_front"
_ANSWER_S: Final = 5.0
_PEER_ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "LITELLM_LOG": "ERROR",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no wait for a network that may not be there
}


class LoadSample(msgspec.Struct, frozen=True):
    """A few seconds of load: requests that were answered, how long it took, and what their wait was."""

    requests: int
    us: int
    p50_us: int
    p99_us: int
    bad: int  # connections and answers that were not as they should be
    processor_us: int | None = None  # of the process in front, where it is ours

    @property
    def rate(self) -> float:
        """Answers a second."""
        return self.requests / self.us * 1e6


def tools_directory() -> Path:
    """Where `make bench-tools` puts them; the Makefile names the same directory."""
    return _cache() / "tools"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kelvin-bench"


def try_find(name: str) -> str | None:
    """The program of that name."""
    places = (
        os.environ.get("PATH", os.defpath),
        str(tools_directory() / "usr/bin"),
        str(tools_directory() / "usr/sbin"),
    )
    return shutil.which(name, path=os.pathsep.join(places))


def environment() -> dict[str, str]:
    """In which an unpacked program finds its libraries."""
    own = ":".join(map(str, (tools_directory() / "usr/lib").glob("*-linux-gnu")))
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
    command = python_command(_FLOOR, "nginx", binary, str(at), str(port), str(upstream_port))
    with running_service(command, environment(), at / "said", lambda: _listens(port), "nginx"):
        yield


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wrk(binary: str, at: Path, url: str, connections: int, seconds: int, body: str, key: str) -> LoadSample:
    """One load. Raises ProgramFailed with its last words."""
    words = ["wrk", binary, str(at), url, str(connections), str(seconds), body, key]
    try:
        done = subprocess.run(
            python_command(_FLOOR, *words),
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds + BEYOND_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ProgramFailed(f"wrk did not end within {error.timeout:g} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines or not lines[-1].startswith("{"):
        raise ProgramFailed(f"wrk ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}")
    return parse_sample(json.loads(lines[-1]))


def parse_sample(said: dict[str, Any]) -> LoadSample:
    """What a loader said."""
    return LoadSample(said["requests"], said["us"], said["p50_us"], said["p99_us"], said["bad"])


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """Where a peer is to listen, what it is in front of, and as whom."""

    at: Path  # a directory of its own, not there yet
    port: int
    path: str
    upstream: int
    certificate: Path  # both in PEM
    private_key: Path
    key: str  # that it takes from callers, where it takes one


def _ray(program: Path, place: PeerConfig) -> Sequence[str]:
    upstream = f"http://127.0.0.1:{place.upstream}{place.path}"
    files = [str(place.at / "ray"), str(place.certificate), str(place.private_key)]
    return [str(program), str(PROGRAMS / "ray_proxy.py"), str(place.port), upstream, *files]


def _litellm(program: Path, place: PeerConfig) -> Sequence[str]:
    """One worker, as it has one core; YAML takes JSON."""
    behind = {"model": "openai/m", "api_base": f"http://127.0.0.1:{place.upstream}/v1", "api_key": "none"}
    models = [{"model_name": "m", "litellm_params": behind}]
    config = place.at / "config.yaml"
    config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": place.key}}))
    files = ["--ssl_certfile_path", str(place.certificate), "--ssl_keyfile_path", str(place.private_key)]
    words = ["--config", str(config), "--host", "127.0.0.1", "--port", str(place.port), "--num_workers", "1"]
    return [str(program), *words, *files]


_PEERS: Final[Mapping[str, tuple[str, Callable[[Path, PeerConfig], Sequence[str]]]]] = {
    RAY: ("ray/bin/python", _ray),
    LITELLM: ("litellm/bin/litellm", _litellm),
}
PEERS: Final = tuple(_PEERS)


def try_find_peer(system: str) -> Path | None:
    """What runs that peer, where `make bench-peers` made its environment; the Makefile names the same directory."""
    program = _cache() / "peers" / _PEERS[system][0]
    return program if program.exists() else None


def new_key() -> str:
    """That a peer takes: of its form, and not a weak one."""
    return f"sk-{secrets.token_hex(32)}"


@contextmanager
def running_peer(system: str, program: Path, place: PeerConfig) -> Iterator[None]:
    """From when it answers as what is behind it does, until the block ends. Raises InstallationFailed."""
    place.at.mkdir()
    command = _PEERS[system][1](program, place)
    environment = {**os.environ, **_PEER_ENVIRONMENT, "HOME": str(place.at)}
    with running_service(command, environment, place.at / "said", lambda: _answers(place), system):
        yield


def _answers(place: PeerConfig) -> bool:
    """One request, as they will be."""
    trust = ssl.create_default_context(cafile=str(place.certificate))
    connection = http.client.HTTPSConnection("localhost", place.port, timeout=_ANSWER_S, context=trust)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    headers = {"authorization": f"Bearer {place.key}", "content-type": "application/json"}
    try:
        connection.request("POST", place.path, body, headers)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
