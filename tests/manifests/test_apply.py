"""The documented apply commands change only our keys in Knative's ConfigMaps. Real kubectl, against the fake API
server.
"""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest
import yaml

from controlplane.knative.policy.namespace_requirements import KEEP_ANNOTATIONS
from tests.cluster.kube_api.api_server import ApiServer, serving
from tests.manifests.kustomize_build import MANIFESTS, Json, crds, knative, kustomize
from tests.manifests.test_component_order import PAGE

pytestmark = pytest.mark.skipif(
    kustomize() is None or shutil.which("kubectl") is None, reason="no kubectl 1.27 or later"
)

OURS: Final = MANIFESTS / "knative" / "base" / "settings.yaml"
_LINES: Final = re.findall(r"^kubectl .*(?:annotate configmap|manifests/knative).*$", PAGE, re.MULTILINE)
# Settings of Knative, and of an administrator.
LABELS: Final = {"app.kubernetes.io/name": "knative-serving"}
THEIRS: Final = {"_example": "words", "an-administrator-s": "77s"}


class Place:
    """An API server with Knative's ConfigMaps, and kubectl."""

    def __init__(self, server: ApiServer, tmp_path: Path, *how: str) -> None:
        """Install Knative's ConfigMaps by `kubectl apply` with the options `how`."""
        self._server = server
        self._env = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "KUBECONFIG": str(server.kubeconfig(tmp_path / "kubeconfig")),
        }
        self._how = how
        self._names = [each["metadata"]["name"] for each in yaml.safe_load_all(OURS.read_text())]
        self._theirs = tmp_path / "knative.yaml"
        self.install(THEIRS)

    def install(self, data: dict[str, str]) -> None:
        """Apply the ConfigMaps as Knative's installation, or a newer version of it, does."""
        about = {"namespace": "knative-serving", "labels": LABELS}
        objects = [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about | {"name": name}, "data": data}
            for name in self._names
        ]
        self._theirs.write_text(yaml.safe_dump_all(objects))
        self.kubectl("apply", *self._how, "-f", str(self._theirs))

    def kubectl(self, *arguments: str) -> None:
        """Run kubectl without schema validation, since the server has no OpenAPI document."""
        more = ("--validate=false",) if "apply" in arguments else ()
        done = subprocess.run(
            ["kubectl", *arguments, *more], env=self._env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr

    def apply(self, lines: list[str]) -> None:
        """Run commands of the docs, limited to Knative's settings."""
        for line in lines:
            first, *arguments = shlex.split(line.replace("-k manifests/knative/base", f"-f {OURS}"))
            assert first == "kubectl"
            self.kubectl(*arguments)

    def kept(self) -> set[str]:
        """Return the foreign keys that all ConfigMaps still have. Fails if one of our values is missing."""
        found = {*THEIRS, *LABELS}
        for each in yaml.safe_load_all(OURS.read_text()):
            now = self._server.get("v1", "ConfigMap", each["metadata"]["name"], "knative-serving")
            assert each["data"].items() <= now["data"].items()
            found &= {*now["data"], *now["metadata"].get("labels", {})}
        return found


@pytest.mark.parametrize("how", [(), ("--server-side",)], ids=["client-side", "server-side"])
def test_apply_keeps_settings_of_others(how: tuple[str, ...], tmp_path: Path) -> None:
    """This holds for a second apply, and after another version of Knative."""
    with serving(tls=tmp_path) as server:
        place = Place(server, tmp_path, *how)
        assert len(_LINES) == 2, "one prepares, one applies"
        for _ in range(2):
            place.apply(_LINES)
            assert place.kept() == {*THEIRS, *LABELS}
        place.install(THEIRS | {"new": "1"})
        place.apply(_LINES)
        assert place.kept() == {*THEIRS, *LABELS}


@pytest.mark.parametrize(
    ("how", "number", "gone"),
    [
        pytest.param((), 1, "", id="without the annotation"),
        pytest.param(("--server-side",), 1, "--field-manager=kelvin-install", id="without the manager"),
    ],
)
def test_plain_apply_removes_settings_of_others(how: tuple[str, ...], number: int, gone: str, tmp_path: Path) -> None:
    """Control: without the annotation or the manager, a second apply removes them."""
    with serving(tls=tmp_path) as server:
        place = Place(server, tmp_path, *how)
        for _ in range(2):
            place.apply([_LINES[number].replace(gone, "")])
        assert place.kept() == set()


@pytest.mark.parametrize("objects", [crds(), *(knative(each) for each in ("base", "cache-agent", "kind"))])
def test_what_is_applied_apart_is_kept(objects: list[Json]) -> None:
    """It has the keep annotations of three tools and none of our labels, so no tool prunes it."""
    assert objects
    for each in objects:
        about = each["metadata"]
        assert KEEP_ANNOTATIONS.items() <= about["annotations"].items()
        assert "app.kubernetes.io/part-of" not in about.get("labels", {})
