"""Secrets sent through every interface are found nowhere afterwards: answers, files, command lines, environments."""

import base64
import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from coldstart_bench.harness.installation import Installation
from tests.e2e.commands import run
from tests.e2e.https_client import connect

pytestmark = pytest.mark.deep

Found = list[str]


def _ask(kelvin: Installation, method: str, path: str, body: object = None, **headers: str) -> bytes:
    """Return status line, headers and body of the answer."""
    connection = connect(kelvin)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"content-type": "application/json", **headers})
        answer = connection.getresponse()
        return f"{answer.status} {answer.getheaders()}".encode() + answer.read()
    finally:
        connection.close()


def _family() -> Iterable[psutil.Process]:
    return psutil.Process().children(recursive=True)


def find_secret(secret: str, kelvin: Installation, answers: Iterable[bytes]) -> Found:
    """Return where the secret, or its first half, is: answers, files of the installation, process arguments."""
    wanted = (secret.encode(), secret[:20].encode(), base64.b64encode(secret.encode())[:-4])
    places = {f"answer {number}": answer for number, answer in enumerate(answers)}
    for folder, _, names in os.walk(kelvin.data):  # files that vanish meanwhile are skipped
        for path in (Path(folder, name) for name in names):
            with contextlib.suppress(OSError):
                if path.is_file() and path.stat().st_size < 1 << 26:
                    places[str(path.relative_to(kelvin.data))] = path.read_bytes()
    for process in _family():
        for what in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                places[f"{what} of {process.pid}"] = Path(f"/proc/{process.pid}/{what}").read_bytes()
    return [place for place, content in places.items() if any(each in content for each in wanted)]


def test_a_secret_is_found_nowhere(kelvin: Installation, tmp_path: Path) -> None:
    """A key sent in any part of a request or command is found nowhere. A planted one is found (control)."""
    made = kelvin.admin.request("POST", "/admin/v1/keys", {"name": "marked", "scopes": ["infer", "billing:read"]})
    key, key_id = made["secret"], made["key"]["key_id"]
    secret = key.split("-", 2)[2]
    admin = {"authorization": f"Bearer {(kelvin.data / 'admin.key').read_text().strip()}"}
    bearer = {"authorization": f"Bearer {key}"}
    basic = base64.b64encode(f"user:{key}".encode()).decode()
    answers = [
        _ask(kelvin, "GET", "/v1/models", **bearer),
        _ask(kelvin, "GET", "/admin/v1/status", **bearer),
        _ask(kelvin, "GET", "/v1/models", authorization=f"Basic {basic}"),
        _ask(kelvin, "GET", "/v1/models", authorization=key),
        _ask(kelvin, "GET", f"/v1/models?api_key={key}"),
        _ask(kelvin, "GET", f"/v1/models/{key}", **bearer),
        _ask(kelvin, "GET", f"/v1/{key}", **bearer),
        _ask(kelvin, "POST", "/v1/completions", {"model": key, "prompt": "w1"}, **bearer),
        _ask(kelvin, "POST", "/v1/completions", {"model": f"llama@{key}", "prompt": "w1"}, **bearer),
        _ask(kelvin, "GET", f"/admin/v1/billing/report?month={key}", **bearer),
        _ask(kelvin, "GET", f"/admin/v1/models/{key}", **admin),
        _ask(kelvin, "POST", "/admin/v1/keys", {"name": key, "scopes": ["infer"]}, **admin),
        _ask(kelvin, "POST", "/admin/v1/keys", {"name": "x", "scopes": [key]}, **admin),
        _ask(kelvin, "POST", "/admin/v1/keys", {key: "x"}, **admin),
        _ask(kelvin, "POST", f"/admin/v1/keys/{key}/revoke", **admin),
        _ask(kelvin, "GET", f"/admin/v1/audit?before={key}", **admin),
        _ask(kelvin, "GET", f"/admin/v1/{key}", **admin),
        _ask(kelvin, "POST", "/push/v1/plans", {"model": key}, **admin),
    ]
    file = tmp_path / "marked.key"
    file.write_text(key)
    answers += [
        run(kelvin, "billing", "report", "--key", str(file)).encode(),
        run(kelvin, "models", "--key", str(file), code=1).encode(),
        run(kelvin, "models", "--key", key, code=1).encode(),  # the key itself instead of a file name
        run(kelvin, "keys", "list").encode(),
        run(kelvin, "audit", "list").encode(),
        run(kelvin, "keys", "revoke", key_id).encode(),
    ]
    answers.append(_ask(kelvin, "GET", "/v1/models", **bearer))
    assert b"401" in answers[-1][:4]
    assert find_secret(secret, kelvin, answers) == []

    planted = kelvin.data / "logs" / "planted.log"
    planted.write_text(f'{{"message": "{key}"}}')
    try:
        assert find_secret(secret, kelvin, [*answers, key.encode()]) == [f"answer {len(answers)}", "logs/planted.log"]
    finally:
        planted.unlink()


def test_processes_that_see_keys_leave_no_core(kelvin: Installation) -> None:
    """The kernel's limit for core files is 0 for activator and control plane."""
    limits = {}
    for process in _family():
        with contextlib.suppress(psutil.Error, OSError):
            command = process.cmdline()
            if len(command) == 4 and command[1:3] == ["-P", "-m"]:
                lines = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
                limits[command[3]] = next(line.split()[4:6] for line in lines if line.startswith("Max core file size"))
    assert limits["activator"] == limits["controlplane"] == ["0", "0"]


def test_undeclared_request_fields_are_stored_nowhere(kelvin: Installation) -> None:
    """Unknown fields, header values, queries and prompts are found in no file and no process."""
    mark = "xyzzy4711"
    key = f"Bearer {(kelvin.data / 'default.key').read_text().strip()}"
    marked = {"authorization": key, "x-mark": mark, "cookie": f"a={mark}", "user-agent": mark, "idempotency-key": mark}
    fine = {"model": "llama", "prompt": f"w1 {mark}", "max_tokens": 1}
    for body in (
        fine, {**fine, "metadata": {mark: mark}}, {**fine, mark: mark}, {**fine, "stream": True, "user": mark},
        {**fine, "max_tokens": mark}, {**fine, "stop": [mark]}, {**fine, "max_tokens": 1 << 30}, {**fine, "n": mark},
    ):  # fmt: skip
        _ask(kelvin, "POST", f"/v1/completions?{mark}={mark}", body, **marked)
    _ask(kelvin, "POST", "/v1/chat/completions", {"model": "llama", "messages": [{"role": mark}]}, **marked)
    assert find_secret(mark, kelvin, ()) == []
    planted = kelvin.data / "logs" / "planted.log"
    planted.write_text(f'{{"told": "{mark}"}}')
    try:
        assert find_secret(mark, kelvin, ()) == ["logs/planted.log"]
    finally:
        planted.unlink()
