"""Tenants that send the same requests to the same models, at one activator or several. Each response names the tenant
that it was made for. This module checks every response; a test decides the order of requests.
"""

import asyncio
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from kelvin.contracts.serving.control_messages import ModelRow, Scope
from kelvin.contracts.serving.degradation_steps import Cached
from kelvin.contracts.serving.stream_frames import FrameKind, StreamEnd
from kelvin.contracts.traffic_errors import ContentFiltered, FilterFailed
from kelvin.contracts.wire import encode
from tests.activator.control import KEY, OTHER, STRANGER, VERSION, key_row, replica_row, version_row
from tests.activator.replica import DONE, ReceivedRequest, chunk, whole
from tests.activator.world import ActivatorWorld, ReceivedResponse

THIRD: Final = "kv-thirdthirdth-" + "t" * 43
KEYS: Final = {"default": KEY, "stranger": STRANGER, "third": THIRD}
MODELS: Final = ("default/m", "stranger/m", "default/twin")  # all have the same two versions
VERSIONS: Final = (VERSION, OTHER)  # the second has filters: it ends answers with content_filter, and refuses bad input
BODIES: Final = ("good", "bad")


@dataclass(frozen=True)
class TenantRequest:
    """One request. `named` is the alias in the model name, or empty."""

    who: str
    model: str
    named: str = ""
    body: str = "good"
    stream: bool = False
    greedy: bool = True
    cache: bool = True
    key: str = ""
    never: bool = False
    door: int = 0


@dataclass(frozen=True)
class ConcurrentRequests:
    """Requests sent at the same time."""

    asks: tuple[TenantRequest, ...]


@dataclass(frozen=True)
class Deploy:
    """The alias points to `version` from now on."""

    model: str
    alias: str
    version: str


@dataclass(frozen=True)
class Grant:
    """The grantees may call the model from now on, besides its owner."""

    model: str
    grantees: tuple[str, ...]


@dataclass(frozen=True)
class Busy:
    """Replicas refuse from now on, or serve again. While they refuse, only the degradation step `cached` can answer."""

    is_so: bool


Step = ConcurrentRequests | Deploy | Grant | Busy


@dataclass
class Model:
    """The current grants and aliases of a model, and every version that an alias ever pointed to."""

    grantees: tuple[str, ...] = ("default", "stranger", "third")
    aliases: dict[str, str] = field(default_factory=lambda: {"prod": VERSION, "next": OTHER})
    meant: dict[str, set[str]] = field(default_factory=lambda: {"prod": {VERSION}, "next": {OTHER}})


class TenantLeak(AssertionError):
    """A response was made for another tenant or another question."""


