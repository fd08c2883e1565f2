"""An encoder that is bound and ready, and how it makes a request for its engine out of a body."""

from dataclasses import dataclass
from typing import Any

from contracts.artifact_errors import ArtifactRejected
from contracts.ceiling import NO_CEILING, TENANT, Ceiling
from contracts.errors import Refused
from runtime.engine.interface import EmbeddingRequest
from runtime.openai_embeddings import EmbeddingAnswer, EmbeddingAsk, decode_embeddings, too_long
from runtime.pinned import PinnedFiles
from runtime.policy.schedule import OWNER
from runtime.serving import INLINE_CHARACTERS, Prepared, Served
from runtime.tokenizer_file import TOKENIZER, encode_text, load_tokenizer


class EmbeddingCodec:
    """One version's tokenizer. Thread-safe: encoding does not change it."""

    def __init__(self, files: PinnedFiles, vocab_size: int) -> None:
        """Raises `Refused(ArtifactRejected)` if the tokenizer does not load, or has ids that the model lacks."""
        self._tokenizer: Any = load_tokenizer(files[TOKENIZER])
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.longest_token = max(map(len, vocabulary), default=1)
        highest = max(vocabulary.values())
        if highest >= vocab_size:
            raise Refused(ArtifactRejected(TOKENIZER, f"has id {highest}, the model {vocab_size} rows"))

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids, with the special tokens that the tokenizer puts around them."""
        return encode_text(self._tokenizer, text)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EmbeddingServing(Served):
    """An encoder: embeddings."""

    kind = "embed"
    codec: EmbeddingCodec
    dimensions: int

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
        ask = decode_embeddings(raw, self.dimensions)
        characters = sum(len(item) for item in ask.inputs if isinstance(item, str))
        sequences = await self.encoding.run(tenant, characters, lambda: self._encode(ask, ceiling.context_tokens))
        answer = EmbeddingAnswer(ask.model or self.bind.model, ask.form)
        request = EmbeddingRequest(request_id=request_id, sequences=sequences, tenant=tenant)
        return Prepared(request, answer, stream=False)

    def _encode(self, ask: EmbeddingAsk, own: int | None) -> tuple[tuple[int, ...], ...]:
        found: list[tuple[int, ...]] = []
        encoded = 0
        most = max(INLINE_CHARACTERS, self.codec.longest_token * self.limits.max_input_tokens)
        try:
            for at, item in enumerate(ask.inputs):
                if isinstance(item, str) and len(item) > most:  # no token is longer than the longest one
                    raise too_long(at, len(ask.inputs), len(item), most, unit="characters")
                ids = self.codec.encode(item) if isinstance(item, str) else item
                encoded += len(ids) if isinstance(item, str) else 0
                if len(ids) > self.limits.max_input_tokens:
                    raise too_long(at, len(ask.inputs), len(ids), self.limits.max_input_tokens)
                if own is not None and len(ids) > own:
                    raise too_long(at, len(ask.inputs), len(ids), own, TENANT)
                found.append(ids)
        except Refused as refused:
            refused.encoded_tokens = encoded
            raise
        return tuple(found)
