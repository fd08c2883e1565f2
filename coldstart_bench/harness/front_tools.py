"""Tools of `kelvin bench front`: wrk, nginx, and other proxies in front of the same upstream.

wrk and nginx are installed programs, or those that `make bench-tools` unpacked from Debian packages. Ray Serve and
LiteLLM each have their own environment (`make bench-peers`).
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

BEYOND_S: Final = 60.0  # time of a load generator beyond the load itself
RAY, LITELLM = "Ray Serve", "LiteLLM"
_FLOOR: Final = "coldstart_bench.programs.floors.floor_front"
_ANSWER_S: Final = 5.0
_PEER_ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "LITELLM_LOG": "ERROR",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # don't wait for the network
}


class LoadSample(msgspec.Struct, frozen=True):
    """A few seconds of load: answered requests, duration, and latencies."""

    requests: int
    us: int
    p50_us: int
    p99_us: int
    bad: int  # failed connections and responses
    processor_us: int | None = None  # CPU time of the measured process, if it is ours

    @property
    def rate(self) -> float:
        """Correct responses per second."""
        return self.requests / self.us * 1e6


def tools_directory() -> Path:
    """Return the directory that `make bench-tools` fills. The Makefile names the same one."""
    return _cache() / "tools"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kelvin-bench"


def try_find(name: str) -> str | None:
    """Return the path of an installed or unpacked program, or None."""
    places = (
        os.environ.get("PATH", os.defpath),
        str(tools_directory() / "usr/bin"),
        str(tools_directory() / "usr/sbin"),
    )
    return shutil.which(name, path=os.pathsep.join(places))


def environment() -> dict[str, str]:
    """Return an environment in which an unpacked program finds its libraries."""
    own = ":".join(map(str, (tools_directory() / "usr/lib").glob("*-linux-gnu")))
    before = os.environ.get("LD_LIBRARY_PATH")
    return {**os.environ, "LD_LIBRARY_PATH": own if before is None else f"{before}:{own}"}


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Pin processes started in this block, and their children, to a core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def nginx(binary: str, at: Path, port: int, upstream_port: int) -> Iterator[None]:
    """Run nginx as a TLS proxy on `port` until the block ends. Its certificate is of the same kind as ours (P-256)."""
    make_certificate(at)
    command = python_command(_FLOOR, "nginx", binary, str(at), str(port), str(upstream_port))
    with running_service(command, environment(), at / "said", lambda: _listens(port), "nginx"):
        yield


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wrk(binary: str, at: Path, url: str, connections: int, seconds: int, body: str, key: str) -> LoadSample:
    """Run one load. Raises ProgramFailed with wrk's last output."""
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


def parse_sample(answer: dict[str, Any]) -> LoadSample:
    """Convert a load generator's JSON to a sample."""
    return LoadSample(answer["requests"], answer["us"], answer["p50_us"], answer["p99_us"], answer["bad"])


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """Where a peer listens, its upstream, its certificate and key."""

    at: Path  # its own directory, which must not exist yet
    port: int
    path: str
    upstream: int
    certificate: Path  # both in PEM
    private_key: Path
    key: str  # the API key of callers, if the peer checks one


def _ray(program: Path, peer: PeerConfig) -> Sequence[str]:
    upstream = f"http://127.0.0.1:{peer.upstream}{peer.path}"
    files = [str(peer.at / "ray"), str(peer.certificate), str(peer.private_key)]
    return [str(program), str(PROGRAMS / "ray_proxy.py"), str(peer.port), upstream, *files]


def _litellm(program: Path, peer: PeerConfig) -> Sequence[str]:
    """Return the command for one worker, because it has one core. JSON is valid YAML."""
    behind = {"model": "openai/m", "api_base": f"http://127.0.0.1:{peer.upstream}/v1", "api_key": "none"}
    models = [{"model_name": "m", "litellm_params": behind}]
    config = peer.at / "config.yaml"
    config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": peer.key}}))
    files = ["--ssl_certfile_path", str(peer.certificate), "--ssl_keyfile_path", str(peer.private_key)]
    words = ["--config", str(config), "--host", "127.0.0.1", "--port", str(peer.port), "--num_workers", "1"]
    return [str(program), *words, *files]


_PEERS: Final[Mapping[str, tuple[str, Callable[[Path, PeerConfig], Sequence[str]]]]] = {
    RAY: ("ray/bin/python", _ray),
    LITELLM: ("litellm/bin/litellm", _litellm),
}
PEERS: Final = tuple(_PEERS)


def try_find_peer(system: str) -> Path | None:
    """Return the peer's program in the directory of `make bench-peers` (see the Makefile), or None."""
    program = _cache() / "peers" / _PEERS[system][0]
    return program if program.exists() else None


def new_key() -> str:
    """Return a random API key in the form that peers accept."""
    return f"sk-{secrets.token_hex(32)}"


@contextmanager
def running_peer(system: str, program: Path, peer: PeerConfig) -> Iterator[None]:
    """Run a peer until the block ends. Yields once it answers like its upstream. Raises InstallationFailed."""
    peer.at.mkdir()
    command = _PEERS[system][1](program, peer)
    environment = {**os.environ, **_PEER_ENVIRONMENT, "HOME": str(peer.at)}
    with running_service(command, environment, peer.at / "said", lambda: _answers(peer), system):
        yield


def _answers(peer: PeerConfig) -> bool:
    """Send one request of the kind that the load will send, and return whether it succeeds."""
    trust = ssl.create_default_context(cafile=str(peer.certificate))
    connection = http.client.HTTPSConnection("localhost", peer.port, timeout=_ANSWER_S, context=trust)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    headers = {"authorization": f"Bearer {peer.key}", "content-type": "application/json"}
    try:
        connection.request("POST", peer.path, body, headers)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
