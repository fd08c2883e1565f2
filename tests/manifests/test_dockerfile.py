"""The images have what is needed, pinned as tested, and run without root. Only the text of the Dockerfile is
checked.
"""

import fnmatch
import tomllib

import pytest

from tests.manifests.dockerfile import USER, extras_of, lineage, problems, stages_of
from tests.manifests.kustomize_build import ROOT, containers, of_base, pod_of

TEXT = (ROOT / "Dockerfile").read_text()
TARGETS = ("control", "cpu", "cuda")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

PACKAGES = [each.rstrip("*") for each in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]]


def test_dockerfile_breaks_no_rule() -> None:
    """The test below breaks each rule."""
    assert list(problems(TEXT, TARGETS)) == []


@pytest.mark.parametrize(
    ("harm", "by", "expected"),
    [
        pytest.param("USER 65532:65532", "USER root", "cpu: runs as ['root']", id="root"),
        pytest.param("USER 65532:65532\n", "", "cpu: runs as []", id="the user of the base"),
        pytest.param("python:3.11-slim-bookworm\n", "python:latest\n", "the base has no version", id="latest"),
        pytest.param("FROM final AS cpu", "FROM debian AS cpu", "cpu: another base", id="another base"),
        pytest.param("FROM final AS cpu", "FROM build-cpu AS cpu", "cpu: has what only a build needs", id="pip inside"),
        pytest.param("&& useradd", "&& apt-get install gcc && useradd", "cpu: has apt-get", id="a compiler inside"),
        pytest.param(
            " --constraint constraints.txt", "", "build-cpu: installs whatever is newest", id="no constraints"
        ),
        pytest.param("unchecked-hash /opt", "timestamp /opt", "build-cuda: compiles at each start", id="stale files"),
        pytest.param("--from=build-cpu", "--from=build-gpu", "cpu: copies from nowhere", id="no such stage"),
        pytest.param("COPY --from=build-cpu /opt/kelvin", "COPY .", "cpu: has sources", id="sources"),
        pytest.param('ENTRYPOINT ["kelvin"]', 'ENTRYPOINT ["sh"]', "cuda: begins with", id="a shell"),
    ],
)
def test_broken_dockerfile_rule_is_found(harm: str, by: str, expected: str) -> None:
    assert harm in TEXT
    assert [each for each in problems(TEXT.replace(harm, by), TARGETS) if each.startswith(expected)]


def test_image_extras_are_known_and_minimal() -> None:
    """Every extra is one of the project's. The control plane's image has no compute libraries."""
    stages = stages_of(TEXT)
    assert extras_of(stages) <= PROJECT["project"]["optional-dependencies"].keys()
    control = extras_of({"build-control": stages["build-control"]})
    assert not {"runtime", "onnx"} & control
    assert {"s3", "redis", "postgres", "cluster"} <= control  # the base's settings need these
    assert {"build-control", "build-cpu", "build-cuda"} <= stages.keys()
    assert [stage.name for stage in lineage(stages, "cpu")] == ["final", "cpu"]


def test_image_user_is_the_pods_user() -> None:
    for pod in filter(None, map(pod_of, of_base())):
        given = pod["securityContext"]
        assert f"{given['runAsUser']}:{given['runAsGroup']}" == USER
    assert all(each["volumeMounts"][0]["mountPath"] == "/var/lib/kelvin" for each in containers(of_base()))


def _is_sent(path: str) -> bool:
    """Return whether a build sees the file: the last pattern that matches it or one of its folders decides."""
    sent = True
    parts = path.split("/")
    above = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#"):
            names = parts if pattern.startswith("**/") else above
            if any(fnmatch.fnmatchcase(name, pattern.removeprefix("**/")) for name in names):
                sent = line.startswith("!")
    return sent


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        *(pytest.param(f"{each}/__init__.py", True, id=each) for each in PACKAGES),
        pytest.param("pyproject.toml", True, id="the project file"),
        pytest.param("constraints.txt", True, id="the pinned versions"),
        pytest.param("kelvin/__pycache__/main.pyc", False, id="compiled files"),
        pytest.param(".git/config", False, id="history"),
        pytest.param(".venv/bin/python", False, id="another environment"),
        pytest.param("tests/conftest.py", False, id="tests"),
        pytest.param("manifests/base/kustomization.yaml", False, id="manifests"),
        pytest.param("admin.key", False, id="a secret in the folder"),
    ],
)  # fmt: skip
def test_build_context_holds_packages_alone(path: str, sent: bool) -> None:
    """It has the packages and the files that install them."""
    assert _is_sent(path) is sent


def test_no_image_names_devices() -> None:
    """An image that names all devices gives them to every pod on its node."""
    assert "NVIDIA_VISIBLE_DEVICES" not in (ROOT / "Dockerfile").read_text()
