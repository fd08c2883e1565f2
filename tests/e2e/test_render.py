"""A version for a cluster, by the command that a user types."""

import json

from coldstart_bench.installation import Installation
from tests.e2e.commands import run


def test_rendered_for_a_cluster(kelvin: Installation) -> None:
    """The version that `prod` names, as the model scales here; what a cluster would refuse is refused."""
    image, version = "registry.example/kelvin@sha256:" + "0" * 64, kelvin.model("llama")["version"]
    words = ("models", "render", "llama", "--image", image, "--store", "s3://models")
    found = json.loads(run(kelvin, *words))
    assert found["metadata"]["name"] == f"llama-{version[:12]}"
    (container,) = found["spec"]["template"]["spec"]["containers"]
    assert (container["image"], container["args"][1]) == (image, version)
    annotations = found["spec"]["template"]["metadata"]["annotations"]
    assert annotations["autoscaling.knative.dev/max-scale"] == str(kelvin.model("llama")["scale"]["max"])
    assert "kubernetes.podspec-nodeselector" in run(kelvin, *words, "--node", "gpu=h100", code=1)
    assert "must be KEY=VALUE" in run(kelvin, *words, "--node", "gpu", code=2)
    inner = ("--control", "https://c:7500", "--snapshotter", "https://s:7501", "--inner-secret", "inner")
    (container,) = json.loads(run(kelvin, *words, *inner))["spec"]["template"]["spec"]["containers"]
    assert {"name": "KELVIN_CONTROL", "value": "https://c:7500"} in container["env"]
    assert "go together" in run(kelvin, *words, *inner[:4], code=2)
    assert "kubernetes.podspec-volumes-hostpath" in run(kelvin, *words, "--cache", "/c", code=1)
