"""Peers of the activator: how they are found and started, and when they count as ready."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from coldstart_bench.harness import front_tools
from coldstart_bench.harness.front_tools import LITELLM, RAY, PeerConfig
from coldstart_bench.harness.installation import InstallationFailed, free_port
from coldstart_bench.harness.temporary_certificates import make_certificate

# A stand-in for LiteLLM: it takes LiteLLM's arguments and config, and is ready at its second answer.
STAND_IN = """#!{python}
import http.server, json, ssl, sys
said = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
key = json.load(open(said["--config"]))["general_settings"]["master_key"]
class Answer(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_POST(self):
        Answer.asked += 1
        right = self.headers["authorization"] == "Bearer " + key and self.path == "/v1/chat/completions"
        print("asked", Answer.asked, flush=True)
        self.send_response(200 if right and Answer.asked > 1 else 404)
        self.end_headers()
server = http.server.HTTPServer((said["--host"], int(said["--port"])), Answer)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(said["--ssl_certfile_path"], said["--ssl_keyfile_path"])
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""


def installed(cache: Path, text: str) -> Path:
    """Install a program where `make bench-peers` puts LiteLLM."""
    program = cache / "kelvin-bench/peers/litellm/bin/litellm"
    program.parent.mkdir(parents=True)
    program.write_text(text)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def place(scratch: Path) -> PeerConfig:
    """A peer's configuration with its own certificate."""
    chain, private = make_certificate(scratch / "certificate")
    key = front_tools.new_key()
    return PeerConfig(scratch / "peer", free_port(), "/v1/chat/completions", 1, chain, private, key)


def test_installed_peer_is_started_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed peer is found, awaited until it answers 200 over TLS with its key, and ended with the block."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (front_tools.try_find_peer(LITELLM), front_tools.try_find_peer(RAY)) == (None, None)
    program = installed(tmp_path, STAND_IN.format(python=sys.executable))
    assert front_tools.try_find_peer(LITELLM) == program
    at = place(tmp_path)
    with front_tools.running_peer(LITELLM, program, at):
        assert "asked 2" in (at.at / "said").read_text()
    config = json.loads((at.at / "config.yaml").read_text())
    assert config["model_list"][0]["litellm_params"]["api_base"] == "http://127.0.0.1:1/v1"


def test_ended_peer_fails_with_its_last_words(tmp_path: Path) -> None:
    program = installed(tmp_path, "#!/bin/sh\necho no such key >&2\nexit 3\n")
    refused = pytest.raises(InstallationFailed, match="LiteLLM did not start: no such key")
    with refused, front_tools.running_peer(LITELLM, program, place(tmp_path)):
        pytest.fail("it counted as ready")


def test_how_ray_serve_is_started(tmp_path: Path) -> None:
    """Ray Serve is started with its own Python, for the same upstream, with a certificate."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\nexit 1\n')
    program.chmod(0o700)
    at = place(tmp_path)
    with pytest.raises(InstallationFailed, match="Ray Serve did not start"), front_tools.running_peer(RAY, program, at):
        pytest.fail("it counted as ready")
    words = (tmp_path / "words").read_text().split()
    assert Path(words[0]).name == "ray_proxy.py"
    assert words[1:3] == [str(at.port), "http://127.0.0.1:1/v1/chat/completions"]
    assert os.path.commonpath([words[3], at.at]) == str(at.at)
