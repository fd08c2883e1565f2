"""Recordings of a real API server, and the comparison of our responses with them.

Uids, resource versions and continue tokens differ here. The comparison pairs each recorded one with ours when it first
sees them, and expects the same pair later. Times only need the right format. `managedFields` are compared only if the
recording has them.
"""

import http.client
import json
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.cluster.kube_api.api_server import ApiServer
from tests.cluster.kube_api.http_frontend import TOKEN
from tests.cluster.kube_api.status_answers import Json, Refused

NAMESPACE: Final = "kelvin-models"
AGENT: Final = "python-requests/2.32"
TIMES: Final = ("creationTimestamp", "deletionTimestamp", "time", "lastTransitionTime", "lastUpdateTime")
UNORDERED: Final = ("causes", "verbs", "resources")
RENAMED: Final = ("uid", "resourceVersion", "continue")
TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def copied(name: str) -> list[Json]:
    """Return recorded exchanges from the `data` folder."""
    return [json.loads(line) for line in (Path(__file__).parent / "data" / f"{name}.jsonl").read_text().splitlines()]


@dataclass(slots=True)
class Answered:
    """A response of the fake server."""

    status: int
    headers: dict[str, str]
    body: Any


class Client:
    """One connection to the server, with the headers of `python-requests`."""

    def __init__(self, server: ApiServer) -> None:
        parts = urllib.parse.urlsplit(server.url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def lines(self, path: str) -> Iterator[bytes]:
        """Yield the response to a GET line by line, as it arrives."""
        self._connection.request("GET", path, headers={"User-Agent": AGENT, "Authorization": f"Bearer {TOKEN}"})
        answer = self._connection.getresponse()
        rest = b""
        while piece := answer.read1():  # unlike `readline`, `read1` raises if the connection breaks
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines

    def send(self, request: Json) -> Answered:
        """Send a recorded request. A text body is sent as it is."""
        query, body = request.get("query") or {}, request.get("body")
        path = request["path"] + (f"?{urllib.parse.urlencode(query)}" if query else "")
        given: dict[str, str | None] = {"User-Agent": AGENT, "Authorization": f"Bearer {TOKEN}"}
        given |= {name.title(): value for name, value in (request.get("headers") or {}).items()}
        headers = {name: value for name, value in given.items() if value is not None}
        if request.get("content_type"):
            headers["Content-Type"] = request["content_type"]
        raw = None if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self._connection.request(request["method"], path, raw, headers)
        answer = self._connection.getresponse()
        text = answer.read()
        found = {name.lower(): value for name, value in answer.getheaders()}
        is_json = "json" in found.get("content-type", "") and "transfer-encoding" not in found
        return Answered(answer.status, found, json.loads(text) if is_json else text.decode())


@dataclass(slots=True)
class NameMapping:
    """The pairs of recorded and own uids, versions and tokens."""

    ours: dict[str, str] = field(default_factory=dict)
    theirs: dict[str, str] = field(default_factory=dict)

    def learn(self, theirs: str, ours: str) -> bool:
        """Record a pair. Return whether it fits the earlier pairs."""
        return self.ours.setdefault(theirs, ours) == ours and self.theirs.setdefault(ours, theirs) == theirs

    def translated(self, value: Any, key: str = "") -> Any:
        """Return a recorded value with our names."""
        if isinstance(value, dict):
            return {name: self.translated(each, name) for name, each in value.items()}
        if isinstance(value, list):
            return [self.translated(each, key) for each in value]
        if isinstance(value, str) and key in RENAMED:
            return self.ours.get(value, value)
        return self.in_text(value) if isinstance(value, str) else value

    def in_text(self, text: str) -> str:
        """Replace uids anywhere in a text."""
        for theirs, ours in self.ours.items():
            if "-" in theirs:
                text = text.replace(theirs, ours)
        return text


def differences(want: Any, got: Any, names: NameMapping, at: str = "", key: str = "") -> list[str]:
    """Return the differences between the recorded and our value, path by path."""
    if isinstance(want, dict) and isinstance(got, dict):
        found = []
        want = {names.in_text(name): each for name, each in want.items()}  # k:{"uid":...}
        if "managedFields" in got and "managedFields" not in want:
            got = {name: each for name, each in got.items() if name != "managedFields"}
        for name in sorted(want.keys() | got.keys()):
            if name not in want or name not in got:
                side = f"missing, should be {want[name]!r}" if name in want else f"too much: {got[name]!r}"
                found.append(f"{at}.{name}: {side}")
            else:
                found += differences(want[name], got[name], names, f"{at}.{name}", name)
        return found
    if isinstance(want, list) and isinstance(got, list):
        if key in UNORDERED:
            want, got = (sorted(each, key=lambda item: json.dumps(item, sort_keys=True)) for each in (want, got))
        if want and str(want[0]).startswith("("):  # "(1 item)"
            want = want * len(got)
            return [] if want[0].startswith(f"({len(got)} item") else [f"{at}: {len(got)} items, not {want[0]}"]
        if len(want) != len(got):
            return [f"{at}: {len(got)} of {len(want)}: {got!r}"]
        pairs = enumerate(zip(want, got, strict=True))
        return [fault for index, (one, other) in pairs for fault in differences(one, other, names, f"{at}[{index}]")]
    if key in TIMES and isinstance(got, str):
        return [] if TIME.fullmatch(got) else [f"{at}: {got!r} is no time"]
    if key in RENAMED and isinstance(want, str) and isinstance(got, str):
        same = (want == got == "") or (bool(want) and bool(got) and names.learn(want, got))
        return [] if same else [f"{at}: {want!r} was {names.ours.get(want)!r}, is {got!r}"]
    if isinstance(want, str) and isinstance(got, str):
        want, got = (_settled(names.in_text(each)) for each in (want, got))
    return [] if want == got else [f"{at}: {want!r}, got {got!r}"]


def _settled(text: str) -> str:
    """Return the text without random parts: names, Go's map order, versions of the cluster."""
    text = re.sub(r"in record \(\d+\)", "in record", text)
    return "\n".join(sorted(text.splitlines())) if text.startswith("failed to create typed") else text


def compared(exchange: Json, said: Answered, names: NameMapping) -> list[str]:
    """Return the differences in status and body between a recorded response and ours. Ours never has warnings."""
    want = exchange["response"]
    found = [] if want["status"] == said.status else [f"status {want['status']}, got {said.status}: {said.body}"]
    if want["headers"]["content-type"].partition(";")[0] != said.headers["content-type"].partition(";")[0]:
        found.append(f"content type {said.headers['content-type']}")
    return found + differences(want["body"], said.body, names)


class ExchangeReplay:
    """A server with no other writer, and the mapping of recorded names to its own.

    `before` has actions to run before an exchange.
    """

    def __init__(
        self, server: ApiServer, client: Client, before: Mapping[str, Callable[["ExchangeReplay"], None]] | None = None
    ) -> None:
        self.server, self.client, self.names = server, client, NameMapping()
        self._before = before or {}

    def all(self, exchanges: list[Json]) -> dict[str, list[str]]:
        """Replay every exchange in order. Return the differences by name."""
        found = {each["name"]: self.step(each) for each in exchanges}
        return {name: faults for name, faults in found.items() if faults}

    def step(self, exchange: Json) -> list[str]:
        if before := self._before.get(exchange["name"]):
            before(self)
        self._controllers(exchange["response"]["body"])
        said = self.client.send(self.names.translated(exchange["request"]))
        return compared(exchange, said, self.names)

    def _controllers(self, body: Any) -> None:
        """Set the status that controllers had written by then, from the recorded response."""
        if not isinstance(body, dict) or not isinstance(body.get("status"), dict) or "name" not in body["metadata"]:
            return
        try:
            metadata = body["metadata"]
            found = self.server.get(body["apiVersion"], body["kind"], metadata["name"], metadata.get("namespace", ""))
        except (Refused, KeyError):
            return
        if found.get("status") != body["status"] and found["kind"] != "Namespace":
            self.server.set_status(found, body["status"], manager="knative-controller")
