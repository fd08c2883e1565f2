"""Requests in OpenAI's form are decoded, or refused by field, value and rule."""

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kelvin.contracts.artifacts.manifest import Limits
from kelvin.contracts.errors import Failure, InvalidRequest, LimitExceeded, Refused
from kelvin.contracts.serving.token_limits import NO_TOKEN_LIMITS, TENANT_PHRASE, TokenLimits
from runtime.surface.openai_requests import (
    ChatPrompt,
    CompletionCall,
    TextPrompt,
    TokenPrompt,
    decode_chat,
    decode_completion,
    fit_output,
)

HELLO = [{"role": "user", "content": "Hello"}]


def _chat(**fields: Any) -> CompletionCall:
    return decode_chat(json.dumps({"model": "m", "messages": HELLO} | fields).encode())


def _text(**fields: Any) -> CompletionCall:
    return decode_completion(json.dumps({"model": "m", "prompt": "Once"} | fields).encode())


def test_minimal_chat_leaves_fields_unset() -> None:
    """Omitted fields stay unset."""
    call = _chat()
    assert call.prompt == ChatPrompt(({"role": "user", "content": "Hello"},))
    assert (call.stream, call.include_usage, call.stops) == (False, False, ())
    assert (call.max_tokens, call.temperature, call.top_p, call.top_k, call.seed) == (None,) * 5


def test_all_that_is_supported_is_taken() -> None:
    call = _chat(
        stream=True, stream_options={"include_usage": True, "include_obfuscation": False}, temperature=0, top_p=0.5,
        top_k=40, seed=-7, stop=["a", "b"], max_completion_tokens=9,
    )  # fmt: skip
    assert (call.stream, call.include_usage, call.stops) == (True, True, ("a", "b"))
    assert (call.max_tokens, call.max_tokens_field) == (9, "max_completion_tokens")
    assert (call.temperature, call.top_p, call.top_k, call.seed) == (0.0, 0.5, 40, -7)


@pytest.mark.parametrize(
    ("messages", "want"),
    [
        pytest.param(
            [{"role": "developer", "content": "x"}], {"role": "system", "content": "x"}, id="developer is system"
        ),
        pytest.param(
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            {"role": "user", "content": "ab"},
            id="text parts are one text",
        ),
        pytest.param(
            [{"role": "assistant", "content": None}],
            {"role": "assistant", "content": ""},
            id="an assistant may be mute",
        ),
        pytest.param(
            [{"role": "user", "content": "x", "name": "Ann", "weather": 1}],
            {"role": "user", "content": "x", "name": "Ann"},
            id="a name is kept, the unknown ignored",
        ),
    ],
)
def test_chat_messages_as_a_template_sees_them(messages: list[object], want: dict[str, str]) -> None:
    assert _chat(messages=messages).prompt == ChatPrompt((want,))


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        pytest.param("Once", TextPrompt("Once"), id="a text"),
        pytest.param(["Once"], TextPrompt("Once"), id="a list of one text"),
        pytest.param([1, 2], TokenPrompt((1, 2)), id="token ids"),
        pytest.param([[1, 2]], TokenPrompt((1, 2)), id="a list of one list of token ids"),
        pytest.param("", TextPrompt(""), id="nothing, which the tokenizer may start"),
    ],
)
def test_every_prompt_form_is_decoded(prompt: object, want: object) -> None:
    assert _text(prompt=prompt).prompt == want


@pytest.mark.parametrize(
    ("wanted", "limits", "max_positions", "ceiling", "want"),
    [
        pytest.param(None, Limits(100, 50), 1000, NO_TOKEN_LIMITS, 16, id="as OpenAI's do"),
        pytest.param(None, Limits(100, 8), 1000, NO_TOKEN_LIMITS, 8, id="or as many as the version allows"),
        pytest.param(None, Limits(100, 50), 20, NO_TOKEN_LIMITS, 10, id="or as positions are left"),
        pytest.param(None, Limits(100, 50), 1000, TokenLimits(output_tokens=5), 5, id="or as the tenant may"),
        pytest.param(3, Limits(100, 50), 1000, NO_TOKEN_LIMITS, 3, id="a wish"),
    ],
)
def test_text_completions_default_to_sixteen_tokens(
    wanted: int | None, limits: Limits, max_positions: int, ceiling: TokenLimits, want: int
) -> None:
    """A default is lowered to any limit that would refuse a larger request. The prompt has ten tokens."""
    assert fit_output(_text(max_tokens=wanted), 10, limits, max_positions, ceiling) == want


