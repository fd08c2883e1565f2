"""A version that is bound and ready, and how it makes a request for its engine out of a body.

`ServedVersion` is common to all kinds, `ServedDecoder` is a decoder; encoders and predictors have theirs in `encoder/`
and `predictor/`. `version_restore.py` makes them, and `replica.py` decides when they are used.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, TypeVar

from kelvin.contracts.artifacts.manifest import Kind, Limits
from kelvin.contracts.artifacts.runtime_control import BindRequest, SealAttestation
from kelvin.contracts.errors import LimitExceeded, Refused
from kelvin.contracts.serving.token_limits import NO_TOKEN_LIMITS, TokenLimits
from kelvin.contracts.timeline import StageSpan
from kelvin.process.fair_lock import FairLock
from runtime.drivers.engine_thread import EngineThread
from runtime.drivers.interface import Engine, Event, GenerationRequest, Request, Sampling
from runtime.drivers.schedule_policy import OWNER_TENANT
from runtime.models.pinned_files import SamplingDefaults
from runtime.surface.answer_builder import AnswerBuilder, TextAnswerBuilder
from runtime.surface.filter_pipeline import FilteredAnswerBuilder, FilterPipeline
from runtime.surface.openai_answers import ResponseMetadata, choose_renderer
from runtime.surface.openai_requests import (
    ChatPrompt,
    CompletionCall,
    TextPrompt,
    TokenPrompt,
    decode_chat,
    decode_completion,
    fit_output,
)
from runtime.text.tokenizer import TextCodec

T = TypeVar("T")

CHAT: Final = "/v1/chat/completions"
# Longer prompts are rendered and encoded beside the loop, one at a time: a megabyte takes tenths of a second.
# A template may take its whole budget for a short chat, about a second of the loop. It slows replicas of its own
# version alone.
INLINE_CHARACTERS: Final = 4096
_PROMPTS_WAITING: Final = 1024  # bounds memory; deadlines bound the wait
_PROMPTS_WAITING_OF_TENANT: Final = 256
_LEAST_TOP_P: Final = 1e-6  # OpenAI's 0: the engine keeps the likeliest token whatever its share


class EncodingQueue:
    """Runs work on prompts: on short ones at once, on long ones in one thread, where tenants take turns.

    So prompts take at most one core from the engine, and a tenant waits for at most one prompt of each other tenant.
    """

    def __init__(self, max_inline_size: int = INLINE_CHARACTERS) -> None:
        """Work of a larger size than `max_inline_size` is done in the thread."""
        self._longest_inline = max_inline_size
        self._executor = ThreadPoolExecutor(1, "encode")
        self._lock = FairLock("the queue of long inputs", _PROMPTS_WAITING, _PROMPTS_WAITING_OF_TENANT)

    def __repr__(self) -> str:
        return f"<EncodingQueue {self._lock!r}>"

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
class EngineCallbacks:
    """Callbacks of a restore and, afterwards, of its engine's thread."""

    on_events: Callable[[list[Event]], None]
    on_busy: Callable[[bool], None]
    on_stage: Callable[[StageSpan], None] = lambda span: None  # after each stage of the restore, in its thread


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request for the engine, and how its answer will be made."""

    request: Request
    answer: AnswerBuilder
    stream: bool
    unfiltered: bool = False  # some of the prompt passed its filters unseen


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServedVersion(ABC):
    """What a replica serves from READY to its end, whatever its kind. `engine` belongs to its thread: read only its
    gauges.
    """

    kind: ClassVar[Kind]
    bind: BindRequest
    limits: Limits
    engine: Engine
    thread: EngineThread
    spans: tuple[StageSpan, ...]  # the stages of the restore
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    recorded: SealAttestation | None = None  # known answers, where this engine had none before
    kept: "SuspendHandle | None" = None  # what stays in host memory when it sleeps; None if it can't sleep
    encoding: EncodingQueue = field(default_factory=EncodingQueue)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.bind.tenant}/{self.bind.model}@{self.bind.version[:12]} {self.engine!r}>"

    @abstractmethod
    async def prepare(
        self,
        path: str,
        raw: bytes,
        request_id: str,
        created_s: int,
        ceiling: TokenLimits = NO_TOKEN_LIMITS,
        tenant: str = OWNER_TENANT,
    ) -> PreparedRequest:
        """Decode and encode a request, and apply the version's limits and the caller's. `tenant` is OWNER or the guest
        that asks. Raises `Refused` before any compute.
        """


@dataclass(frozen=True, slots=True)
class SuspendHandle:
    """A version without an engine. Its weights stay in host memory until they are dropped."""

    release: Callable[[], None]  # free what the engine left on the weights, and its KV cache
    # Return the version with a new engine. It gives the known answers before its first token or, if the weights were
    # dropped, before this returns. Raises `Refused`.
    resume: Callable[[BindRequest, EngineCallbacks], ServedVersion]
    drop: Callable[[], None]  # give the weights back; `resume` leases them anew. Raises `Refused`
    has_device_copies: bool = False  # the engine computes over copies of the weights on a device


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServedDecoder(ServedVersion):
    """A decoder: completions and chats."""

    kind = "generate"
    context_tokens: int  # what positions and KV pool leave for prompt and answer together
    codec: TextCodec
    defaults: SamplingDefaults
    filter_pipeline: FilterPipeline | None = None

    async def prepare(
        self,
        path: str,
        raw: bytes,
        request_id: str,
        created_s: int,
        ceiling: TokenLimits = NO_TOKEN_LIMITS,
        tenant: str = OWNER_TENANT,
    ) -> PreparedRequest:
        """See `ServedVersion`."""
        call = decode_chat(raw) if path == CHAT else decode_completion(raw)
        unfiltered = False
        if self.filter_pipeline is not None:
            characters = _characters(call)  # checked before the filters work on it
            await self.encoding.run(tenant, characters, lambda: self._check_length(call, characters))
            prompt, unfiltered = await self.filter_pipeline.prompt(call.prompt, call.prompt_field, tenant)
            call = replace(call, prompt=prompt)
        request = await self._request(call, request_id, ceiling, tenant)
        metadata = ResponseMetadata(request_id, call.model or self.bind.model, self.bind.version, created_s)
        renderer = choose_renderer(metadata, chat=call.is_chat, stream=call.stream, include_usage=call.include_usage)
        answer = TextAnswerBuilder(renderer, self.codec.detokenizer(request.prompt_ids), call.stops)
        output = None if self.filter_pipeline is None else self.filter_pipeline.output(tenant)
        return PreparedRequest(
            request, answer if output is None else FilteredAnswerBuilder(answer, output), call.stream, unfiltered
        )

    async def _request(
        self, call: CompletionCall, request_id: str, ceiling: TokenLimits, tenant: str
    ) -> GenerationRequest:
        """Return the request for the engine: template, tokens and limits applied. Raises `Refused`."""
        prompt_ids = await self._prompt_ids(call, tenant)
        try:
            max_tokens = fit_output(call, len(prompt_ids), self.limits, self.context_tokens, ceiling)
        except Refused as refused:
            refused.encoded_tokens = 0 if isinstance(call.prompt, TokenPrompt) else len(prompt_ids)
            raise
        return GenerationRequest(
            request_id=request_id,
            prompt_ids=prompt_ids,
            sampling=self._sampling(call, max_tokens),
            stop_ids=self.codec.stop_ids,
            tenant=tenant,
        )

    async def _prompt_ids(self, call: CompletionCall, tenant: str) -> tuple[int, ...]:
        if isinstance(call.prompt, TokenPrompt):
            return call.prompt.ids
        characters = _characters(call)
        if characters > INLINE_CHARACTERS:  # rendered and encoded in one turn
            return await self.encoding.run(tenant, characters, lambda: self._encode(call, self._text(call)))
        text = self._text(call)  # can be long: a template can make much of a few messages
        return await self.encoding.run(tenant, len(text), lambda: self._encode(call, text))

    def _text(self, call: CompletionCall) -> str:
        """Return the text that is encoded. Slow if long, as is `_encode`. Raises `Refused`."""
        self._check_length(call, _characters(call))
        match call.prompt:
            case ChatPrompt(messages):
                return self.codec.render(messages)
            case TextPrompt(text):
                return text
            case TokenPrompt():
                raise AssertionError("token ids are no text")

    def _encode(self, call: CompletionCall, text: str) -> tuple[int, ...]:
        self._check_length(call, len(text))
        return self.codec.encode_rendered(text) if call.is_chat else self.codec.encode(text)

    def _check_length(self, call: CompletionCall, characters: int) -> None:
        """Raise `Refused(LimitExceeded)` for a text that can't fit, before anything works on it: it would be too long
        even if each of its tokens were the longest one.
        """
        if characters <= INLINE_CHARACTERS:
            return
        most = self.codec.longest_token_characters * min(self.limits.max_input_tokens, self.context_tokens - 1)
        if characters > most:
            raise Refused(LimitExceeded(call.prompt_field, characters, most, "characters"))

    def _sampling(self, call: CompletionCall, max_tokens: int) -> Sampling:
        defaults = self.defaults
        top_p = defaults.top_p if call.top_p is None else call.top_p
        return Sampling(
            max_tokens=max_tokens,
            temperature=defaults.temperature if call.temperature is None else call.temperature,
            top_p=max(top_p, _LEAST_TOP_P),
            top_k=defaults.top_k if call.top_k is None else call.top_k,
            seed=call.seed,
        )


def _characters(call: CompletionCall) -> int:
    """Return the length of the text that is to be encoded."""
    match call.prompt:
        case TextPrompt(text):
            return len(text)
        case TokenPrompt():
            return 0
        case ChatPrompt(messages):
            return sum(len(text) for message in messages for text in message.values())
