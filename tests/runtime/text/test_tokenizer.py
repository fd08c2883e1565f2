"""Prompts become the token ids that transformers makes with the same files."""

import base64
import json
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.errors import InvalidRequest, Refused
from runtime.text.tokenizer import TextCodec, check_token_rows, check_vocabulary
from tests.runtime.vocabularies import TEMPLATE, byte_level, files

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Größe? </s> 😀"}]


def _peer(tmp_path: Path, pinned: dict[str, bytes]) -> Any:
    for name, content in pinned.items():
        (tmp_path / name).write_bytes(content)
    return PreTrainedTokenizerFast.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(TEMPLATE, id="the usual"),
        pytest.param("{% generation %}{{ messages[0].content }}{% endgeneration %}", id="marks of training"),
        pytest.param(
            "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}", id="break"
        ),
        pytest.param("{{ messages | tojson(indent=1) }}", id="tojson escapes nothing"),
        pytest.param(
            "{% set ns = namespace(n=0) %}{% for m in messages %}\n  {% set ns.n = ns.n + 1 %}\n{% endfor %}{{ ns.n }}",
            id="namespaces, trimmed and stripped blocks",
        ),
        pytest.param("{{ dict(a=1) }}{{ tools is none }}{{ eos_token }}", id="globals and special tokens"),
    ],
)
def test_chat_is_what_transformers_makes_of_it(tmp_path: Path, template: str) -> None:
    """Each dialect of template in checkpoints gives the same ids."""
    pinned = files(chat_template=template)
    ids = _peer(tmp_path, pinned).apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert list(TextCodec(pinned).encode_chat(MESSAGES)) == ids


def test_plain_text_gets_its_start_token(tmp_path: Path) -> None:
    """A prompt gets the tokenizer's own special tokens."""
    pinned = files()
    assert list(TextCodec(pinned).encode("Größe 中")) == _peer(tmp_path, pinned)("Größe 中")["input_ids"]


def test_a_pinned_truncation_does_not_cut() -> None:
    """A tokenizer saved with truncation must not cut a prompt silently. Limits refuse it instead."""
    state = json.loads(byte_level())
    state["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    state["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<s>",
    }  # fmt: skip
    cutting = files(json.dumps(state).encode())
    assert TextCodec(cutting).encode("word " * 20) == TextCodec(files()).encode("word " * 20)


@pytest.mark.parametrize(
    ("template", "rule"),
    [
        pytest.param("{{ raise_exception('roles must alternate') }}", "roles must alternate", id="its own complaint"),
        pytest.param("{{ messages[7].content }}", "refuses", id="a message that is not there"),
        pytest.param("{{ messages + 1 }}", "fails on them (TypeError)", id="a defect"),
        pytest.param("{{ messages.append(1) }}", "refuses", id="a change of what it was given"),
        pytest.param("{{ ''.__class__.__mro__ }}", "refuses", id="a way out of the sandbox"),
        pytest.param("{{ dict.__class__ }}{{ namespace(_x=1) }}", "refuses", id="another"),
        pytest.param("{% for i in range(1000000) %}{% endfor %}", "fails on them (OverflowError)", id="a long loop"),
    ],
)
def test_failed_template_fails_the_request(template: str, rule: str) -> None:
    """A failing template is a 400 with the reason, and does no harm to the process."""
    codec = TextCodec(files(chat_template=template))
    with pytest.raises(Refused) as caught:
        codec.encode_chat(MESSAGES)
    assert isinstance(caught.value.failure, InvalidRequest)
    assert rule in caught.value.failure.message


def test_without_a_template_chat_is_refused() -> None:
    with pytest.raises(Refused, match="no chat template"):
        TextCodec(files(chat_template=None)).encode_chat(MESSAGES)


def test_a_template_file_comes_before_the_configuration() -> None:
    """As in transformers. Of several named templates the default is used."""
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    assert TextCodec(files(chat_template=named)).encode_chat(MESSAGES) == TextCodec(files()).encode("yes")[1:]
    own = files() | {"chat_template.jinja": b"own"}
    assert TextCodec(own).encode_chat(MESSAGES) == TextCodec(files()).encode("own")[1:]


