"""The fields of a request body that the activator reads. `read_body` decodes and checks them in one scan.

A scan takes time in proportion to the body, however few fields are kept. `is_greedy` scans it again if the request
allows a cached answer, and if its model has a `cached` degradation step. The body itself is passed on unchanged.
"""

from typing import Final

import msgspec

from activator.routing.policy.affinity import PREFIX_BYTES
from kelvin.contracts.artifacts.kind_routes import INFER_PATH, ROUTES_BY_KIND
from kelvin.contracts.errors import LimitExceeded, Refused
from kelvin.contracts.serving.control_messages import TenantLimits, VersionRow
from kelvin.contracts.serving.token_limits import NO_TOKEN_LIMITS, TENANT_PHRASE, TokenLimits
from kelvin.contracts.wire import decode

NOTHING: Final = msgspec.Raw()
BYTES_PER_TOKEN: Final = 4  # approximately, for English text and a vocabulary of about 100,000
_COMPLETIONS: Final = "/v1/completions"


class EmbeddingBody(msgspec.Struct, frozen=True):
    """The fields that are read of a request for embeddings."""

    model: str | None = None
    stream: bool | None = None


class CompletionBody(EmbeddingBody, frozen=True):
    """The fields that are read of a completion or chat."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    messages: msgspec.Raw = NOTHING  # raw JSON, not decoded
    prompt: msgspec.Raw = NOTHING


class _Temperature(msgspec.Struct, frozen=True):
    temperature: float | None = None


class PredictionParameters(msgspec.Struct, frozen=True):
    """The field that is read of the Open Inference Protocol's server-defined parameters."""

    schema_hash: str | None = None


class PredictionBody(msgspec.Struct, frozen=True):
    """The fields that are read of a prediction. Its model is in the path."""

    parameters: PredictionParameters | None = None


class RequestBody(msgspec.Struct, frozen=True, gc=False):
    """The fields of a body in one form for all kinds; None for a missing field."""

    model: str | None = None
    stream: bool = False
    output_tokens: int | None = None  # the requested maximum, not validated: may be negative
    schema_hash: str | None = None  # hash of the schema that the caller expects
    prefix: bytes | None = None  # raw first PREFIX_BYTES of a longer prompt


def read_body(raw: bytes, path: str) -> RequestBody:
    """Decode the body of a request for the runtime's `path`. Raises Refused(InvalidRequest), naming the rule."""
    if path == INFER_PATH:
        parameters = decode(raw, PredictionBody).parameters
        return RequestBody(schema_hash=None if parameters is None else parameters.schema_hash)
    if path in ROUTES_BY_KIND["embed"]:
        embedding = decode(raw, EmbeddingBody)
        return RequestBody(embedding.model, embedding.stream is True)
    found = decode(raw, CompletionBody)
    max_tokens = found.max_tokens
    # Replicas read this field for chats only. For a completion, it would reserve less than the answer may cost.
    if found.max_completion_tokens is not None and path != _COMPLETIONS:
        max_tokens = found.max_completion_tokens
    prompt = memoryview(found.messages or found.prompt)
    prefix = bytes(prompt[:PREFIX_BYTES]) if len(prompt) > PREFIX_BYTES else None
    return RequestBody(found.model, found.stream is True, max_tokens, prefix=prefix)


def is_greedy(raw: bytes, path: str) -> bool:
    """Return whether a completion or chat sets its temperature to 0. The version's default is not known here."""
    if path == INFER_PATH or path in ROUTES_BY_KIND["embed"]:
        return False
    try:
        return decode(raw, _Temperature).temperature == 0
    except Refused:
        return False  # the replica refuses it


def token_limits_of(body: RequestBody, tenant_limits: TenantLimits) -> TokenLimits:
    """Return the tenant's token limits. Raises Refused(LimitExceeded) if the request can't be within them for any
    prompt. The replica counts the prompt's tokens and applies these limits.
    """
    if tenant_limits.output_tokens is None and tenant_limits.context_tokens is None:
        return NO_TOKEN_LIMITS
    for limit in (
        tenant_limits.output_tokens,
        None if tenant_limits.context_tokens is None else tenant_limits.context_tokens - 1,
    ):
        if limit is not None and body.output_tokens is not None and body.output_tokens > limit:
            raise Refused(LimitExceeded("max_tokens", body.output_tokens, limit, "tokens", TENANT_PHRASE))
    return TokenLimits(tenant_limits.context_tokens, tenant_limits.output_tokens)


class Estimate(msgspec.Struct, frozen=True, gc=False):
    """Estimated tokens of a request, as far as its bytes show."""

    prompt: int  # expected prompt tokens
    output: int  # upper bound of output tokens
    longest: int  # upper bound of prompt tokens

    @property
    def tokens(self) -> int:
        """Expected prompt tokens plus the longest output."""
        return self.prompt + self.output


def estimate(body: RequestBody, nbytes: int, row: VersionRow, ceiling: TokenLimits = NO_TOKEN_LIMITS) -> Estimate:
    """Return the tokens that the version may have to compute for a body of `nbytes`, within its limits and the
    caller's.

    The prompt's bytes are known, but only the replica knows its tokens. For the answer, the requested maximum is used.
    A token, text or number, takes at least one byte of the body. So does a prediction's row, which is charged as one
    token. A template usually adds less around messages than their JSON does.
    """
    longest = min(nbytes, row.limits.max_input_tokens)
    if row.kind == "predict":
        return Estimate(0, 0, longest)
    prompt = min(-(-nbytes // BYTES_PER_TOKEN), row.limits.max_input_tokens)
    if row.kind == "embed":
        return Estimate(prompt, 0, nbytes)  # each of several texts may reach the version's limit
    max_tokens = ceiling.allowed_output(row.limits.max_output_tokens)
    output = ceiling.apply_cap(
        max_tokens if body.output_tokens is None else max(0, min(body.output_tokens, max_tokens))
    )
    return Estimate(prompt, output, longest)
