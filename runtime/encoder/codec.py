"""Text to token ids for an encoder, from its tokenizer's verified bytes."""

from typing import Any

from contracts.artifact_errors import ArtifactRejected
from contracts.errors import Refused
from runtime.pinned import PinnedFiles
from runtime.tokenizer_file import read_tokenizer


class EmbeddingCodec:
    """One version's tokenizer. Thread-safe: encoding does not change it."""

    def __init__(self, files: PinnedFiles, vocab_size: int) -> None:
        """Raises `Refused(ArtifactRejected)` where it does not load, or has ids that the model lacks."""
        try:
            self._tokenizer: Any = read_tokenizer(files["tokenizer.json"])
        except Exception as error:  # the library raises nothing narrower
            raise Refused(ArtifactRejected("tokenizer.json", f"does not load: {str(error)[:200]}")) from error
        self.vocab_size = vocab_size
        # Limits refuse; a pinned truncation would cut texts silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        highest = max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        if highest >= vocab_size:
            raise Refused(ArtifactRejected("tokenizer.json", f"has id {highest}, the model {vocab_size} rows"))

    def encode(self, text: str) -> tuple[int, ...]:
        """With the special tokens that the tokenizer puts around it."""
        return tuple(self._tokenizer.encode(text).ids)
