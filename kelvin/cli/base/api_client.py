"""Call the installation's API from the command line: HTTPS with an API key, errors as sentences and exit codes."""

import os
import ssl
from contextlib import nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import click
import httpx
import msgspec
from rich.console import Console

from kelvin.contracts.accounting.billing_reports import Examining
from kelvin.contracts.errors import RemoteFailure
from kelvin.contracts.numbers import parse_whole_number
from kelvin.contracts.problem import from_problem
from kelvin.contracts.redaction import redact
from kelvin.contracts.wire import BadJson, decode, decode_any, decoder
from kelvin.process.hardening import protect_memory
from kelvin.supervisor.data_lock import name_path_in_errors
from kelvin.supervisor.settings import DEFAULT_PORT

json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print the API's JSON response.")
TIMEOUT_S: Final = 60.0
REPORT_POLL_S: Final = 60.0  # the installation answers much earlier, with the report or with its progress


class CommandFailed(click.ClickException):
    """The installation can't be reached, or refused the call. Exit code 1. Secrets of keys are redacted in the message.
    `status` is the HTTP status of the refusal, if there was a response.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(redact(message))
        self.status = status


@dataclass(frozen=True, slots=True)
class Target:
    """The installation that a command calls: a data directory on this machine, or a URL with CA and key."""

    data: Path
    url: str | None = None
    ca: Path | None = None
    key: Path | None = None

    def client(self, key_file: str = "admin.key") -> httpx.Client:
        """Return an HTTP client. Raises CommandFailed if URL, CA or key is missing or invalid."""
        protect_memory()
        ca, key = self.ca or self.data / "ca.pem", self.key or self.data / key_file
        try:
            url = _checked_url(self.url or self._read("url", f"https://localhost:{DEFAULT_PORT}"))
            for path, what in ((ca, "CA"), (key, "key")):
                if not path.exists():
                    raise CommandFailed(f"{what} file {path} does not exist; {self._hint(what)}")
            trusted, secret = _tls_context(ca), _read_key(key)
        except OSError as error:
            raise CommandFailed(f"{os.fsdecode(error.filename)}: {error.strerror}") from error
        return httpx.Client(
            base_url=url,
            verify=trusted,
            headers={"authorization": f"Bearer {secret}"},
            timeout=TIMEOUT_S,
            event_hooks={"response": [raise_for_error]},
            trust_env=False,
        )

    def _hint(self, what: str) -> str:
        if self.url is None:
            return "is `kelvin up` running with this data directory?"
        return f"give the installation's {what} file with --{what.lower()}"

    def _read(self, name: str, default: str) -> str:
        path = self.data / name
        with name_path_in_errors(path):
            return path.read_text("latin-1").strip() if path.exists() else default


def _checked_url(url: str) -> httpx.URL:
    try:
        found = httpx.URL(url)
        found.raw_host.decode().encode("idna")  # the resolver does the same and would raise later
        if found.scheme in ("https", "http") and found.host and (found.port or 0) < 1 << 16:
            return found
    except (httpx.InvalidURL, UnicodeError):
        pass
    raise CommandFailed(f"{url!r} is no address of an installation; it must be https://HOST or https://HOST:PORT")


def _tls_context(ca: Path) -> ssl.SSLContext:
    try:
        with name_path_in_errors(ca):
            return ssl.create_default_context(cafile=str(ca))
    except ssl.SSLError as error:
        raise CommandFailed(f"CA file {ca} holds no certificate that can be read; it must be PEM") from error


def _read_key(key: Path) -> str:
    with name_path_in_errors(key):
        text = key.read_text("latin-1").strip()
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise CommandFailed(f"key file {key} holds no API key; it must be one line, as `kelvin keys create` prints it")
    return text


def current_target() -> Target:
    """Return the installation that the running command was pointed at."""
    found = click.get_current_context().obj
    assert isinstance(found, Target)
    return found


def tenant_query(tenant: str | None) -> dict[str, str]:
    """Return the query that names a tenant. Without one, the API uses the key's own tenant."""
    return {} if tenant is None else {"tenant": tenant}


