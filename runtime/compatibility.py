"""Do tokenizer, special tokens and chat template belong to the model? Asked at sealing, and again at each restore.

A restore asks what takes a millisecond: files are compared with their digests in any case, so that only another
version of a library could answer otherwise. The highest id of a vocabulary takes longer, and is sealing's.
"""

from collections.abc import Mapping
from typing import Final

from contracts.artifact_errors import ArtifactRejected
from contracts.errors import Refused
from runtime.tokenizer import CONFIG, TextCodec
from runtime.tokenizer_file import TOKENIZER, is_read_alike

# What every chat is made of; a template that can't continue a conversation can't serve one.
CONVERSATION: Final[tuple[Mapping[str, str], ...]] = (
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Good day."},
    {"role": "user", "content": "Tell me more."},
)


def check_text(codec: TextCodec, vocab_size: int) -> None:
    """Every id that a text, a special token or a conversation may have is a row of the embedding.

    Raises `Refused(ArtifactRejected)` naming file and token.
    """
    if codec.token_count > vocab_size:
        _reject(TOKENIZER, f"has {codec.token_count} tokens, the model {vocab_size}")
    for name, token_id in codec.special_ids.items():
        if token_id >= vocab_size:
            _reject(TOKENIZER, f"{name} is id {token_id}, but the model has {vocab_size} rows")
    for stop_id in sorted(codec.stop_ids):
        if not 0 <= stop_id < vocab_size:
            _reject(CONFIG, f"eos_token_id {stop_id}: must be a row of the model's {vocab_size}")
    if codec.template_file is not None:
        _check_template(codec, codec.template_file, vocab_size)


def check_reading(tokenizer: bytes) -> None:
    """Check that a large `tokenizer.json`, which is parsed here, gives the same tokenizer as its library. Raises
    `Refused(ArtifactRejected)`.
    """
    if not is_read_alike(tokenizer):
        _reject(TOKENIZER, "is read otherwise here than by the library that wrote it")


def check_vocabulary(codec: TextCodec, vocab_size: int) -> None:
    """Check that the model has a row for every id of the vocabulary. Raises `Refused(ArtifactRejected)`."""
    if codec.vocab_size > vocab_size:
        _reject(TOKENIZER, f"has {codec.vocab_size} tokens, the model {vocab_size}")


def _check_template(codec: TextCodec, path: str, vocab_size: int) -> None:
    try:
        ids = codec.encode_chat(CONVERSATION)
    except Refused as refused:
        reason = f"does not render a conversation of user, assistant and user: {refused.failure.message[:200]}"
        raise Refused(ArtifactRejected(path, reason)) from refused
    if not ids:
        _reject(path, "renders a conversation to nothing")
    if (highest := max(ids)) >= vocab_size:
        _reject(path, f"renders a conversation with id {highest}, but the model has {vocab_size} rows")


def _reject(path: str, reason: str) -> None:
    raise Refused(ArtifactRejected(path, reason))