CHAT_REFUSALS: list[Any] = [
    pytest.param({"messages": []}, "messages=[]: must hold at least one message", id="no messages"),
    pytest.param({"messages": "x"}, 'messages="x": Expected `array`, got `str`', id="messages of the wrong type"),
    pytest.param({"messages": [{}]}, "messages[0].role=(missing): is required", id="a message without a role"),
    pytest.param(
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages[0].role=\"tool\": Invalid enum value 'tool'",
        id="tool",
    ),
    pytest.param(
        {"messages": [{"role": "user"}]}, "messages[0].content=null: is required", id="a user without content"
    ),
    pytest.param(
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type=\"image_url\": Invalid value 'image_url'",
        id="an image",
    ),
    pytest.param(
        {"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]},
        'messages[0].tool_calls=[{"id": 1}]: tools are not supported',
        id="a call of a tool",
    ),
    pytest.param({"temperature": 2.1}, "temperature=2.1: must be from 0 to 2", id="too hot"),
    pytest.param({"temperature": "1"}, 'temperature="1": Expected `float | null`, got `str`', id="a text for a number"),
    pytest.param({"temperature": -0.1}, "temperature=-0.1: must be from 0 to 2", id="too cold"),
    pytest.param({"top_p": 1.01}, "top_p=1.01: must be from 0 to 1", id="more than all"),
    pytest.param({"top_k": -1}, "top_k=-1: must be from 0 to", id="a negative top_k"),
    pytest.param({"seed": 1 << 63}, "seed=9223372036854775808: must be from -92", id="a seed of 64 bits"),
    pytest.param({"max_tokens": 0}, "max_tokens=0: must be 1 or more", id="no tokens"),
    pytest.param({"max_tokens": True}, "max_tokens=true: Expected `int | null`, got `bool`", id="a boolean"),
    pytest.param(
        {"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens=1: cannot be given together", id="both limits"
    ),
    pytest.param({"stop": list("abcde")}, "stop=(5 texts): at most 4 are allowed", id="five stops"),
    pytest.param({"stop": ""}, 'stop="": must have 1 to 256 characters', id="an empty stop"),
    pytest.param({"stream_options": {}}, "stream_options=(given): is only allowed if", id="options of no stream"),
    pytest.param({"n": 2}, "n=2: only 1 is supported", id="two answers"),
    pytest.param({"logprobs": True}, "logprobs=true: log probabilities are not supported", id="log probabilities"),
    pytest.param({"tools": [{"type": "function"}]}, 'tools=[{"type": "function"}]: tools are not', id="tools"),
    pytest.param({"response_format": {"type": "json_object"}}, "response_format=", id="JSON mode"),
    pytest.param({"logit_bias": {"5": 1}}, "logit_bias=", id="biases"),
    pytest.param({"presence_penalty": 0.5}, "presence_penalty=0.5: penalties", id="penalties"),
]


@pytest.mark.parametrize(("fields", "words"), CHAT_REFUSALS)
def test_chat_refusals(fields: dict[str, Any], words: str) -> None:
    """The message has field, value and rule, and `param` is the field."""
    with pytest.raises(Refused) as caught:
        _chat(**fields)
    failure = caught.value.failure
    assert isinstance(failure, InvalidRequest)
    assert failure.message.startswith(words)
    assert failure.param is not None
    assert words.startswith(failure.param)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"prompt": ["a", "b"]}, 'prompt=["a", "b"]: must be one text', id="two prompts"),
        pytest.param({"prompt": []}, "prompt=[]: must be one text", id="no prompt"),
        pytest.param({"prompt": [1, True]}, "prompt=[1, true]: must be one text", id="a boolean among ids"),
        pytest.param({"prompt": None}, "prompt=null: Expected `str | array`", id="null"),
        pytest.param({"echo": True}, "echo=true: is not supported", id="echo"),
        pytest.param({"suffix": "x"}, 'suffix="x": is not supported', id="a suffix"),
        pytest.param({"logprobs": 3}, "logprobs=3: log probabilities", id="log probabilities"),
        pytest.param({"logprobs": 0}, "logprobs=0: log probabilities", id="those of the tokens themselves"),
        pytest.param({"n": True}, "n=true: only 1", id="a boolean for a number"),
    ],
)
def test_completion_refusals(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused) as caught:
        _text(**fields)
    assert caught.value.failure.message.startswith(words)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "logprobs": False, "presence_penalty": 0, "tools": [], "tool_choice": "auto", "logit_bias": {}},
        {"response_format": {"type": "text"}, "store": False, "modalities": ["text"], "n": None},
        {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True, "nobody": 1},
    ],
    ids=["values that ask for nothing", "more of them", "fields that change nothing, and unknown ones"],
)
def test_harmless_fields_are_taken(fields: dict[str, Any]) -> None:
    """Clients send these fields by default."""
    assert _chat(**fields) == _chat()


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'"x"', b"\xff", b"null"])
def test_body_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(Refused) as caught:
        decode_chat(raw)
    assert caught.value.failure.param == "body"


