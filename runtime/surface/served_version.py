"""A bound version that is ready, and how a request body becomes a request for its engine.

`ServedVersion` is common to all kinds, `ServedDecoder` is for decoders; encoders and predictors have theirs in
`encoder/` and `predictor/`. `lifecycle/version_restore.py` makes them, and `lifecycle/replica.py` uses them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from kelvin.contracts.artifacts.manifest import Kind, Limits
from kelvin.contracts.artifacts.runtime_control import BindRequest, SealAttestation
from kelvin.contracts.errors import LimitExceeded, Refused
from kelvin.contracts.serving.token_limits import NO_TOKEN_LIMITS, TokenLimits
from kelvin.contracts.timeline import StageSpan
from runtime.drivers.engine_thread import EngineThread
from runtime.drivers.interface import OWNER_TENANT, Engine, Event, GenerationRequest, Request, Sampling
from runtime.models.pinned_files import SamplingDefaults
from runtime.surface.answer_builder import AnswerBuilder, TextAnswerBuilder
from runtime.surface.encoding_queue import INLINE_CHARACTERS, EncodingQueue
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

CHAT: Final = "/v1/chat/completions"
_MIN_TOP_P: Final = 1e-6  # stands for OpenAI's 0: the engine always keeps the likeliest token


@dataclass(frozen=True, slots=True)
class EngineCallbacks:
    """Callbacks of a restore and, afterwards, of its engine's thread."""

    on_events: Callable[[list[Event]], None]
    on_busy: Callable[[bool], None]
    on_stage: Callable[[StageSpan], None] = lambda span: None  # after each stage of the restore, in its thread


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request for the engine, and the builder of its response."""

    request: Request
    builder: AnswerBuilder
    stream: bool
    unfiltered: bool = False  # some of the prompt was not checked by its filters


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServedVersion(ABC):
    """The version that a ready replica serves. Read only the gauges of `engine`, which belongs to its thread."""

    kind: ClassVar[Kind]
    bind: BindRequest
    limits: Limits
    engine: Engine
    thread: EngineThread
    spans: tuple[StageSpan, ...]  # the stages of the restore
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    recorded_seal: SealAttestation | None = None  # known answers, if this engine had none before
    suspend_handle: "SuspendHandle | None" = None  # what stays in host memory when it sleeps; None if it can't sleep
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
        """Decode and encode a request, and apply the version's limits and the caller's. Raises `Refused` before any
        compute. `tenant` is OWNER_TENANT or the guest that sent the request.
        """


@dataclass(frozen=True, slots=True)
class SuspendHandle:
    """The operations of a version without an engine. Its weights stay in host memory until `release_weights`."""

    suspend: Callable[[], None]  # free the KV cache and what the engine attached to the model
    # Return the version with a new engine. It reproduces the known answers before its first token; if the weights were
    # released, before this returns. Raises `Refused`.
    resume: Callable[[BindRequest, EngineCallbacks], ServedVersion]
    release_weights: Callable[[], None]  # `resume` leases them again. Raises `Refused`
    has_device_copies: bool = False  # the engine computes over copies of the weights on a device


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServedDecoder(ServedVersion):
    """A served decoder, which answers completions and chats."""

    kind = "generate"
    context_tokens: int  # the limit of positions and KV pool for prompt plus response
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
        """Decode, filter and encode a completion or chat, as `ServedVersion.prepare` specifies."""
        call = decode_chat(raw) if path == CHAT else decode_completion(raw)
        unfiltered = False
        if self.filter_pipeline is not None:
            characters = _characters(call)  # check the length before the filters work on the text
            await self.encoding.run(tenant, characters, lambda: self._check_length(call, characters))
            prompt, unfiltered = await self.filter_pipeline.filter_prompt(call.prompt, call.prompt_field, tenant)
            call = replace(call, prompt=prompt)
        request = await self._request(call, request_id, ceiling, tenant)
        metadata = ResponseMetadata(request_id, call.model or self.bind.model, self.bind.version, created_s)
        renderer = choose_renderer(metadata, chat=call.is_chat, stream=call.stream, include_usage=call.include_usage)
        answer = TextAnswerBuilder(renderer, self.codec.detokenizer(request.prompt_ids), call.stops)
        output = None if self.filter_pipeline is None else self.filter_pipeline.build_output_filter(tenant)
        return PreparedRequest(
            request, answer if output is None else FilteredAnswerBuilder(answer, output), call.stream, unfiltered
        )

    async def _request(
        self, call: CompletionCall, request_id: str, ceiling: TokenLimits, tenant: str
    ) -> GenerationRequest:
        """Return the request for the engine, with template, tokens and limits applied. Raises `Refused`."""
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
        if characters > INLINE_CHARACTERS:  # render and encode under one hold of the queue
            return await self.encoding.run(tenant, characters, lambda: self._encode(call, self._text(call)))
        text = self._text(call)  # can be long, because a template can expand a few messages
        return await self.encoding.run(tenant, len(text), lambda: self._encode(call, text))

    def _text(self, call: CompletionCall) -> str:
        """Return the text to encode. Slow if long, as `_encode` is. Raises `Refused`."""
        self._check_length(call, _characters(call))
        match call.prompt:
            case ChatPrompt(messages):
                return self.codec.render(messages)
            case TextPrompt(text):
                return text
            case TokenPrompt():
                raise AssertionError("token ids have no text")

    def _encode(self, call: CompletionCall, text: str) -> tuple[int, ...]:
        self._check_length(call, len(text))
        return self.codec.encode_rendered(text) if call.is_chat else self.codec.encode(text)

    def _check_length(self, call: CompletionCall, characters: int) -> None:
        """Raise `Refused(LimitExceeded)` early for a text that is too long even if all its tokens are the longest
        one.
        """
        if characters <= INLINE_CHARACTERS:
            return
        max_tokens = min(self.limits.max_input_tokens, self.context_tokens - 1)
        max_characters = self.codec.longest_token_characters * max_tokens
        if characters > max_characters:
            raise Refused(LimitExceeded(call.prompt_field, characters, max_characters, "characters"))

    def _sampling(self, call: CompletionCall, max_tokens: int) -> Sampling:
        defaults = self.defaults
        top_p = defaults.top_p if call.top_p is None else call.top_p
        return Sampling(
            max_tokens=max_tokens,
            temperature=defaults.temperature if call.temperature is None else call.temperature,
            top_p=max(top_p, _MIN_TOP_P),
            top_k=defaults.top_k if call.top_k is None else call.top_k,
            seed=call.seed,
        )


def _characters(call: CompletionCall) -> int:
    """Return the characters of the prompt before the chat template, roles included; 0 for token ids."""
    match call.prompt:
        case TextPrompt(text):
            return len(text)
        case TokenPrompt():
            return 0
        case ChatPrompt(messages):
            return sum(len(text) for message in messages for text in message.values())
