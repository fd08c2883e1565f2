"""`examples/envoy.yaml` in front of an installation serves HTTP/1.1, HTTP/2 and HTTP/3."""

import asyncio
import json
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml

from activator.app.settings import read_settings
from coldstart_bench.harness.installation import Installation, free_port
from kelvin.doctor.configuration_policy import DEFAULTS
from tests.activator.tls.foreign_authority import Issuer
from tests.e2e.api import http3_client
from tests.e2e.https_client import complete, headers
from tests.e2e.installation_state import is_recorded, report

EXAMPLE = Path(__file__).parents[3] / "examples" / "envoy.yaml"
PATH = "/v1/completions"
BODY = {"model": "llama", "prompt": "w1 w2", "max_tokens": 8, "temperature": 0}
HOURS = {**BODY, "max_tokens": 3000, "stream": True}


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    """The issuer of the proxy's certificate."""
    return Issuer()


@pytest.fixture(scope="module")
def port(kelvin: Installation, issuer: Issuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of the example's proxy. Only its paths and its two ports are replaced."""
    place, port = tmp_path_factory.mktemp("envoy"), free_port()
    issuer.pair(place, "localhost")
    (place / "kelvin-ca.pem").write_bytes((kelvin.data / "ca.pem").read_bytes())
    text = EXAMPLE.read_text().replace("/etc/envoy/", f"{place}/")
    text = text.replace("port_value: 443,", f"port_value: {port},").replace(
        "port_value: 8443}", f"port_value: {kelvin.port}}}"
    )
    (place / "envoy.yaml").write_text(text)
    command = [str(Path(sys.executable).parent / "envoy"), "-c", str(place / "envoy.yaml"), "--log-level", "error"]
    with (
        (place / "log").open("w") as log,
        subprocess.Popen([*command, "--use-dynamic-base-id"], stdout=log, stderr=log) as envoy,
    ):
        try:
            kelvin.wait(lambda: envoy.poll() is not None or _listens(port), "the proxy listens")
            assert envoy.poll() is None, (place / "log").read_text()
            yield port
        finally:
            envoy.kill()


def _listens(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("localhost", port), 1).close()
        return True
    return False


def _client(port: int, issuer: Issuer, kelvin: Installation, *, http2: bool) -> httpx.Client:
    return httpx.Client(
        http2=http2, verify=issuer.client(), base_url=f"https://localhost:{port}", headers=headers(kelvin), timeout=60
    )


@pytest.mark.parametrize(("http2", "version"), [(False, "HTTP/1.1"), (True, "HTTP/2")])
def test_answers_pass_the_proxy_unchanged(
    kelvin: Installation, issuer: Issuer, port: int, http2: bool, version: str
) -> None:
    """Answers through the proxy have Kelvin's text, in the client's protocol version."""
    want = complete(kelvin, "llama", "w1 w2", max_tokens=8).text
    with _client(port, issuer, kelvin, http2=http2) as client:
        whole = client.post(PATH, json=BODY)
        assert (whole.http_version, whole.status_code) == (version, 200)
        assert whole.json()["choices"][0]["text"] == want
        assert whole.headers["alt-svc"].startswith("h3=")
        streamed = client.post(PATH, json={**BODY, "stream": True}).text
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert "".join(choice["text"] for event in events for choice in event["choices"]) == want
        assert client.get("/v1/models", headers={"authorization": "Bearer nobody"}).status_code == 401


def test_http3_passes_the_proxy(kelvin: Installation, issuer: Issuer, port: int, tmp_path: Path) -> None:
    """HTTP/3 answers have Kelvin's text. A client that does not trust the issuer gets no connection."""
    (tmp_path / "root.pem").write_bytes(issuer.root)
    named = [(name.encode(), value.encode()) for name, value in headers(kelvin).items()]
    status, body = asyncio.run(http3_client.post(port, tmp_path / "root.pem", PATH, named, json.dumps(BODY).encode()))
    assert status == 200
    assert json.loads(body)["choices"][0]["text"] == complete(kelvin, "llama", "w1 w2", max_tokens=8).text
    with pytest.raises(ConnectionError):
        asyncio.run(http3_client.post(port, kelvin.data / "ca.pem", PATH, named, json.dumps(BODY).encode()))


def test_a_stream_comes_as_it_is_made_and_ends_with_its_client(kelvin: Installation, issuer: Issuer, port: int) -> None:
    """Two streams on one HTTP/2 connection arrive while they are made, and end when the client leaves."""
    with _client(port, issuer, kelvin, http2=True) as client:
        named = []
        for _ in range(2):
            answer = client.send(client.build_request("POST", PATH, json=HOURS), stream=True)
            named.append(answer.headers["x-request-id"])
            assert next(answer.iter_lines()).startswith("data: ")
        assert report(kelvin, "llama").running == 2
    for each in named:
        kelvin.wait(lambda each=each: is_recorded(kelvin, each), "it is in the ledger")  # type: ignore[misc]
    assert report(kelvin, "llama").running == 0


def test_no_timer_of_the_proxy_is_below_the_longest_deadline() -> None:
    """A whole answer sends nothing until it is computed, which may take up to Kelvin's longest deadline."""
    chains = [chain for each in yaml.safe_load(EXAMPLE.read_text())["static_resources"]["listeners"]
              for chain in each["filter_chains"]]  # fmt: skip
    managers = [chain["filters"][0]["typed_config"] for chain in chains]
    assert len(managers) == 2
    for manager in managers:
        assert float(manager["stream_idle_timeout"].removesuffix("s")) > DEFAULTS["KELVIN_DEADLINE_S"]
        assert manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["timeout"] == "0s"


def test_the_proxy_closes_idle_connections_before_kelvin() -> None:
    """Otherwise a request could be lost on a connection that Kelvin is closing."""
    (cluster,) = yaml.safe_load(EXAMPLE.read_text())["static_resources"]["clusters"]
    (options,) = cluster["typed_extension_protocol_options"].values()
    idle_s = float(options["common_http_protocol_options"]["idle_timeout"].removesuffix("s"))
    assert idle_s < read_settings({"KELVIN_DATA": "/data"}).connections.idle_s


def test_the_activator_speaks_http_1_1_alone(kelvin: Installation) -> None:
    """Negative control: without the proxy, the same client is served with HTTP/1.1."""
    trusted = ssl.create_default_context(cafile=str(kelvin.data / "ca.pem"))
    with httpx.Client(http2=True, verify=trusted, headers=headers(kelvin)) as client:
        assert client.get(f"https://localhost:{kelvin.port}/v1/models").http_version == "HTTP/1.1"
