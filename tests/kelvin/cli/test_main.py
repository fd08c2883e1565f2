"""User errors: each gives one sentence and never a traceback."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import certifi
import httpx
import pytest
from click.testing import CliRunner

from kelvin.cli.base.api_client import CommandFailed, decode_json_object
from kelvin.cli.main import main

NO_CERTIFICATE = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


def _run(*words: str, **env: str) -> tuple[int, str]:
    """Return exit code and output. Unexpected exceptions are raised."""
    done = CliRunner().invoke(main, words, env=env, catch_exceptions=False)
    return done.exit_code, done.output


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with an invalid CA file and a valid key file."""
    (tmp_path / "ca.pem").write_text("no certificate\n")
    (tmp_path / "admin.key").write_text("kv_x\n")
    return tmp_path


@pytest.mark.parametrize(
    "url",
    [
        "nonsense", "https://", "ftp://x", "https://[::1", "https://x:65536", "//x", "https://:1", "https://a..b",
        f"https://{'a' * 64}", "https://xn--a",
    ],
)  # fmt: skip
def test_bad_url_is_named(data: Path, url: str) -> None:
    """The error quotes a bad URL from the option or the environment."""
    for words, env in ((("--url", url), {}), ((), {"KELVIN_URL": url})):
        code, text = _run("status", "--data", str(data), *words, **env)
        assert code == 1
        assert f"{url!r} is no address of an installation; it must be https://HOST" in text


@pytest.mark.parametrize("content", [b"", b"k\xffy", bytes(24)])
def test_damaged_file_of_the_address_is_named(data: Path, content: bytes) -> None:
    """The URL comes from a file in the data directory."""
    (data / "url").write_bytes(content)
    code, text = _run("status", "--data", str(data))
    assert (code, "is no address of an installation" in text) == (1, True), text


def test_environment_names_the_installation(data: Path) -> None:
    """`KELVIN_URL`, `KELVIN_CA` and `KELVIN_KEY` replace the options. An option wins over them."""
    code, text = _run("status", "--data", str(data), KELVIN_CA=str(data / "other.pem"))
    assert (code, f"CA file {data / 'other.pem'} does not exist" in text) == (1, True)
    code, text = _run("status", "--data", str(data), KELVIN_KEY=str(data / "other.key"))
    assert (code, f"key file {data / 'other.key'} does not exist" in text) == (1, True)
    code, text = _run("status", "--data", str(data), "--url", "https://localhost:1", KELVIN_URL="nonsense")
    assert (code, "holds no certificate" in text) == (1, True)


