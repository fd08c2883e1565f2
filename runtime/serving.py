"""A version that is bound and ready, and how it makes a request for its engine out of a body.

`Served` is common to all kinds, `Serving` is a decoder; encoders and predictors have theirs in `encoder/` and
`predictor/`. `restore.py` makes them, and `replica.py` decides when they are used.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, TypeVar

from contracts.ceiling import NO_CEILING, Ceiling
from contracts.errors import LimitExceeded, Refused
from contracts.jobs import Bind, SealAttestation
from contracts.manifest import Kind, Limits
from contracts.timeline import Span
from runtime.answer import Answer, Feed
from runtime.engine.interface import Engine, Event, GenerationRequest, Request, Sampling
from runtime.engine.thread import EngineThread
from runtime.openai_answers import Heading, renderer_for
from runtime.openai_requests import (
    Ask,
    ChatPrompt,
    TextPrompt,
    TokenPrompt,
    decode_chat,
    decode_completion,
    fit_output,
)
from runtime.pinned import SamplingDefaults
from runtime.policy.schedule import OWNER
from runtime.screening import Screen, ScreenedAnswer
from runtime.tokenizer import TextCodec
from service.fair_lock import FairLock

T = TypeVar("T")

CHAT: Final = "/v1/chat/completions"
# Longer prompts are rendered and encoded beside the loop, one at a time: a megabyte takes tenths of a second.
# A template may take its whole budget for a short chat, about a second of the loop. It slows replicas of its own
# version alone.
INLINE_CHARACTERS: Final = 4096
_PROMPTS_WAITING: Final = 1024  # bounds memory; deadlines bound the wait
_PROMPTS_WAITING_OF_TENANT: Final = 256
_LEAST_TOP_P: Final = 1e-6  # OpenAI's 0: the engine keeps the likeliest token whatever its share


class Encoding:
    """Runs work on prompts: on short ones at once, on long ones in one thread, where tenants take turns.

    So prompts take at most one core from the engine, and a tenant waits for at most one prompt of each other tenant.
    """

    def __init__(self, longest_inline: int = INLINE_CHARACTERS) -> None:
        """Work of a larger size than `longest_inline` is done in the thread."""
        self._longest_inline = longest_inline
        self._executor = ThreadPoolExecutor(1, "encode")
        self._lock = FairLock("the queue of long inputs", _PROMPTS_WAITING, _PROMPTS_WAITING_OF_TENANT)

    def __repr__(self) -> str:
        return f"<Encoding {self._lock!r}>"

    @property
    def waiting(self) -> int:
        """How many prompts wait for their turn."""
        return self._lock.waiting

    async def run(self, tenant: str, size: int, work: Callable[[], T]) -> T:
        """Return the result of `work`. Raises what it raises, and `Refused(Overloaded)` at once if too many wait."""
        if size <= self._longest_inline:
            return work()
        async with self._lock.hold(tenant):
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)


@dataclass(frozen=True, slots=True)
class Wiring:
    """Callbacks of a restore and, afterwards, of its engine's thread."""

    on_events: Callable[[list[Event]], None]
    on_busy: Callable[[bool], None]
    on_stage: Callable[[Span], None] = lambda span: None  # after each stage of the restore, in its thread


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request for the engine, and how its answer will be made."""

    request: Request
    answer: Feed
    stream: bool
    unfiltered: bool = False  # some of the prompt passed its filters unseen


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Served(ABC):
    """What a replica serves from READY to its end, whatever its kind. `engine` belongs to its thread: read only its
    gauges.
    """

    kind: ClassVar[Kind]
    bind: Bind
    limits: Limits
    engine: Engine
    thread: EngineThread
    spans: tuple[Span, ...]  # the stages of the restore
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    recorded: SealAttestation | None = None  # known answers, where this engine had none before
    kept: "Kept | None" = None  # what stays in host memory when it sleeps; None if it can't sleep
    encoding: Encoding = field(default_factory=Encoding)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.bind.tenant}/{self.bind.model}@{self.bind.version[:12]} {self.engine!r}>"

    @abstractmethod
    async def prepare(
        self,
        path: str,
        raw: bytes,
        request_id: str,
        created_s: int,
        ceiling: Ceiling = NO_CEILING,
        tenant: str = OWNER,
    ) -> Prepared:
        """Decode and encode a request, and apply the version's limits and the caller's. `tenant` is OWNER or the guest
        that asks. Raises `Refused` before any compute.
        """


@dataclass(frozen=True, slots=True)
class Kept:
    """A version without an engine. Its weights stay in host memory until they are dropped."""

    release: Callable[[], None]  # free what the engine left on the weights, and its KV cache
    # Return the version with a new engine. It gives the known answers before its first token or, if the weights were
    # dropped, before this returns. Raises `Refused`.
    again: Callable[[Bind, Wiring], Served]
    drop: Callable[[], None]  # give the weights back; `again` leases them anew. Raises `Refused`
    copied: bool = False  # the engine computes over copies of the weights on a device


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Serving(Served):
    """A decoder: completions and chats."""

    kind = "generate"
    context_tokens: int  # what positions and KV pool leave for prompt and answer together
    codec: TextCodec
    defaults: SamplingDefaults
    screen: Screen | None = None

    async def prepare(
        self,
        path: str,
        raw: bytes,
        request_id: str,
        created_s: int,
        ceiling: Ceiling = NO_CEILING,
        tenant: str = OWNER,
    ) -> Prepared:
        """See `Served`."""
        ask = decode_chat(raw) if path == CHAT else decode_completion(raw)
        unfiltered = False
        if self.screen is not None:
            characters = _characters(ask)  # checked before the filters work on it
            await self.encoding.run(tenant, characters, lambda: self._check_length(ask, characters))
            prompt, unfiltered = await self.screen.prompt(ask.prompt, ask.prompt_field, tenant)
            ask = replace(ask, prompt=prompt)
        request = await self._request(ask, request_id, ceiling, tenant)
        heading = Heading(request_id, ask.model or self.bind.model, self.bind.version, created_s)
        renderer = renderer_for(heading, chat=ask.is_chat, stream=ask.stream, include_usage=ask.include_usage)
        answer = Answer(renderer, self.codec.detokenizer(request.prompt_ids), ask.stops)
        output = None if self.screen is None else self.screen.output(tenant)
        return Prepared(request, answer if output is None else ScreenedAnswer(answer, output), ask.stream, unfiltered)

    async def _request(self, ask: Ask, request_id: str, ceiling: Ceiling, tenant: str) -> GenerationRequest:
        """Return the request for the engine: template, tokens and limits applied. Raises `Refused`."""
        prompt_ids = await self._prompt_ids(ask, tenant)
        try:
            max_tokens = fit_output(ask, len(prompt_ids), self.limits, self.context_tokens, ceiling)
        except Refused as refused:
            refused.encoded_tokens = 0 if isinstance(ask.prompt, TokenPrompt) else len(prompt_ids)
            raise
        return GenerationRequest(
            request_id=request_id,
            prompt_ids=prompt_ids,
            sampling=self._sampling(ask, max_tokens),
            stop_ids=self.codec.stop_ids,
            tenant=tenant,
        )

    async def _prompt_ids(self, ask: Ask, tenant: str) -> tuple[int, ...]:
        if isinstance(ask.prompt, TokenPrompt):
            return ask.prompt.ids
        characters = _characters(ask)
        if characters > INLINE_CHARACTERS:  # rendered and encoded in one turn
            return await self.encoding.run(tenant, characters, lambda: self._encode(ask, self._text(ask)))
        text = self._text(ask)  # can be long: a template can make much of a few messages
        return await self.encoding.run(tenant, len(text), lambda: self._encode(ask, text))

    def _text(self, ask: Ask) -> str:
        """Return the text that is encoded. Slow if long, as is `_encode`. Raises `Refused`."""
        self._check_length(ask, _characters(ask))
        match ask.prompt:
            case ChatPrompt(messages):
                return self.codec.render(messages)
            case TextPrompt(text):
                return text
            case TokenPrompt():
                raise AssertionError("token ids are no text")

    def _encode(self, ask: Ask, text: str) -> tuple[int, ...]:
        self._check_length(ask, len(text))
        return self.codec.encode_rendered(text) if ask.is_chat else self.codec.encode(text)

    def _check_length(self, ask: Ask, characters: int) -> None:
        """Raise `Refused(LimitExceeded)` for a text that can't fit, before anything works on it: it would be too long
        even if each of its tokens were the longest one.
        """
        if characters <= INLINE_CHARACTERS:
            return
        most = self.codec.longest_token * min(self.limits.max_input_tokens, self.context_tokens - 1)
        if characters > most:
            raise Refused(LimitExceeded(ask.prompt_field, characters, most, "characters"))

    def _sampling(self, ask: Ask, max_tokens: int) -> Sampling:
        defaults = self.defaults
        top_p = defaults.top_p if ask.top_p is None else ask.top_p
        return Sampling(
            max_tokens=max_tokens,
            temperature=defaults.temperature if ask.temperature is None else ask.temperature,
            top_p=max(top_p, _LEAST_TOP_P),
            top_k=defaults.top_k if ask.top_k is None else ask.top_k,
            seed=ask.seed,
        )


def _characters(ask: Ask) -> int:
    """Return the length of the text that is to be encoded."""
    match ask.prompt:
        case TextPrompt(text):
            return len(text)
        case TokenPrompt():
            return 0
        case ChatPrompt(messages):
            return sum(len(text) for message in messages for text in message.values())
