"""Tokenizer, special tokens and template belong to the model, or it is said which of them does not."""

import json

import pytest

from contracts.artifact_errors import ArtifactRejected
from contracts.errors import Refused
from runtime.tokenizer import TextCodec, check_text, check_vocabulary
from tests.runtime.vocabularies import files

CODEC = TextCodec(files())
ROWS = CODEC.vocab_size


def test_what_belongs_together() -> None:
    """The whole vocabulary, the template and the special tokens fit; with a row more, too."""
    for rows in (ROWS, ROWS + 1):
        check_text(CODEC, rows)
        check_vocabulary(CODEC, rows)


def test_without_a_template() -> None:
    """A model without one completes texts, and is no chat's fault."""
    check_text(TextCodec(files(chat_template=None)), ROWS)


END = {"config.json": json.dumps({"eos_token_id": [1, 100_000]}).encode()}
BEFORE = {"generation_config.json": json.dumps({"eos_token_id": -1}).encode()}


@pytest.mark.parametrize(
    ("codec", "rows", "path", "reason"),
    [
        pytest.param(CODEC, 1, "tokenizer.json", "tokens, the model 1", id="a larger tokenizer"),
        pytest.param(TextCodec(files() | END), ROWS, "config.json", "eos_token_id 100000", id="an end past all rows"),
        pytest.param(TextCodec(files() | BEFORE), ROWS, "config.json", "eos_token_id -1", id="an end before all rows"),
        pytest.param(
            TextCodec(files(chat_template="{{ raise_exception('one turn only') if messages | length > 1 }}x")),
            ROWS,
            "tokenizer_config.json",
            "one turn only",
            id="a template that takes no conversation",
        ),
        pytest.param(
            TextCodec(files(chat_template="{{ messages[0].text.strip() }}")),
            ROWS,
            "tokenizer_config.json",
            "does not render a conversation",
            id="a template of other fields",
        ),
        pytest.param(
            TextCodec(files(chat_template="{{ '' }}")), ROWS, "tokenizer_config.json", "to nothing", id="an empty one"
        ),
        pytest.param(
            TextCodec(files() | {"chat_template.jinja": b"{{ messages.content() }}"}),
            ROWS,
            "chat_template.jinja",
            "does not render",
            id="a template in its own file",
        ),
    ],
)
def test_what_does_not(codec: TextCodec, rows: int, path: str, reason: str) -> None:
    """The file is named, and what is wrong with it."""
    with pytest.raises(Refused) as caught:
        check_text(codec, rows)
    failure = caught.value.failure
    assert isinstance(failure, ArtifactRejected)
    assert failure.path == path
    assert reason in failure.reason


def test_ids_with_gaps() -> None:
    """As many tokens as rows, but one id is higher: the count can't tell, the vocabulary can."""
    state = json.loads(files()["tokenizer.json"])
    words = state["model"]["vocab"]
    unmerged = next(word for word in words if len(word) == 1)
    words[unmerged] = ROWS + 5
    codec = TextCodec(files(json.dumps(state).encode()))
    check_text(codec, ROWS)
    with pytest.raises(Refused, match="tokens, the model"):
        check_vocabulary(codec, ROWS)