def test_value_nested_to_any_depth_is_refused() -> None:
    """Some depths decode, but leave too little stack to show the value."""
    limit = sys.getrecursionlimit()
    for depth in range(limit - 300, limit + 10):
        nested = b"[" * depth + b"]" * depth
        for raw in (b'{"prompt":' + nested + b"}", b'{"prompt":"x","tools":' + nested + b"}", nested):
            with pytest.raises(Refused) as caught:
                decode_completion(raw)
            assert isinstance(caught.value.failure, InvalidRequest)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "messages", "prompt", "model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k", "seed",
    "stop", "n", "tools", "logprobs", "max_completion_tokens",
]  # fmt: skip


def _failure_of(decode: Callable[[bytes], CompletionCall], raw: bytes) -> Failure | None:
    try:
        decode(raw)
    except Refused as refused:
        return refused.failure
    return None


@given(st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_any_json_is_taken_or_refused_as_invalid(body: dict[str, Any]) -> None:
    """Any JSON body is decoded or refused with 400."""
    raw = json.dumps(body).encode()
    for decode in (decode_chat, decode_completion):
        failure = _failure_of(decode, raw)
        assert failure is None or isinstance(failure, InvalidRequest)


LIMITS = Limits(max_input_tokens=100, max_output_tokens=50)


@pytest.mark.parametrize(
    ("wanted", "prompt_tokens", "max_positions", "room"),
    [
        pytest.param(None, 10, 1000, 50, id="without a wish, as many as the version allows"),
        pytest.param(None, 90, 100, 10, id="or as its positions leave"),
        pytest.param(7, 10, 1000, 7, id="a wish within limits"),
        pytest.param(50, 100, 150, 50, id="all limits met exactly"),
    ],
)
def test_fit_output(wanted: int | None, prompt_tokens: int, max_positions: int, room: int) -> None:
    assert fit_output(_chat(max_tokens=wanted), prompt_tokens, LIMITS, max_positions) == room


@pytest.mark.parametrize(
    ("wanted", "ceiling", "want"),
    [
        pytest.param(None, TokenLimits(output_tokens=20), 20, id="without a wish, as many as the tenant may"),
        pytest.param(None, TokenLimits(output_tokens=60), 50, id="or the version, where that is less"),
        pytest.param(None, TokenLimits(context_tokens=15), 5, id="or as the context leaves"),
        pytest.param(5, TokenLimits(15, 5), 5, id="both met exactly"),
        pytest.param(
            6, TokenLimits(15, 50), LimitExceeded("max_tokens", 6, 5, "tokens", TENANT_PHRASE), id="over the context"
        ),
        pytest.param(
            6, TokenLimits(None, 5), LimitExceeded("max_tokens", 6, 5, "tokens", TENANT_PHRASE), id="over the output"
        ),
        pytest.param(
            60, TokenLimits(None, 5), LimitExceeded("max_tokens", 60, 50, "tokens"), id="over the version's too"
        ),
        pytest.param(
            None,
            TokenLimits(10),
            LimitExceeded("messages", 10, 9, "tokens", TENANT_PHRASE),
            id="a prompt that fills it",
        ),
        pytest.param(None, TokenLimits(cap_tokens=7), 7, id="a cap cuts what the version allows"),
        pytest.param(30, TokenLimits(cap_tokens=7), 7, id="and what was asked for, which is no mistake"),
        pytest.param(6, TokenLimits(cap_tokens=7), 6, id="but adds nothing"),
        pytest.param(
            60, TokenLimits(cap_tokens=7), LimitExceeded("max_tokens", 60, 50, "tokens"), id="nor excuses more"
        ),
    ],
)
def test_tenant_maxima_hold_beside_the_versions(
    wanted: int | None, ceiling: TokenLimits, want: int | LimitExceeded
) -> None:
    """The tenant's maxima apply beside the version's, and the refusal names its source. The prompt has ten tokens."""
    try:
        found: object = fit_output(_chat(max_tokens=wanted), 10, LIMITS, 1000, ceiling)
    except Refused as refused:
        found = refused.failure
    assert found == want


@pytest.mark.parametrize(
    ("wanted", "prompt_tokens", "max_positions", "failure"),
    [
        pytest.param(None, 101, 1000, LimitExceeded("messages", 101, 100, "tokens"), id="a prompt over the limit"),
        pytest.param(None, 64, 64, LimitExceeded("messages", 64, 63, "tokens"), id="a prompt that leaves no position"),
        pytest.param(51, 1, 1000, LimitExceeded("max_tokens", 51, 50, "tokens"), id="an answer over the limit"),
        pytest.param(11, 90, 100, LimitExceeded("max_tokens", 11, 10, "tokens"), id="an answer over the positions"),
        pytest.param(
            1, 0, 100, InvalidRequest("messages", "(no tokens)", "must hold at least one token"), id="an empty prompt"
        ),
    ],
)
def test_request_that_does_not_fit_is_refused(
    wanted: int | None, prompt_tokens: int, max_positions: int, failure: object
) -> None:
    """The refusal comes before any compute."""
    with pytest.raises(Refused) as caught:
        fit_output(_chat(max_tokens=wanted), prompt_tokens, LIMITS, max_positions)
    assert caught.value.failure == failure
