"""A bound encoder that is ready, and how a request body becomes a request for its engine."""

from dataclasses import dataclass
from typing import Any

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.token_limits import NO_TOKEN_LIMITS, TENANT_PHRASE, TokenLimits
from runtime.drivers.interface import OWNER_TENANT, EmbeddingRequest
from runtime.models.pinned_files import PinnedFiles
from runtime.surface.encoding_queue import INLINE_CHARACTERS
from runtime.surface.openai_embeddings import EmbeddingAnswerBuilder, EmbeddingCall, decode_embeddings, input_refusal
from runtime.surface.served_version import PreparedRequest, ServedVersion
from runtime.text.tokenizer_file import TOKENIZER, encode_text, load_tokenizer


class EmbeddingCodec:
    """One version's tokenizer. Thread-safe, because encoding does not change it."""

    def __init__(self, files: PinnedFiles, vocab_size: int) -> None:
        """Raises `Refused(ArtifactRejected)` if the tokenizer does not load or has ids that the model lacks."""
        self._tokenizer: Any = load_tokenizer(files[TOKENIZER])
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.longest_token_characters = max(map(len, vocabulary), default=1)
        highest = max(vocabulary.values())
        if highest >= vocab_size:
            raise Refused(ArtifactRejected(TOKENIZER, f"has id {highest}, the model {vocab_size} rows"))

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids, with the special tokens that the tokenizer adds."""
        return encode_text(self._tokenizer, text)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServedEncoder(ServedVersion):
    """A served encoder, which answers embedding requests."""

    kind = "embed"
    codec: EmbeddingCodec
    dimensions: int

    async def prepare(
        self,
        path: str,
        raw: bytes,
        request_id: str,
        created_s: int,
        ceiling: TokenLimits = NO_TOKEN_LIMITS,
        tenant: str = OWNER_TENANT,
    ) -> PreparedRequest:
        """Decode and tokenize an embeddings request, as `ServedVersion.prepare` specifies."""
        call = decode_embeddings(raw, self.dimensions)
        characters = sum(len(item) for item in call.inputs if isinstance(item, str))
        sequences = await self.encoding.run(tenant, characters, lambda: self._encode(call, ceiling.context_tokens))
        answer = EmbeddingAnswerBuilder(call.model or self.bind.model, call.vector_format)
        request = EmbeddingRequest(request_id=request_id, sequences=sequences, tenant=tenant)
        return PreparedRequest(request, answer, stream=False)

    def _encode(self, call: EmbeddingCall, tenant_limit: int | None) -> tuple[tuple[int, ...], ...]:
        sequences: list[tuple[int, ...]] = []
        encoded_tokens = 0
        max_characters = max(INLINE_CHARACTERS, self.codec.longest_token_characters * self.limits.max_input_tokens)
        try:
            for index, item in enumerate(call.inputs):
                if isinstance(item, str) and len(item) > max_characters:  # even the longest tokens would be too many
                    raise input_refusal(index, len(call.inputs), len(item), max_characters, unit="characters")
                ids = self.codec.encode(item) if isinstance(item, str) else item
                encoded_tokens += len(ids) if isinstance(item, str) else 0
                if len(ids) > self.limits.max_input_tokens:
                    raise input_refusal(index, len(call.inputs), len(ids), self.limits.max_input_tokens)
                if tenant_limit is not None and len(ids) > tenant_limit:
                    raise input_refusal(index, len(call.inputs), len(ids), tenant_limit, TENANT_PHRASE)
                sequences.append(ids)
        except Refused as refused:
            refused.encoded_tokens = encoded_tokens
            raise
        return tuple(sequences)