def test_every_end_of_sequence_counts() -> None:
    """End tokens of both configs and of the tokenizer stop a generation."""
    pinned = files() | {"generation_config.json": b'{"eos_token_id": [7, 9]}', "config.json": b'{"eos_token_id": 5}'}
    assert TextCodec(pinned).stop_ids == {1, 5, 7, 9}
    assert TextCodec(files(eos_token=None) | {"config.json": b"{}"}).stop_ids == frozenset()


@pytest.mark.parametrize(
    ("pinned", "path"),
    [
        pytest.param({}, "tokenizer.json", id="no tokenizer"),
        pytest.param({"tokenizer.json": b"{}"}, "tokenizer.json", id="not a tokenizer"),
        pytest.param(files() | {"tokenizer_config.json": b"[]"}, "tokenizer_config.json", id="not an object"),
        pytest.param(files() | {"config.json": b"{"}, "config.json", id="not JSON"),
        pytest.param(files(chat_template="{% if %}"), "tokenizer_config.json", id="a template that does not parse"),
    ],
)
def test_broken_files_are_named(pinned: dict[str, bytes], path: str) -> None:
    with pytest.raises(Refused) as caught:
        TextCodec(pinned)
    assert isinstance(caught.value.failure, ArtifactRejected)
    assert caught.value.failure.path == path


def _with(**parts: Any) -> dict[str, bytes]:
    return files(json.dumps(json.loads(byte_level()) | parts).encode())


def _replacing(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


BACKTRACKS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
SPLITS = {"type": "Sequence", "pretokenizers": [BACKTRACKS, json.loads(byte_level())["pre_tokenizer"]]}
DOUBLES = _replacing({"String": "a"}, "aa")
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def test_text_on_which_the_tokenizer_panics_is_refused() -> None:
    """A panic of the library is no Exception in Python. It is reported as the artifact's fault."""
    codec = TextCodec(_with(pre_tokenizer=SPLITS))
    for encode in (codec.encode, codec.encode_rendered):
        with pytest.raises(Refused) as refused:
            encode("a" * 40 + "b")
        failure = refused.value.failure
        assert isinstance(failure, ArtifactRejected)
        assert failure.status == 422
        assert failure.path == "tokenizer.json"
    assert codec.encode("and it goes on")


def _charsmap(character: str, replacement: str) -> dict[str, Any]:
    """Return a SentencePiece normalizer with one replacement: a double array of three units, then texts."""
    units = [0] * 1024
    root, leaf = 256, 512
    units[0] = root << 10
    units[root ^ ord(character)] = ord(character) | 1 << 8 | leaf << 10
    units[root ^ ord(character) ^ leaf] = 1 << 31
    trie = struct.pack(f"<{len(units)}I", *units)
    raw = struct.pack("<I", len(trie)) + trie + replacement.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(raw).decode()}


def _template(*pieces: str, ids: Sequence[int] = (0,)) -> dict[str, Any]:
    """Return a post-processor. `A` is the text, everything else a special token with these ids."""
    kinds = {"A": "Sequence"}
    single = [{kinds.get(piece, "SpecialToken"): {"id": piece, "type_id": 0}} for piece in pieces]
    special = {piece: {"id": piece, "ids": list(ids), "tokens": ["<s>"] * len(ids)} for piece in pieces if piece != "A"}
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({"normalizer": {"type": "Sequence", "normalizers": [DOUBLES] * 40}}, id="a text doubled 40 times"),
        pytest.param({"normalizer": _replacing({"Regex": ""}, "b" * 1000)}, id="a thousand letters between any two"),
        pytest.param(
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 40}}, id="bytes of bytes"
        ),
        pytest.param(
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 40}}, id="bytes of bytes of words"
        ),
        pytest.param({"normalizer": {"type": "Prepend", "prepend": "b" * 1000}}, id="a thousand letters before each"),
        pytest.param({"normalizer": _charsmap("a", "b" * 1000)}, id="a thousand letters for one"),
        pytest.param({"post_processor": _template(*"A" * 1000)}, id="a text put down a thousand times"),
        pytest.param(
            {"post_processor": {"type": "Sequence", "processors": [_template("A", "A")] * 40}}, id="doubled afterwards"
        ),
        pytest.param({"post_processor": _template("<s>", "A", ids=[0] * 1000)}, id="a thousand tokens before it"),
        pytest.param({"post_processor": _template(*["<s>"] * 1000, "A")}, id="one token a thousand times"),
    ],
)
def test_tokenizer_that_multiplies_a_text_is_refused(parts: dict[str, Any]) -> None:
    """A text multiplied to gigabytes would kill the process, so the tokenizer is refused before any encoding."""
    with pytest.raises(Refused) as refused:
        TextCodec(_with(**parts))
    failure = refused.value.failure
    assert isinstance(failure, ArtifactRejected)
    assert "times as long" in failure.reason or "special tokens to a text" in failure.reason


