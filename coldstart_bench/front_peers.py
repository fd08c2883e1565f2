"""Ray Serve and LiteLLM in front of the same upstream, each in an environment of its own (`make bench-peers`)."""

import http.client
import json
import os
import secrets
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coldstart_bench.front_rows import LITELLM, RAY
from coldstart_bench.peers import LOADERS
from coldstart_bench.services import service

_ANSWER_S: Final = 5.0
_ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "LITELLM_LOG": "ERROR",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no wait for a network that may not be there
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a peer is to listen, what it is in front of, and as whom."""

    at: Path  # a directory of its own, not there yet
    port: int
    path: str
    upstream: int
    certificate: Path  # both in PEM
    private_key: Path
    key: str  # that it takes from callers, where it takes one


def _ray(program: Path, place: Place) -> Sequence[str]:
    upstream = f"http://127.0.0.1:{place.upstream}{place.path}"
    files = [str(place.at / "ray"), str(place.certificate), str(place.private_key)]
    return [str(program), str(LOADERS / "ray_door.py"), str(place.port), upstream, *files]


def _litellm(program: Path, place: Place) -> Sequence[str]:
    """One worker, as it has one core; YAML takes JSON."""
    behind = {"model": "openai/m", "api_base": f"http://127.0.0.1:{place.upstream}/v1", "api_key": "none"}
    models = [{"model_name": "m", "litellm_params": behind}]
    config = place.at / "config.yaml"
    config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": place.key}}))
    files = ["--ssl_certfile_path", str(place.certificate), "--ssl_keyfile_path", str(place.private_key)]
    words = ["--config", str(config), "--host", "127.0.0.1", "--port", str(place.port), "--num_workers", "1"]
    return [str(program), *words, *files]


_PEERS: Final[Mapping[str, tuple[str, Callable[[Path, Place], Sequence[str]]]]] = {
    RAY: ("ray/bin/python", _ray),
    LITELLM: ("litellm/bin/litellm", _litellm),
}
NAMES: Final = tuple(_PEERS)


def try_find(system: str) -> Path | None:
    """What runs that peer, where `make bench-peers` made its environment; the Makefile names the same directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    program = cache / "kelvin-bench" / "peers" / _PEERS[system][0]
    return program if program.exists() else None


def new_key() -> str:
    """That a peer takes: of its form, and not a weak one."""
    return f"sk-{secrets.token_hex(32)}"


@contextmanager
def peer(system: str, program: Path, place: Place) -> Iterator[None]:
    """From when it answers as what is behind it does, until the block ends. Raises InstallationFailed."""
    place.at.mkdir()
    command = _PEERS[system][1](program, place)
    environment = {**os.environ, **_ENVIRONMENT, "HOME": str(place.at)}
    with service(command, environment, place.at / "said", lambda: _answers(place), system):
        yield


def _answers(place: Place) -> bool:
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