def raise_for_error(answer: httpx.Response) -> None:
    """Raise CommandFailed with the message of an error response. A redirect is an error too: a proxy sent it."""
    if answer.is_success:
        return
    answer.read()
    raise CommandFailed(failure_of_response(answer).message, answer.status_code)


def decode_json_object(answer: httpx.Response) -> dict[str, Any]:
    """Return the JSON object in a response. Raises CommandFailed on anything else, such as a proxy's page."""
    try:
        found = decode_any(answer.content)
    except BadJson:
        found = None
    if not isinstance(found, dict):
        raise CommandFailed(f"{answer.url.copy_with(query=None)} answered with no JSON object: is the URL Kelvin's?")
    return found


def call_json(method: str, path: str, **sent: Any) -> dict[str, Any]:
    """Call the installation and return the JSON object of the response. `sent` are more arguments of `httpx.request`.
    Raises CommandFailed as `Target.client` and `decode_json_object` do, and on a refusal.
    """
    with current_target().client() as client:
        return decode_json_object(client.request(method, path, **sent))


def unreachable_error(error: httpx.TransportError) -> CommandFailed:
    """Return the error of a call without a response: the address, the reason, and what to do next."""
    origin = str(error.request.url.copy_with(raw_path=b"/")).rstrip("/")
    hint = (
        "--ca names the file of the authority that signed its certificate"
        if "CERTIFICATE_VERIFY_FAILED" in str(error)
        else "is `kelvin up` running, and is that its address (--url)?"
    )
    return CommandFailed(f"the installation can't be reached at {origin}: {error}; {hint}")


class _Error(msgspec.Struct):
    message: str
    code: str | int | None = None
    param: str | None = None


class _ForeignError(msgspec.Struct):
    """An error without a code of ours, from the front door or from another server on the way. Its form is an OpenAI
    error or problem details (RFC 9457).
    """

    error: _Error | None = None
    detail: str | None = None


def failure_of_response(answer: httpx.Response) -> RemoteFailure:
    """Return the failure in a response that is no success. The body must have been read.

    1. Below 400, such as a redirect: the server is not Kelvin.
    2. Problem details with a code of ours: that failure.
    3. Other problem details, or an unknown body: unavailable.
    4. An OpenAI error: its code and message.
    """
    status = answer.status_code
    # (1)
    if status < 400:
        url = answer.url.copy_with(query=None)
        return RemoteFailure("unavailable", status, f"{url} answered {status}: is the URL Kelvin's?")
    # (2)
    if (found := from_problem(answer.content)) is not None:
        return found
    is_transient = status in (429, 502, 503, 504)
    after_s = parse_whole_number(answer.headers.get("retry-after", ""))
    try:
        foreign = decoder(_ForeignError).decode(answer.content)
    except BadJson:
        foreign = _ForeignError()
    # (3)
    if foreign.error is None:
        message = foreign.detail or f"the answer was {status}"
        return RemoteFailure("unavailable", status, message, None, is_transient, after_s)
    # (4)
    return RemoteFailure(
        str(foreign.error.code or "error"), status, foreign.error.message, foreign.error.param, is_transient, after_s
    )


def poll_report(client: httpx.Client, path: str, params: dict[str, str]) -> bytes:
    """Poll until the report is ready and return its JSON. The control plane reads every row of a ledger or audit first.
    Progress is shown on a terminal. Raises what the client raises.
    """
    console = Console(stderr=True)
    with console.status("reading") if console.is_terminal else nullcontext() as status:
        while (answer := client.get(path, params=params, timeout=REPORT_POLL_S)).status_code == HTTPStatus.ACCEPTED:
            progress = decode(answer.content, Examining, field="answer of the control plane")
            if status is not None:
                status.update(f"reading: {progress.rows:,} of {progress.of:,} rows")
    return answer.content