class IsolationWorld:
    """One or more activators, and the checks of their responses. Each `play` asks new questions."""

    def __init__(self, doors: list[ActivatorWorld]) -> None:
        self._doors = doors
        self._plays = itertools.count()
        self._made = itertools.count()
        self._busy = False
        self._models: dict[str, Model] = {}
        self._used: set[tuple[str, str]] = set()  # (tenant, key)
        self._ids: dict[str, str] = {}  # request id: tenant
        self.seen: Counter[str] = Counter()  # count of stored answers by store

    async def start(self) -> None:
        """Start a replica of every version of every model at each activator."""
        for door in self._doors:
            rows, versions = [], []
            for at, (model, version) in enumerate(itertools.product(MODELS, VERSIONS)):
                owner, _, name = model.partition("/")
                replica = await door.replica(f"r{at}", is_published=False)
                replica.script = self._script(owner, model, version)
                row = replica_row(f"r{at}", version=version)
                rows.append(msgspec.structs.replace(row, tenant=owner, model=name))
                versions.append(version_row(owner, name, version))
            key = key_row("k5", THIRD, "third", Scope.INFER)
            door.control.publish(*rows, versions=tuple(versions), keys=(key,))

    async def play(self, steps: Iterable[Step]) -> None:
        """Apply the steps and check every response. Raises TenantLeak."""
        play = next(self._plays)
        self._busy, self._models = False, {name: Model() for name in MODELS}
        await self._tell(MODELS)
        for step in steps:
            match step:
                case Busy(is_so=is_so):
                    self._busy = is_so
                case Deploy(model=model, alias=alias, version=version):
                    self._models[model].aliases[alias] = version
                    self._models[model].meant[alias].add(version)
                    await self._tell((model,))
                case Grant(model=model, grantees=grantees):
                    self._models[model].grantees = grantees
                    await self._tell((model,))
                case ConcurrentRequests(asks=asks):
                    self._used |= {(ask.who, f"{play}-{ask.key}") for ask in asks if ask.key}
                    sent = [self._send(play, ask) for ask in asks]
                    answers = await asyncio.gather(*(got for _, got in sent))
                    self._ids |= {got.headers["x-request-id"]: ask.who for ask, got in zip(asks, answers, strict=True)}
                    for ask, (body, _), got in zip(asks, sent, answers, strict=True):
                        self._judge(play, ask, body, got)

    async def _tell(self, models: Iterable[str]) -> None:
        rows = []
        for model in models:
            (owner, _, name), now = model.partition("/"), self._models[model]
            rows.append(
                ModelRow(
                    tenant=owner, model=name, aliases=dict(now.aliases), created_at_s=7, ladder=(Cached(age_s=3600),),
                    grantees=tuple(each for each in now.grantees if each != owner),
                )
            )  # fmt: skip
        for door in self._doors:
            door.control.publish(models=tuple(rows))
        await asyncio.gather(*(door.settled() for door in self._doors))

    def _send(self, play: int, ask: TenantRequest) -> tuple[bytes, Any]:
        """Return the body and the pending response. Equal questions have equal bodies."""
        wanted: dict[str, object] = {"messages": [{"role": "user", "content": f"{ask.body} {play}"}]}
        wanted |= {"stream": True} if ask.stream else {}
        wanted |= {"temperature": 0} if ask.greedy else {}
        body = json.dumps(wanted).encode()
        headers = {"x-kelvin-cache": "allow"} if ask.cache else {}
        headers |= {"idempotency-key": f"{play}-{ask.key}"} if ask.key else {}
        headers |= {"x-kelvin-degrade": "never"} if ask.never else {}
        named = f"@{ask.named}" if ask.named else ""
        door = self._doors[ask.door % len(self._doors)]
        return body, door.post(f"/{ask.model}{named}/v1/chat/completions", body, KEYS[ask.who], **headers)

    def _script(self, owner: str, model: str, version: str) -> Any:
        """Return a script whose answers name the tenant, model, version and body that the replica received."""

        async def say(call: ReceivedRequest) -> None:
            if self._busy:
                call.refuse(FilterFailed())
                return
            if version == OTHER and b"bad" in call.body:
                call.refuse(ContentFiltered("messages", "bad"))
                return
            text = "|".join(
                (call.headers.get("x-kelvin-guest", owner), model, version, _digest(call.body), str(next(self._made)))
            )
            for part in (chunk(text), DONE) if call.wanted.get("stream") else (whole(text),):
                await call.data(part, 2)
            reason = "content_filter" if version == OTHER else "stop"
            await call.write(FrameKind.END, encode(StreamEnd(finish_reason=reason)), 2)

        return say

    def _judge(self, play: int, ask: TenantRequest, body: bytes, got: ReceivedResponse) -> None:
        model, alias = self._models[ask.model], ask.named or "prod"
        may = ask.who == ask.model.partition("/")[0] or ask.who in model.grantees
        wrong = f"{ask} got {got}"
        if not may or got.status == 404:
            _hold(not may and got.status == 404, wrong)
            return
        of = got.headers.get("x-kelvin-repeat-of")
        _hold(of is None or self._ids.get(of, ask.who) == ask.who, wrong)
        if got.status in (409, 422):
            _hold(bool(ask.key) and (ask.who, f"{play}-{ask.key}") in self._used, wrong)
        elif got.status == 503:
            _hold(self._busy, wrong)
        elif got.status == 400:
            _hold(model.aliases[alias] == OTHER and ask.body == "bad", wrong)
        else:
            _hold(got.status == 200, wrong)
            whose, of_model, version, digest, _ = _text(got).split("|")
            _hold((whose, of_model, digest) == (ask.who, ask.model, _digest(body)), wrong)
            _hold(version in (model.meant[alias] if ask.key else {model.aliases[alias]}), wrong)
            _hold(got.headers["x-kelvin-version"] == version, wrong)
            self._note(got)

    def _note(self, got: ReceivedResponse) -> None:
        if got.headers.get("x-kelvin-cache") == "hit":
            self.seen["cache"] += 1
        elif got.headers.get("x-kelvin-degraded") == "cached":
            self.seen["ladder"] += 1
        elif "x-kelvin-repeat-of" in got.headers:
            self.seen["once" if "idempotent-replayed" in got.headers else "joined"] += 1


def _hold(is_so: bool, wrong: str) -> None:
    if not is_so:
        raise TenantLeak(wrong)


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]


def _text(got: ReceivedResponse) -> str:
    """Return the text of a whole or streamed answer."""
    for line in got.body.splitlines():
        if line.startswith((b"data: {", b"{")):
            choice: Any = json.loads(line.removeprefix(b"data: "))["choices"][0]
            said: str = choice["delta" if b"data: " in line[:6] else "message"]["content"]
            return said
    raise TenantLeak(f"nothing was said: {got}")
