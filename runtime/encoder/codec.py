"""Text to token ids for an encoder, from its tokenizer's verified bytes."""

from typing import Any

from contracts.artifact_errors import ArtifactRejected
from contracts.errors import Refused
from runtime.pinned import PinnedFiles
from runtime.tokenizer_file import TOKENIZER, encode_text, load_tokenizer


class EmbeddingCodec:
    """One version's tokenizer. Thread-safe: encoding does not change it."""

    def __init__(self, files: PinnedFiles, vocab_size: int) -> None:
        """Raises `Refused(ArtifactRejected)` where it does not load, or has ids that the model lacks."""
        self._tokenizer: Any = load_tokenizer(files[TOKENIZER])
        self.vocab_size = vocab_size
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.longest_token = max(map(len, vocabulary), default=1)
        highest = max(vocabulary.values())
        if highest >= vocab_size:
            raise Refused(ArtifactRejected(TOKENIZER, f"has id {highest}, the model {vocab_size} rows"))

    def encode(self, text: str) -> tuple[int, ...]:
        """With the special tokens that the tokenizer puts around it."""
        return encode_text(self._tokenizer, text)
