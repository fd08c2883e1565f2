"""The recordings of a real API server, and how an answer of ours is compared with a recorded one.

Uids, resource versions and continue tokens are other ones here: each recorded one stands for the one that took its
place, which a comparison learns when it first sees the pair, and then holds to. A time is only a time. Where a
recording leaves `managedFields` out, they are not compared.
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
    """Recorded exchanges that lie beside the tests."""
    return [json.loads(line) for line in (Path(__file__).parent / "data" / f"{name}.jsonl").read_text().splitlines()]


@dataclass(slots=True)
class Answered:
    """An answer of ours."""

    status: int
    headers: dict[str, str]
    body: Any


class Client:
    """One connection to the server, as `python-requests` would use it."""

    def __init__(self, server: ApiServer) -> None:
        parts = urllib.parse.urlsplit(server.url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def lines(self, path: str) -> Iterator[bytes]:
        """What is answered to a GET, line by line, as it comes."""
        self._connection.request("GET", path, headers={"User-Agent": AGENT, "Authorization": f"Bearer {TOKEN}"})
        answer = self._connection.getresponse()
        rest = b""
        while piece := answer.read1():  # unlike `readline` it tells an end from a connection that broke
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines

    def send(self, request: Json) -> Answered:
        """A recorded request. A body that is text is sent as it is."""
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
    """Which of ours took the place of which recorded uid, version or token."""

    ours: dict[str, str] = field(default_factory=dict)
    theirs: dict[str, str] = field(default_factory=dict)

    def learn(self, theirs: str, ours: str) -> bool:
        """Whether the two can stand for each other."""
        return self.ours.setdefault(theirs, ours) == ours and self.theirs.setdefault(ours, theirs) == theirs

    def translated(self, value: Any, key: str = "") -> Any:
        """What was recorded, in our names."""
        if isinstance(value, dict):
            return {name: self.translated(each, name) for name, each in value.items()}
        if isinstance(value, list):
            return [self.translated(each, key) for each in value]
        if isinstance(value, str) and key in RENAMED:
            return self.ours.get(value, value)
        return self.in_text(value) if isinstance(value, str) else value

    def in_text(self, text: str) -> str:
        """Uids anywhere."""
        for theirs, ours in self.ours.items():
            if "-" in theirs:
                text = text.replace(theirs, ours)
        return text


def differences(want: Any, got: Any, names: NameMapping, at: str = "", key: str = "") -> list[str]:
    """What keeps ours from being the recorded one, path by path."""
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
    """Without what is drawn by lot: names, the order in which Go walks a map; nor with a version of the cluster."""
    text = re.sub(r"in record \(\d+\)", "in record", text)
    return "\n".join(sorted(text.splitlines())) if text.startswith("failed to create typed") else text


def compared(exchange: Json, said: Answered, names: NameMapping) -> list[str]:
    """What differs between a recorded answer and ours: status, body. Ours never warns."""
    want = exchange["response"]
    found = [] if want["status"] == said.status else [f"status {want['status']}, got {said.status}: {said.body}"]
    if want["headers"]["content-type"].partition(";")[0] != said.headers["content-type"].partition(";")[0]:
        found.append(f"content type {said.headers['content-type']}")
    return found + differences(want["body"], said.body, names)


class ExchangeReplay:
    """A server that nobody else writes to, and which of its names took the place of the recorded ones.

    `before`: what happened before an exchange.
    """

    def __init__(
        self, server: ApiServer, client: Client, before: Mapping[str, Callable[["ExchangeReplay"], None]] | None = None
    ) -> None:
        self.server, self.client, self.names = server, client, NameMapping()
        self._before = before or {}

    def all(self, exchanges: list[Json]) -> dict[str, list[str]]:
        """Every exchange in its order: what differs, by name."""
        found = {each["name"]: self.step(each) for each in exchanges}
        return {name: faults for name, faults in found.items() if faults}

    def step(self, exchange: Json) -> list[str]:
        if before := self._before.get(exchange["name"]):
            before(self)
        self._controllers(exchange["response"]["body"])
        said = self.client.send(self.names.translated(exchange["request"]))
        return compared(exchange, said, self.names)

    def _controllers(self, body: Any) -> None:
        """The status that controllers had written by then, as the recorded answer shows it."""
        if not isinstance(body, dict) or not isinstance(body.get("status"), dict) or "name" not in body["metadata"]:
            return
        try:
            metadata = body["metadata"]
            found = self.server.get(body["apiVersion"], body["kind"], metadata["name"], metadata.get("namespace", ""))
        except (Refused, KeyError):
            return
        if found.get("status") != body["status"] and found["kind"] != "Namespace":
            self.server.set_status(found, body["status"], manager="knative-controller")
