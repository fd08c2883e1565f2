"""Predictions from push to answer: restored from zero, batched, metered, and equal to scikit-learn's."""

import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldstart_bench.harness.installation import Installation, InstallationFailed
from tests.e2e.api import predictors
from tests.e2e.api.predictors import COLUMNS, Trained
from tests.e2e.commands import run
from tests.e2e.https_client import Answer, all_at_once, connect, headers, post, read
from tests.e2e.installation_state import bill, record, report

pytestmark = pytest.mark.deep

TOLERANCE = 1e-5  # of probabilities: float32 against scikit-learn's float64
SIGNATURE = json.dumps({"inputs": [{"name": "X", "columns": [f"c{number}" for number in range(COLUMNS)]}]})
MODELS = {"logistic": predictors.logistic, "boosted": predictors.boosted, "numbers": predictors.boosted_regression}


@pytest.fixture(scope="module")
def trained() -> dict[str, Trained]:
    """Trained models by name."""
    return {name: make() for name, make in MODELS.items()}


@pytest.fixture(scope="module")
def served(kelvin: Installation, trained: dict[str, Trained], scratch: Path) -> Iterator[dict[str, Trained]]:
    """All trained models, pushed and at zero."""
    for name, model in trained.items():
        kelvin.push(model.write(scratch / "onnx" / name, SIGNATURE if name == "logistic" else None), name)
        kelvin.admin.request("PUT", f"/admin/v1/models/{name}/scale", {"max": 1})
    yield trained
    for name in trained:
        kelvin.scale_to_zero(name)


def tensor(rows: Any, **more: Any) -> dict[str, Any]:
    """Return an input tensor with nested data."""
    found = np.asarray(rows, np.float32)
    return {"name": "X", "shape": list(found.shape), "datatype": "FP32", "data": found.tolist(), **more}


def infer(kelvin: Installation, model: str, rows: Any, path: str = "/v2/models/{}/infer", **fields: Any) -> Answer:
    return post(kelvin, path.format(model), {"inputs": [tensor(rows)], **fields})


def get(kelvin: Installation, path: str) -> Answer:
    """GET with the tenant's key."""
    connection = connect(kelvin)
    try:
        connection.request("GET", path, headers=headers(kelvin))
        return read(connection.getresponse())
    finally:
        connection.close()


def outputs(answer: Answer) -> dict[str, Any]:
    """Return the output arrays by name, of an answer that must be 200."""
    assert answer.status == 200, answer.raw
    return {each["name"]: np.reshape(each["data"], each["shape"]) for each in answer.json["outputs"]}


def assert_as_the_library(answer: Answer, model: Any, rows: Any) -> None:
    """Assert equal labels, and probabilities or numbers within the tolerance."""
    found = outputs(answer)
    if not hasattr(model, "predict_proba"):
        assert np.allclose(found["variable"].ravel(), model.predict(rows), atol=TOLERANCE, rtol=TOLERANCE)
        return
    assert found["label"].tolist() == model.predict(rows).tolist()
    assert np.abs(found["probabilities"] - model.predict_proba(rows)).max() < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_predictions_equal_scikit_learns(kelvin: Installation, served: dict[str, Trained], name: str) -> None:
    """One row from zero, all rows in one request, and many requests at once give scikit-learn's predictions."""
    model, rows = served[name].model, served[name].rows
    kelvin.scale_to_zero(name)
    assert_as_the_library(infer(kelvin, name, rows[:1]), model, rows[:1])
    assert_as_the_library(infer(kelvin, name, rows), model, rows)
    answers = all_at_once(*[partial(infer, kelvin, name, rows[at : at + 3]) for at in range(0, 36, 3)])
    for at, answer in enumerate(answers):
        assert_as_the_library(answer, model, rows[3 * at : 3 * at + 3])


def test_another_model_would_be_seen(kelvin: Installation, served: dict[str, Trained]) -> None:
    """Negative control: the predictions of two models differ."""
    rows = served["boosted"].rows
    found = outputs(infer(kelvin, "boosted", rows))["probabilities"]
    assert np.abs(found - served["logistic"].model.predict_proba(rows)).max() > 100 * TOLERANCE


def test_prediction_is_answered_and_recorded(kelvin: Installation, served: dict[str, Trained]) -> None:
    """The answer has the requested id and outputs. Each row counts as one prompt token, and the bill balances."""
    rows = served["boosted"].rows[:7]
    first = record(kelvin, infer(kelvin, "boosted", rows[:1]))
    before_bill = bill(kelvin)
    answer = infer(kelvin, "boosted", rows, id="42", outputs=[{"name": "label"}])
    version = kelvin.model("boosted")["version"]
    assert (answer.json["model_name"], answer.json["model_version"], answer.json["id"]) == ("boosted", version, "42")
    assert [each["name"] for each in answer.json["outputs"]] == ["label"]
    assert answer.headers["x-kelvin-version"] == version
    row = record(kelvin, answer)
    assert (row["outcome"], row["prompt_tokens"], row["completion_tokens"], row["stream"]) == ("ok", 7, 0, 0)
    assert row["device_us"] > 0
    assert row["billable"]
    assert row["runtime_id"] == first["runtime_id"]
    after = bill(kelvin)
    assert after["prompt_tokens"] == before_bill["prompt_tokens"] + 7
    assert after["balance"]["balanced"], after["balance"]


