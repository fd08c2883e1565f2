"""What the door reads of a request's body. `read_body` decodes it once, and checks what it reads; the rest passes as it
came.

The scan is what a large body costs, however few fields are kept of it. Only a request that may be answered out of a
cache is scanned again, by `is_greedy`. Nothing edits a body.
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
BYTES_PER_TOKEN: Final = 4  # of English text in a vocabulary of 100,000 or so, nearly
_COMPLETIONS: Final = "/v1/completions"


class EmbeddingBody(msgspec.Struct, frozen=True):
    """What is read of a request for embeddings."""

    model: str | None = None
    stream: bool | None = None


class CompletionBody(EmbeddingBody, frozen=True):
    """What is read of a completion or a chat."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    messages: msgspec.Raw = NOTHING  # as they came, not looked into
    prompt: msgspec.Raw = NOTHING


class _Temperature(msgspec.Struct, frozen=True):
    temperature: float | None = None


class PredictionParameters(msgspec.Struct, frozen=True):
    """Of the parameters that the Open Inference Protocol leaves to the server."""

    schema_hash: str | None = None


class PredictionBody(msgspec.Struct, frozen=True):
    """What is read of a prediction, whose model is in the path."""

    parameters: PredictionParameters | None = None


class RequestBody(msgspec.Struct, frozen=True, gc=False):
    """What a body asks for; None where it doesn't say."""

    model: str | None = None
    stream: bool = False
    output_tokens: int | None = None  # at most; as it was said, be it negative
    schema_hash: str | None = None  # of the schema that the caller was made for
    prefix: bytes | None = None  # the prompt's beginning, as it came, of a prompt that is longer than that


def read_body(raw: bytes, path: str) -> RequestBody:
    """One decode of the JSON that came for `path` of a replica. Raises Refused(InvalidRequest), naming the rule."""
    if path == INFER_PATH:
        parameters = decode(raw, PredictionBody).parameters
        return RequestBody(schema_hash=None if parameters is None else parameters.schema_hash)
    if path in ROUTES_BY_KIND["embed"]:
        embedding = decode(raw, EmbeddingBody)
        return RequestBody(embedding.model, embedding.stream is True)
    found = decode(raw, CompletionBody)
    most = found.max_tokens
    # A replica takes this field of a chat only. Of a completion it would hold back less than the answer may cost.
    if found.max_completion_tokens is not None and path != _COMPLETIONS:
        most = found.max_completion_tokens
    prompt = memoryview(found.messages or found.prompt)
    prefix = bytes(prompt[:PREFIX_BYTES]) if len(prompt) > PREFIX_BYTES else None
    return RequestBody(found.model, found.stream is True, most, prefix=prefix)


def is_greedy(raw: bytes, path: str) -> bool:
    """Whether a completion or chat says that its temperature is 0: what the version's own is nobody knows here. A scan
    of its own, for those who ask for the cache.
    """
    if path == INFER_PATH or path in ROUTES_BY_KIND["embed"]:
        return False
    try:
        return decode(raw, _Temperature).temperature == 0
    except Refused:
        return False  # for the replica to refuse


def ceiling_of(body: RequestBody, tenant_limits: TenantLimits) -> TokenLimits:
    """What the tenant may use of what a version allows. Raises Refused(LimitExceeded) for what can't be within it,
    whatever the prompt: its tokens are counted by the replica, which is told the ceiling.
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
    """Tokens that a request may take, as far as that can be known from its bytes."""

    prompt: int  # likely
    output: int  # at most
    longest: int  # that the prompt can be, whatever it is made of

    @property
    def tokens(self) -> int:
        """Likely, of a prompt with the longest answer."""
        return self.prompt + self.output


def estimate(body: RequestBody, nbytes: int, row: VersionRow, ceiling: TokenLimits = NO_TOKEN_LIMITS) -> Estimate:
    """What the version may have to compute for a body of `nbytes`: at most what its limits and the caller's allow.

    Of a prompt the bytes are known, its tokens only to the replica; of an answer the most that was asked for. A token
    takes a byte of the body or more, be it text or a number, and so does a prediction's row, which is charged as one;
    what a template puts around messages is less than the JSON around them, as a rule.
    """
    longest = min(nbytes, row.limits.max_input_tokens)
    if row.kind == "predict":
        return Estimate(0, 0, longest)
    prompt = min(-(-nbytes // BYTES_PER_TOKEN), row.limits.max_input_tokens)
    if row.kind == "embed":
        return Estimate(prompt, 0, nbytes)  # of several texts each may have as many as the version takes
    most = ceiling.output(row.limits.max_output_tokens)
    output = ceiling.apply_cap(most if body.output_tokens is None else max(0, min(body.output_tokens, most)))
    return Estimate(prompt, output, longest)
