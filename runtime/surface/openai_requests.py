"""Decode OpenAI's chat and text completion requests strictly. Pure.

A field of `_UNSUPPORTED` is refused unless its value has no effect. Other fields are ignored, such as `user`; OpenAI's
own service refuses unknown ones. `fit_output` applies the version's limits.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import msgspec

from kelvin.contracts import wire
from kelvin.contracts.artifacts.manifest import Limits
from kelvin.contracts.errors import InvalidRequest, LimitExceeded, Refused
from kelvin.contracts.serving.token_limits import NO_TOKEN_LIMITS, TENANT_PHRASE, TokenLimits
from kelvin.contracts.wire import MAX_RULE, BadJson, decode_any

T = TypeVar("T")

MAX_STOPS: Final = 4
MAX_STOP_CHARACTERS: Final = 256  # each token is compared with every prefix of every stop string
MAX_MESSAGES: Final = 4096
COMPLETION_DEFAULT_TOKENS: Final = 16  # OpenAI's default for text completions
_SHOWN: Final = 80

# Field -> (values without effect, rule). None never has an effect.
_UNSUPPORTED: Final[dict[str, tuple[tuple[object, ...], str]]] = {
    "n": ((1,), "only 1 is supported"),
    "best_of": ((1,), "only 1 is supported"),
    "logprobs": ((False,), "log probabilities are not supported"),
    "top_logprobs": ((0,), "log probabilities are not supported"),
    "frequency_penalty": ((0,), "penalties are not supported"),
    "presence_penalty": ((0,), "penalties are not supported"),
    "logit_bias": (({},), "is not supported"),
    "tools": (([],), "tools are not supported"),
    "tool_choice": (("none", "auto"), "tools are not supported"),
    "functions": (([],), "functions are not supported"),
    "function_call": (("none", "auto"), "functions are not supported"),
    "response_format": (({"type": "text"},), "only plain text is supported"),
    "modalities": ((["text"],), "only text is supported"),
    "audio": ((), "only text is supported"),
    "prediction": ((), "is not supported"),
    "reasoning_effort": (("none",), "is not supported"),
    "verbosity": (("medium",), "only 'medium' is supported"),
    "web_search_options": ((), "is not supported"),
    "moderation": ((), "is not supported"),
    "store": ((False,), "answers are not stored"),
    "echo": ((False,), "is not supported"),
    "suffix": (("",), "is not supported"),
}

Role = Literal["system", "developer", "user", "assistant"]


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Role
    content: str | list[_TextPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both kinds of request share. `top_k` is an extension that several servers have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


class _ChatRequest(_Request, frozen=True, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None


class _CompletionRequest(_Request, frozen=True, kw_only=True):
    prompt: str | list[Any]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text to continue."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A text to continue, as token ids. The engine checks that they are in the vocabulary."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, as the chat template sees it."""

    messages: tuple[Mapping[str, str], ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """A decoded request. None means the version's default; for `max_tokens` see `fit_output`."""

    prompt: Prompt
    model: str | None
    stream: bool
    include_usage: bool
    max_tokens: int | None
    max_tokens_field: str
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stops: tuple[str, ...]

    @property
    def is_chat(self) -> bool:
        """Return whether the response is a chat."""
        return isinstance(self.prompt, ChatPrompt)

    @property
    def prompt_field(self) -> str:
        """Return the name of the request's prompt field."""
        return "messages" if self.is_chat else "prompt"


def decode_chat(raw: bytes) -> CompletionCall:
    """Decode a `POST /v1/chat/completions`. Raises `Refused(InvalidRequest)` with field, value and rule."""
    request = convert_request(parse_openai_body(raw), _ChatRequest)
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise field_refusal("max_tokens", request.max_tokens, "cannot be given together with max_completion_tokens")
    if not request.messages:
        raise field_refusal("messages", [], "must hold at least one message")
    if len(request.messages) > MAX_MESSAGES:
        raise field_refusal(
            "messages", _Placeholder(f"({len(request.messages)})"), f"at most {MAX_MESSAGES} are allowed"
        )
    prompt = ChatPrompt(tuple(_template_message(message, index) for index, message in enumerate(request.messages)))
    if request.max_completion_tokens is not None:
        return _build_call(request, prompt, "max_completion_tokens", request.max_completion_tokens)
    return _build_call(request, prompt, "max_tokens", request.max_tokens)


def decode_completion(raw: bytes) -> CompletionCall:
    """Decode a `POST /v1/completions`. Raises `Refused(InvalidRequest)` with field, value and rule."""
    request = convert_request(parse_openai_body(raw), _CompletionRequest)
    return _build_call(request, _decode_prompt(request.prompt), "max_tokens", request.max_tokens)


def fit_output(
    call: CompletionCall, prompt_tokens: int, limits: Limits, max_positions: int, ceiling: TokenLimits = NO_TOKEN_LIMITS
) -> int:
    """Return how many tokens the response may have. Raises `Refused(LimitExceeded)` with field, value and limit.

    Without `max_tokens`, a chat may use everything that the version, the caller's tenant and the model's positions
    allow. A completion gets at most COMPLETION_DEFAULT_TOKENS. A cap shortens any response.
    """
    longest = min(limits.max_input_tokens, max_positions - 1)
    if prompt_tokens > longest:
        raise Refused(LimitExceeded(call.prompt_field, prompt_tokens, longest, "tokens"))
    if prompt_tokens == 0:
        raise field_refusal(call.prompt_field, _Placeholder("(no tokens)"), "must hold at least one token")
    version_limit = min(limits.max_output_tokens, max_positions - prompt_tokens)
    tenant_limit = ceiling.allowed_output(version_limit, prompt_tokens)
    if tenant_limit < 1 and ceiling.context_tokens is not None:
        raise Refused(
            LimitExceeded(call.prompt_field, prompt_tokens, ceiling.context_tokens - 1, "tokens", TENANT_PHRASE)
        )
    if call.max_tokens is None:
        return ceiling.apply_cap(tenant_limit if call.is_chat else min(tenant_limit, COMPLETION_DEFAULT_TOKENS))
    if call.max_tokens > version_limit:
        raise Refused(LimitExceeded(call.max_tokens_field, call.max_tokens, version_limit, "tokens"))
    if call.max_tokens > tenant_limit:
        raise Refused(LimitExceeded(call.max_tokens_field, call.max_tokens, tenant_limit, "tokens", TENANT_PHRASE))
    return ceiling.apply_cap(call.max_tokens)


def parse_json_body(raw: bytes) -> dict[str, Any]:
    """Return the request's object. Raises `Refused(InvalidRequest)`."""
    try:
        value = decode_any(raw)
    except BadJson as error:
        raise Refused(InvalidRequest("body", "(JSON)", str(error))) from error
    if not isinstance(value, dict):
        raise field_refusal("body", value, "must be a JSON object")
    return value


def parse_openai_body(raw: bytes) -> dict[str, Any]:
    """Return the request's object. Raises `Refused(InvalidRequest)`, also for unsupported fields of OpenAI's."""
    value = parse_json_body(raw)
    for field, (without_effect, rule) in _UNSUPPORTED.items():
        field_value = value.get(field)
        if field_value is not None and not any(_is_equal(field_value, each) for each in without_effect):
            raise field_refusal(field, field_value, rule)
    return value


def _is_equal(first: object, second: object) -> bool:
    """Compare as JSON does. In Python 0 equals False, but `logprobs` 0 asks for log probabilities."""
    return first == second and isinstance(first, bool) == isinstance(second, bool)


_MISSING: Final = re.compile(r"Object missing required field `(?P<field>[^`]+)`")


def convert_request(value: dict[str, Any], kind: type[T]) -> T:
    """Return the request as `kind`. Raises `Refused(InvalidRequest)` with field, value and rule."""
    try:
        return wire.convert(value, kind)
    except msgspec.ValidationError as error:
        # "RULE - at `$PATH`": the rule may repeat the caller's value; the path contains only our names.
        rule, at, path = str(error).rpartition(" - at `$")
        rule, path = (rule[:MAX_RULE], path.removeprefix(".").removesuffix("`")) if at else (path[:MAX_RULE], "")
        if missing := _MISSING.match(rule):
            raise field_refusal(
                f"{path}.{missing['field']}".lstrip("."), _Placeholder("(missing)"), "is required"
            ) from error
        raise field_refusal(path or "body", _value_at(value, path), rule) from error


def _value_at(value: Any, path: str) -> object:
    """Return the value at msgspec's path, followed as far as possible."""
    for name, index in re.findall(r"([^.\[\]]+)|\[([0-9]+)\]", path):
        try:
            value = value[int(index)] if index else value[name]
        except (KeyError, IndexError, TypeError):
            break
    return value


def _template_message(message: _Message, index: int) -> Mapping[str, str]:
    """Return the message as a chat template sees it. Models know OpenAI's newer role `developer` as `system`."""
    path = f"messages[{index}]"
    for field, value in (("tool_calls", message.tool_calls), ("function_call", message.function_call)):
        if value:
            raise field_refusal(f"{path}.{field}", value, "tools are not supported")
    if message.content is None and message.role != "assistant":
        raise field_refusal(f"{path}.content", None, "is required")
    content = message.content or ""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    plain = {"role": "system" if message.role == "developer" else message.role, "content": text}
    return plain if message.name is None else plain | {"name": message.name}


def _decode_prompt(prompt: str | list[Any]) -> TextPrompt | TokenPrompt:
    """Return the prompt of a text, token ids, or a list that holds one of either."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if prompt and all(type(token_id) is int for token_id in prompt):
        return TokenPrompt(tuple(prompt))
    raise field_refusal("prompt", prompt, "must be one text or one non-empty list of token ids")


def _build_call(request: _Request, prompt: Prompt, max_tokens_field: str, max_tokens: int | None) -> CompletionCall:
    if max_tokens is not None and max_tokens < 1:
        raise field_refusal(max_tokens_field, max_tokens, "must be 1 or more")
    _check_range("temperature", request.temperature, 0, 2)
    _check_range("top_p", request.top_p, 0, 1)
    _check_range("top_k", request.top_k, 0, 1 << 31)
    _check_range("seed", request.seed, -(1 << 63), (1 << 63) - 1)
    if request.stream_options is not None and not request.stream:
        raise field_refusal("stream_options", _Placeholder("(given)"), "is only allowed if stream is true")
    return CompletionCall(
        prompt=prompt,
        model=request.model,
        stream=bool(request.stream),
        include_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stops=_stops(request.stop),
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise field_refusal("stop", _Placeholder(f"({len(stops)} texts)"), f"at most {MAX_STOPS} are allowed")
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise field_refusal("stop", text, f"must have 1 to {MAX_STOP_CHARACTERS} characters")
    return stops


def _check_range(field: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise field_refusal(field, value, f"must be from {low} to {high}")


class _Placeholder(str):
    """A description in place of a value that is too long or absent."""


def field_refusal(field: str, value: object, rule: str) -> Refused:
    """Return the refusal of a value, which is shown as JSON."""
    try:
        shown = value if isinstance(value, _Placeholder) else json.dumps(value, ensure_ascii=False)
    except RecursionError:  # json.dumps needs more of the stack than the decoder did for the same value
        shown = "(nested too deeply)"
    return Refused(InvalidRequest(field, shown[:_SHOWN], rule))