def test_metadata_and_health(kelvin: Installation, served: dict[str, Trained]) -> None:
    """Metadata is the same under each name of a model, its hash can be recomputed, and no replica starts."""
    kelvin.scale_to_zero("logistic")
    assert get(kelvin, "/v2").json.keys() == {"name", "version", "extensions"}
    assert get(kelvin, "/v2/").status == 200
    assert (get(kelvin, "/v2/health/live").json, get(kelvin, "/v2/health/ready").json) == (
        {"live": True},
        {"ready": True},
    )
    version = kelvin.model("logistic")["version"]
    about = get(kelvin, "/v2/models/logistic").json
    for path in (
        "/default/logistic/v2/models/logistic",
        f"/v2/models/logistic/versions/{version[:12]}",
        "/v2/models/logistic@prod",
        "/v2/models/logistic/versions/prod",
    ):
        assert get(kelvin, path).json == about
        assert get(kelvin, f"{path}/ready").json == {"name": "logistic", "ready": True}
    (x,) = about["inputs"]
    assert x == {"name": "X", "datatype": "FP32", "shape": [-1, COLUMNS], "columns": [f"c{n}" for n in range(COLUMNS)]}
    assert [each["name"] for each in about["outputs"]] == ["label", "probabilities"]
    text = json.dumps({"inputs": about["inputs"], "outputs": about["outputs"]}, sort_keys=True, separators=(",", ":"))
    assert about["properties"] == {"version": version, "schema_hash": hashlib.sha256(text.encode()).hexdigest()}
    assert kelvin.model("logistic")["state"] == "zero"


def test_another_schema_is_refused(kelvin: Installation, served: dict[str, Trained]) -> None:
    """A wrong schema hash in header or parameter is refused before the model starts. The right one is accepted."""
    rows = served["logistic"].rows[:1]
    kelvin.scale_to_zero("logistic")
    right = get(kelvin, "/v2/models/logistic").json["properties"]["schema_hash"]
    wrong = get(kelvin, "/v2/models/boosted").json["properties"]["schema_hash"]
    assert right != wrong  # the signature of `logistic` names its columns
    body = {"inputs": [tensor(rows)]}
    path = "/v2/models/logistic/infer"
    for answer in (
        post(kelvin, path, body, x_kelvin_schema_hash=wrong),
        post(kelvin, path, body | {"parameters": {"schema_hash": wrong}}),
        post(kelvin, path, body | {"parameters": {"schema_hash": wrong}}, x_kelvin_schema_hash=right),
        post(kelvin, path, body | {"parameters": {"schema_hash": right}}, x_kelvin_schema_hash=wrong),
        post(kelvin, path, body, x_kelvin_schema_hash=""),
    ):
        assert (answer.status, answer.json["code"]) == (400, "schema_mismatch"), answer.raw
        assert right in answer.json["error"]
    assert kelvin.model("logistic")["state"] == "zero"
    both = post(kelvin, path, body | {"parameters": {"schema_hash": right}}, x_kelvin_schema_hash=right)
    assert_as_the_library(both, served["logistic"].model, rows)


X = tensor([[0.0] * COLUMNS])


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        pytest.param("/v2/models/boosted/infer", b"{", 400, "body", id="no JSON"),
        pytest.param("/v2/models/boosted/infer", {}, 400, "inputs=(missing)", id="no inputs"),
        pytest.param("/v2/models/boosted/infer", {"inputs": [X | {"datatype": "INT64"}]}, 400, "FP32", id="a type"),
        pytest.param("/v2/models/boosted/infer", {"inputs": [X | {"shape": [1, 2]}]}, 400, "shape", id="a shape"),
        pytest.param("/v2/models/boosted/infer", {"inputs": [X | {"data": [[0.0, 1e39] * 3]}]}, 400, "data[1]",
                     id="a value"),
        pytest.param("/v2/models/boosted/infer", {"inputs": [tensor(np.zeros((4097, COLUMNS)))]}, 400, "4096",
                     id="too many rows"),
        pytest.param("/v2/models/boosted/infer", {"inputs": [tensor(np.zeros((60_000, COLUMNS)))]}, 413, "larger",
                     id="too many bytes"),
        pytest.param("/v2/models/nothing/infer", {"inputs": [X]}, 404, "nothing@prod", id="no such model"),
        pytest.param("/v2/models/boosted/versions/1/infer", {"inputs": [X]}, 404, "boosted@1", id="no such version"),
        pytest.param("/v2/models/boosted@prod/versions/prod/infer", {"inputs": [X]}, 400, "alias", id="two aliases"),
        pytest.param("/default/logistic/v2/models/boosted/infer", {"inputs": [X]}, 400, "logistic", id="two models"),
        pytest.param("/other/boosted/v2/models/boosted/infer", {"inputs": [X]}, 404, "boosted", id="another tenant"),
        pytest.param("/v2/models/llama/infer", {"inputs": [X]}, 400, "generates text", id="another kind"),
        pytest.param("/v2/models", {}, 404, "/v2/models", id="no such route"),
        pytest.param("/v2/models/boosted", {}, 405, "POST", id="another method"),
    ],
)  # fmt: skip
def test_refused(
    kelvin: Installation, served: dict[str, Trained], path: str, body: Any, status: int, said: str
) -> None:
    """A refusal has the protocol's form and names value and rule."""
    connection = connect(kelvin)
    try:
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), headers(kelvin))
        answer = read(connection.getresponse())
    finally:
        connection.close()
    assert (answer.status, answer.json.keys()) == (status, {"error", "code"}), answer.raw
    assert said in answer.json["error"]