def test_character_map_is_read_as_the_library_reads_it() -> None:
    """Negative control: the counted replacement is the library's."""
    map_of = Tokenizer.from_str(json.dumps(json.loads(byte_level()) | {"normalizer": _charsmap("a", "b" * 100)}))
    assert map_of.normalizer.normalize_str("xax") == "x" + "b" * 100 + "x"
    usual = {"normalizer": _charsmap("a", "b" * 18), "post_processor": _template("<s>", "A", "</s>")}
    assert TextCodec(_with(**usual)).encode("Two words")


def test_usual_normalizers_are_served() -> None:
    usual = [{"type": "Prepend", "prepend": "▁"}, _replacing({"String": " "}, "▁"), {"type": "NFKC"},
             _replacing({"Regex": " {2,}"}, " "), _replacing({"String": "``"}, '"'), {"type": "Lowercase"}]  # fmt: skip
    assert TextCodec(_with(normalizer={"type": "Sequence", "normalizers": usual})).encode("Two words")


def test_encoding_leaves_the_interpreter_to_others() -> None:
    """Another thread runs while a long text is encoded, so a prompt does not delay the engine's step."""
    codec, text = TextCodec(files()), "the word was in the beginning " * 20_000
    longest_s, done = 0.0, threading.Event()

    def tick() -> None:
        nonlocal longest_s
        last = time.perf_counter()
        while not done.wait(0.001):
            now = time.perf_counter()
            longest_s, last = max(longest_s, now - last), now

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = time.perf_counter()
    codec.encode(text)
    took_s = time.perf_counter() - began
    done.set()
    ticking.join()
    assert longest_s < took_s / 2, f"another thread waited {longest_s:.3f} s of {took_s:.3f} s"


CODEC = TextCodec(files())
ROWS = CODEC.vocab_size


def test_matching_tokenizer_and_model_are_accepted() -> None:
    """The vocabulary, template and special tokens fit, also with a spare row."""
    for rows in (ROWS, ROWS + 1):
        check_token_rows(CODEC, rows)
        check_vocabulary(CODEC, rows)


def test_model_without_a_template_completes_texts() -> None:
    check_token_rows(TextCodec(files(chat_template=None)), ROWS)


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
def test_mismatched_tokenizer_file_is_named(codec: TextCodec, rows: int, path: str, reason: str) -> None:
    with pytest.raises(Refused) as caught:
        check_token_rows(codec, rows)
    failure = caught.value.failure
    assert isinstance(failure, ArtifactRejected)
    assert failure.path == path
    assert reason in failure.reason


def test_ids_with_gaps() -> None:
    """With a gap the number of tokens fits, but one id is too high. Only the vocabulary shows it."""
    state = json.loads(files()["tokenizer.json"])
    words = state["model"]["vocab"]
    unmerged = next(word for word in words if len(word) == 1)
    words[unmerged] = ROWS + 5
    codec = TextCodec(files(json.dumps(state).encode()))
    check_token_rows(codec, ROWS)
    with pytest.raises(Refused, match=f"has id {ROWS + 5}, the model {ROWS} rows"):
        check_vocabulary(codec, ROWS)
