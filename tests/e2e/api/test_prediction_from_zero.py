"""An ONNX graph is pushed and predicts from zero over HTTPS."""

from pathlib import Path

import numpy as np

from coldstart_bench.harness.installation import Installation
from tests.e2e.https_client import post
from tests.runtime.predictor import models


def test_prediction_from_zero_is_right(kelvin: Installation, tmp_path: Path) -> None:
    """The prediction equals the arithmetic. A wrong schema hash and missing inputs are refused."""
    (tmp_path / "model.onnx").write_bytes(models.regression().SerializeToString())
    version = kelvin.push(tmp_path, "linear")
    rows = np.random.default_rng(5).normal(size=(3, 4)).astype(np.float32)
    body = {"inputs": [{"name": "x", "shape": [3, 4], "datatype": "FP32", "data": rows.ravel().tolist()}]}
    answer = post(kelvin, "/v2/models/linear/infer", body)
    assert answer.status == 200, answer.raw
    (output,) = answer.json["outputs"]
    assert np.allclose(np.reshape(output["data"], output["shape"]), rows @ models.WEIGHTS, atol=1e-5)
    assert answer.json["model_version"] == version
    wrong = post(kelvin, "/v2/models/linear/infer", body, x_kelvin_schema_hash="0" * 64)
    assert (wrong.status, wrong.json["code"]) == (400, "schema_mismatch")
    assert post(kelvin, "/v2/models/linear/infer", {"inputs": []}).status == 400
    kelvin.scale_to_zero("linear")