def test_inference_without_a_key_is_refused(kelvin: Installation, served: dict[str, Trained]) -> None:
    """Without a key every route is 401, health included."""
    for path in ("/v2", "/v2/health/live", "/v2/models/boosted"):
        connection = connect(kelvin)
        try:
            connection.request("GET", path)
            answer = read(connection.getresponse())
        finally:
            connection.close()
        assert (answer.status, answer.json["code"]) == (401, "invalid_api_key")


def test_the_other_kind_is_not_woken(kelvin: Installation, served: dict[str, Trained]) -> None:
    """A chat with a predicting model is 400 and starts nothing."""
    kelvin.scale_to_zero("boosted")
    chat = post(kelvin, "/v1/chat/completions", {"model": "boosted", "messages": [{"role": "user", "content": "a"}]})
    assert chat.status == 400
    assert chat.json["error"]["message"] == "model=boosted: this model predicts: ask /v2/models/boosted/infer"
    assert kelvin.model("boosted")["state"] == "zero"


def test_a_bad_request_harms_none_beside_it(kelvin: Installation, served: dict[str, Trained]) -> None:
    """Valid requests in one burst with refused ones get their predictions."""
    model, rows = served["logistic"].model, served["logistic"].rows
    huge = np.full((1, COLUMNS), 3e38, np.float32)
    calls = [partial(infer, kelvin, "logistic", each) for each in (rows[:2], huge, rows[2:3], [[1.0]])]
    answers = all_at_once(*calls)
    assert [answer.status for answer in answers[::2]] == [200, 200]
    assert [answer.status // 100 for answer in answers] == [2, 4, 2, 4], [answer.raw for answer in answers]
    assert_as_the_library(answers[0], model, rows[:2])
    assert_as_the_library(answers[2], model, rows[2:3])


def test_client_that_hangs_up_leaves_nothing(kelvin: Installation, served: dict[str, Trained]) -> None:
    """A replica drops the requests of clients that disconnect, and serves on without leaked descriptors."""
    model, rows = served["boosted"].model, served["boosted"].rows
    assert infer(kelvin, "boosted", rows).status == 200
    before = report(kelvin, "boosted")
    body = json.dumps({"inputs": [tensor(np.tile(rows, (60, 1)))]})
    for _ in range(5):
        connection = connect(kelvin)
        connection.request("POST", "/v2/models/boosted/infer", body, headers(kelvin))
        connection.close()
    kelvin.wait(lambda: report(kelvin, "boosted").running == 0, "they were let go of")
    assert_as_the_library(infer(kelvin, "boosted", rows), model, rows)
    kelvin.wait(lambda: report(kelvin, "boosted").open_files <= before.open_files + 2, "no descriptor is left")


def test_pushed_again_exported_and_checked(
    kelvin: Installation, served: dict[str, Trained], scratch: Path, tmp_path: Path
) -> None:
    """Pushing the same directory gives the same version, its export is identical, and fsck finds nothing."""
    version = kelvin.model("logistic")["version"]
    assert kelvin.push(scratch / "onnx" / "logistic", "logistic") == version
    run(kelvin, "export", f"logistic@{version[:12]}", str(tmp_path / "out"))
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert found == {path.name: path.read_bytes() for path in (scratch / "onnx" / "logistic").iterdir()}
    tensors = ("export", f"logistic@{version[:12]}", str(tmp_path / "other"), "--format", "tensors")
    assert "as it was pushed" in run(kelvin, *tensors, code=1)
    assert not (tmp_path / "other").exists()
    run(kelvin, "fsck")


def test_what_may_not_enter_is_refused(kelvin: Installation, trained: dict[str, Trained], tmp_path: Path) -> None:
    """A foreign operator set or a pickle is refused at the push, with exit code 3 and the reason."""
    directory = trained["logistic"].write(tmp_path / "bad")
    raw = (directory / "model.onnx").read_bytes()
    (directory / "model.onnx").write_bytes(raw.replace(b"ai.onnx.ml", b"ai.evil.ml"))
    assert "ai.evil.ml" in run(kelvin, "push", str(directory), "--name", "bad", code=3)
    (directory / "model.onnx").write_bytes(raw)
    (directory / "model.pkl").write_bytes(b"")
    with pytest.raises(InstallationFailed, match="pickles can run code"):
        kelvin.push(directory, "bad")