def test_missing_ca_of_another_installation_names_the_option(data: Path) -> None:
    """With `--url`, the hint is about `--ca` and not about running `kelvin up`."""
    code, text = _run("status", "--data", str(data / "none"), "--url", "https://x")
    assert (code, "CA file with --ca" in text, "kelvin up" in text) == (1, True, False)


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        pytest.param("[Errno 111] Connection refused", "is `kelvin up` running", id="refused"),
        pytest.param("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed", "--ca names the file", id="certificate"),
    ],
)
def test_unreachable_installation_is_named(data: Path, monkeypatch: pytest.MonkeyPatch, reason: str, hint: str) -> None:
    """The error has the URL, the reason and a hint."""

    def fail(_: object, request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError(reason, request=request)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", fail)
    code, text = _run("status", "--data", str(data), "--url", "https://x:9443", "--ca", certifi.where())
    assert code == 1
    assert f"can't be reached at https://x:9443: {reason}; {hint}" in text


@pytest.mark.parametrize(
    ("words", "status", "hint"),
    [
        pytest.param(("status",), 503, "`kelvin logs controlplane`", id="status without a control plane"),
        pytest.param(("billing", "report", "--tenant", "t"), 404, "--tenant t --scope billing:read", id="report"),
        pytest.param(("billing", "verify", "--tenant", "t"), 404, "--tenant t --scope billing:read", id="verify"),
        pytest.param(("billing", "reconcile", "--tenant", "t"), 404, "--tenant t --scope billing:read", id="reconcile"),
        pytest.param(
            ("billing", "close", "--tenant", "t", "--month", "2026-10"), 404, "--tenant t --scope admin", id="close"
        ),
    ],
)
def test_refusal_names_the_next_step(
    data: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], status: int, hint: str
) -> None:
    """The API's sentence alone doesn't tell a user what to do."""
    refusal = httpx.Response(status, json={"error": {"message": "no"}})
    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", lambda *_: refusal)
    code, text = _run(*words, "--data", str(data), "--url", "https://x", "--ca", certifi.where())
    assert (code, hint in text) == (1, True), text


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("tenants", "create", "acme"), id="create"),
        pytest.param(("tenants", "suspend", "acme"), id="suspend"),
        pytest.param(("tenants", "resume", "acme"), id="resume"),
        pytest.param(("tenants", "delete", "acme"), id="delete"),
        pytest.param(("stop", "toy"), id="stop"),
    ],
)
def test_redirect_is_no_success(data: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    """If a login proxy redirects the call, nothing was done and the command fails."""
    elsewhere = httpx.Response(302, headers={"location": "https://login"}, content=b"<html>")
    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", lambda *_: elsewhere)
    code, text = _run(*words, "--data", str(data), "--url", "https://x", "--ca", certifi.where())
    assert code == 1, text
    assert text.startswith("Error: https://x/admin/v1/"), text
    assert text.endswith(" answered 302: is the URL Kelvin's?\n"), text


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("show", "m"), id="show"),
        pytest.param(("export", "m", "/nowhere/x"), id="export"),
        pytest.param(("models", "render", "m", "--image", "i", "--store", "s3://models"), id="render"),
        pytest.param(("collect", "--run"), id="collect"),
    ],
)
def test_page_of_another_server_is_named(data: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    """An HTML page with status 200 is an error."""
    page = httpx.Response(200, content=b"<html>")
    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", lambda *_: page)
    code, text = _run(*words, "--data", str(data), "--url", "https://x", "--ca", certifi.where())
    assert code == 1
    assert text.startswith("Error: https://x/"), text
    assert text.endswith(": is the URL Kelvin's?\n"), text


def test_logs_are_of_this_machine() -> None:
    """Logs are local files, so the command has no `--url`."""
    code, text = _run("logs", "--url", "https://x")
    assert (code, "No such option" in text) == (2, True)


@pytest.mark.parametrize("pem", [b"", b"no certificate\n", NO_CERTIFICATE, b"\xff"])
def test_bad_ca_file_is_named(data: Path, pem: bytes) -> None:
    """The file contains no valid certificate."""
    (data / "ca.pem").write_bytes(pem)
    code, text = _run("status", "--data", str(data))
    assert code == 1
    assert f"CA file {data / 'ca.pem'} holds no certificate" in text


@pytest.mark.parametrize("key", [b"", b"\n", b"two words", b"two\nlines", bytes(60), "k\u00e4y".encode(), b"k\xffy"])
def test_bad_key_file_is_named(data: Path, key: bytes) -> None:
    """The error doesn't show the file's content."""
    (data / "admin.key").write_bytes(key)
    code, text = _run("status", "--data", str(data), "--ca", certifi.where())
    assert code == 1
    assert f"key file {data / 'admin.key'} holds no API key" in text


@pytest.mark.parametrize("name", ["admin.key", "url"])
def test_unreadable_file_is_named(data: Path, name: str) -> None:
    """The kernel's error of a failing disk has no file name."""
    (data / name).unlink(missing_ok=True)
    (data / name).symlink_to("/proc/self/mem")
    code, text = _run("status", "--data", str(data), "--ca", certifi.where())
    assert (code, f"{data / name}: Input/output error" in text) == (1, True)


@pytest.mark.parametrize("command", ["status", "up", "logs"])
@pytest.mark.parametrize(
    ("place", "why"),
    [
        pytest.param("", "must not be empty", id="empty"),
        pytest.param("x" * 300, "File name too long", id="too long"),
        pytest.param("/dev/null/x", "/dev/null/x", id="below a file"),
    ],
)
def test_odd_data_directory_is_named(command: str, place: str, why: str) -> None:
    """An empty path doesn't create files in the current directory."""
    code, text = _run(command, "--data", place)
    assert code in (1, 2)
    assert why in text


def _is_full(code: int, text: str, data: Path, what: str) -> bool:
    mend = f"Make room, for example by removing DATA/cache, which is filled again from the store. DATA is {data}"
    return (code, text) == (1, f"Error: {what} can't be written: No space left on device. {mend}\n")


def test_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation can't start without space for its spool. The error says so, and what may be deleted."""

    def write(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write)
    assert _is_full(*_run("up", "--data", str(tmp_path)), tmp_path, "DATA/spool")


def test_full_disk_without_room_for_the_lock_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is the first file that a start writes."""

    def write(fd: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kelvin.supervisor.data_lock.os.write", write)
    assert _is_full(*_run("up", "--data", str(tmp_path)), tmp_path, "DATA/lock")


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_partly_written_output_is_an_error(tmp_path: Path, unbuffered: str) -> None:
    """If the disk becomes full during the output, the exit code shows that the rest is missing."""
    limit = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, -1))"
    program = f"{limit}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    with (tmp_path / "out").open("wb") as file:
        done = subprocess.run(
            [sys.executable, "-c", program, "-m", "kelvin.cli.main", "cluster", "tenant", "t"],
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode != 0
    assert "Error: a file can't be written: File too large" in done.stderr


@pytest.mark.parametrize("words", ["scale m --target", "scale m --window", "scale m --grace", "timeline r --floor-ms"])
@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "one"])
def test_number_is_finite(words: str, number: str) -> None:
    """NaN is neither below nor above a bound, so a range check alone accepts it."""
    code, text = _run(*words.split(), number)
    assert code == 2
    assert number in text


@pytest.mark.parametrize(
    "words", ["tenants set t --rpm NUMBER", "audit windows --set admin=NUMBER", "models split m aaaaaaaaaaaa=NUMBER"]
)
@pytest.mark.parametrize("number", ["\u0663", "\uff13", "1_000", "9" * 5000, "-1", ""])
def test_whole_number_is_of_ascii_digits(words: str, number: str) -> None:
    """Digits of other scripts, signs and separators are refused."""
    code, text = _run(*(word.replace("NUMBER", number) for word in words.split()))
    assert code == 2
    assert "must be" in text


def test_early_interrupt_leaves_no_traceback() -> None:
    """Ctrl-C while modules are imported prints no traceback."""
    program = """
import sys

class Interrupted:
    def find_spec(self, name, path, target=None):
        if name == "kelvin.cli.main":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
from kelvin.cli.start import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=os.environ, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"Aborted!\n")


@pytest.mark.parametrize("body", [b"<html>", b"", b"[]", b"\xff", b"[" * 100_000])
def test_answer_of_another_server_is_named(body: bytes) -> None:
    """A proxy or another server at the URL replied with 200."""
    answer = httpx.Response(200, content=body, request=httpx.Request("GET", "https://x/admin/v1/status?key=kv_1"))
    with pytest.raises(CommandFailed, match=r"^https://x/admin/v1/status answered with no JSON object: is the URL"):
        decode_json_object(answer)
