"""Which fields of a body are read, and that all others are ignored."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.routing.policy.affinity import PREFIX_BYTES
from activator.routing.policy.request_body import RequestBody, estimate, read_body
from kelvin.contracts.artifacts.kind_routes import INFER_PATH
from kelvin.contracts.artifacts.manifest import Kind, Limits
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.serving.control_messages import VersionRow

CHAT, COMPLETION, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
LONG = "x" * 2 * PREFIX_BYTES
BEGINNING = b'["' + b"x" * (PREFIX_BYTES - 2)
READ = {"model", "stream", "parameters", "max_tokens", "max_completion_tokens"}


@pytest.mark.parametrize(
    ("path", "raw", "want"),
    [
        pytest.param(CHAT, "{}", RequestBody(), id="no field"),
        pytest.param(CHAT, '{"model": "m@next"}', RequestBody("m@next"), id="a model"),
        pytest.param(CHAT, '{"model": null, "stream": null}', RequestBody(), id="null fields count as missing"),
        pytest.param(CHAT, '{"model": "m", "stream": true}', RequestBody("m", True), id="a stream"),
        pytest.param(CHAT, '{"stream": false}', RequestBody(), id="no stream"),
        pytest.param(CHAT, '{"model": "a", "model": "b"}', RequestBody("b"),
                     id="the last of two models, as at the replica"),
        pytest.param(CHAT, '{"parameters": 5}', RequestBody(), id="a chat has no parameters"),
        pytest.param(EMBED, '{"model": "m", "input": [[1]]}', RequestBody("m"), id="an embedding"),
        pytest.param(INFER_PATH, "{}", RequestBody(), id="a prediction without parameters"),
        pytest.param(INFER_PATH, '{"parameters": null}', RequestBody(), id="a prediction whose parameters are null"),
        pytest.param(INFER_PATH, '{"parameters": {"schema_hash": "ab"}}', RequestBody(schema_hash="ab"), id="a schema"),
        pytest.param(INFER_PATH, '{"model": 5, "stream": 5}', RequestBody(),
                     id="the model of a prediction is in its path"),
        pytest.param(CHAT, '{"max_tokens": 7}', RequestBody(output_tokens=7), id="max_tokens"),
        pytest.param(CHAT, '{"max_completion_tokens": 8}', RequestBody(output_tokens=8), id="max_completion_tokens"),
        pytest.param(COMPLETION, '{"max_tokens": 4096, "max_completion_tokens": 1}', RequestBody(output_tokens=4096),
                     id="a completion uses max_tokens only"),
        pytest.param(COMPLETION, '{"max_completion_tokens": 1}', RequestBody(), id="and ignores the new name"),
        pytest.param(CHAT, '{"max_tokens": -1}', RequestBody(output_tokens=-1), id="a negative bound"),
        pytest.param(CHAT, '{"max_tokens": "7"}', None, id="a bound that is a text"),
        pytest.param(EMBED, '{"max_tokens": "7"}', RequestBody(), id="embeddings have no such bound"),
        pytest.param(CHAT, '{"model": 5}', None, id="a model that is a number"),
        pytest.param(CHAT, '{"stream": 1}', None, id="a stream that is a number"),
        pytest.param(INFER_PATH, '{"parameters": {"schema_hash": 5}}', None, id="a schema that is a number"),
        pytest.param(CHAT, f'{{"prompt": "{LONG}"}}', RequestBody(prefix=f'"{LONG}'.encode()[:PREFIX_BYTES]),
                     id="the beginning of a long prompt"),
        pytest.param(CHAT, f'{{"prompt": "x", "messages":["{LONG}"]}}', RequestBody(prefix=BEGINNING),
                     id="the beginning of a long conversation"),
        pytest.param(CHAT, '{"prompt": "short", "messages": null}', RequestBody(),
                     id="a short prompt has no prefix"),
        pytest.param(CHAT, "[]", None, id="a list"),
        pytest.param(CHAT, "", None, id="an empty body"),
        pytest.param(CHAT, '{"model": "m"', None, id="half of a body"),
        pytest.param(CHAT, '{"model": "m"} {}', None, id="more than a body"),
        pytest.param(CHAT, '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", None, id="a body that is nested too deeply"),
        pytest.param(CHAT, b'{"model": "\xff"}', None, id="not UTF-8"),
    ],
)  # fmt: skip
def test_body_fields_are_read_or_refused(path: str, raw: str | bytes, want: RequestBody | None) -> None:
    """An invalid field is refused."""
    data = raw.encode() if isinstance(raw, str) else raw
    if want is not None:
        assert read_body(data, path) == want
        return
    with pytest.raises(Refused) as refused:
        read_body(data, path)
    assert isinstance(refused.value.failure, InvalidRequest)


@given(
    st.none() | st.text(),
    st.none() | st.booleans(),
    st.dictionaries(st.text().filter(lambda name: name not in READ), ANYTHING, max_size=4),
)
def test_unread_fields_change_nothing(model: str | None, stream: bool | None, rest: dict[str, object]) -> None:
    """Other fields may have any value and order."""
    for fields in (rest | {"model": model, "stream": stream}, {"stream": stream, "model": model} | rest):
        assert read_body(json.dumps(fields).encode(), CHAT) == RequestBody(model, stream is True)


@given(st.binary(max_size=40) | ANYTHING.map(lambda value: json.dumps(value).encode()))
def test_arbitrary_bytes_are_read_or_refused(raw: bytes) -> None:
    """Arbitrary bytes raise nothing but `Refused`."""
    for path in (CHAT, EMBED, INFER_PATH):
        with suppress(Refused):
            read_body(raw, path)


@pytest.mark.parametrize(
    ("kind", "output_tokens", "nbytes", "want"),
    [
        pytest.param("generate", None, 400, 100 + 50, id="no bound: the version's limit"),
        pytest.param("generate", 7, 401, 101 + 7, id="a bound, and a prompt that is rounded up"),
        pytest.param("generate", 10**30, 400, 100 + 50, id="a bound that the version refuses"),
        pytest.param("generate", -(10**30), 400, 100, id="a negative bound"),
        pytest.param("generate", 7, 10**9, 1000 + 7, id="a prompt that the version refuses"),
        pytest.param("embed", None, 400, 100, id="an embedding has no answer in tokens"),
        pytest.param("predict", None, 400, 0, id="a prediction has no tokens"),
    ],
)
def test_estimate_is_bounded_by_version_and_tenant_limits(
    kind: Kind, output_tokens: int | None, nbytes: int, want: int
) -> None:
    """The version accepts 1000 tokens and returns at most 50."""
    row = VersionRow(tenant="t", model="m", version="a" * 64, limits=Limits(1000, 50), created_at_s=1, kind=kind)
    assert estimate(RequestBody(output_tokens=output_tokens), nbytes, row).tokens == want


@pytest.mark.parametrize(
    ("kind", "nbytes", "want"),
    [
        pytest.param("generate", 401, 401, id="a token may be a byte"),
        pytest.param("generate", 10**9, 1000, id="no more tokens than the version accepts"),
        pytest.param("embed", 5000, 5000, id="several texts count together"),
        pytest.param("predict", 401, 401, id="a byte may be a row, which costs a token"),
        pytest.param("predict", 10**9, 1000, id="no more rows than the version accepts"),
    ],
)
def test_longest_prompt_is_bounded_by_body_bytes(kind: Kind, nbytes: int, want: int) -> None:
    """A budget must cover the longest possible prompt, because the cost can't be reclaimed later."""
    row = VersionRow(tenant="t", model="m", version="a" * 64, limits=Limits(1000, 50), created_at_s=1, kind=kind)
    assert estimate(RequestBody(), nbytes, row).longest == want
