"""The images hold what is needed, installed as it was tested, and run as nobody. Only their text is looked at here."""

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
    """By the rules below, each of which is seen to go red."""
    assert list(problems(TEXT, TARGETS)) == []


@pytest.mark.parametrize(
    ("harm", "by", "said"),
    [
        pytest.param("USER 65532:65532", "USER root", "cpu: runs as ['root']", id="root"),
        pytest.param("USER 65532:65532\n", "", "cpu: runs as []", id="whoever the base says"),
        pytest.param("python:3.11-slim-bookworm\n", "python:latest\n", "the base has no version", id="latest"),
        pytest.param("FROM final AS cpu", "FROM debian AS cpu", "cpu: another base", id="a base that nobody chose"),
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
def test_broken_dockerfile_rule_is_found(harm: str, by: str, said: str) -> None:
    """Each rule, by an image that breaks it."""
    assert harm in TEXT
    assert [each for each in problems(TEXT.replace(harm, by), TARGETS) if each.startswith(said)]


def test_image_extras_are_known_and_minimal() -> None:
    """Each is one of the project's; what computes is in no image of the control plane's."""
    stages = stages_of(TEXT)
    assert extras_of(stages) <= PROJECT["project"]["optional-dependencies"].keys()
    control = extras_of({"build-control": stages["build-control"]})
    assert not {"runtime", "onnx"} & control
    assert {"s3", "redis", "postgres", "cluster"} <= control  # what the base's settings need
    assert {"build-control", "build-cpu", "build-cuda"} <= stages.keys()
    assert [stage.name for stage in lineage(stages, "cpu")] == ["final", "cpu"]


def test_image_user_is_the_pods_user() -> None:
    """The user of the image is the one that pods of the manifests are."""
    for pod in filter(None, map(pod_of, of_base())):
        given = pod["securityContext"]
        assert f"{given['runAsUser']}:{given['runAsGroup']}" == USER
    assert all(each["volumeMounts"][0]["mountPath"] == "/var/lib/kelvin" for each in containers(of_base()))


def _is_sent(path: str) -> bool:
    """Whether a build sees a file: the last pattern that is for it, or for a folder of it, decides."""
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
        pytest.param("pyproject.toml", True, id="what it is"),
        pytest.param("constraints.txt", True, id="versions"),
        pytest.param("kelvin/__pycache__/main.pyc", False, id="what was compiled elsewhere"),
        pytest.param(".git/config", False, id="history"),
        pytest.param(".venv/bin/python", False, id="another environment"),
        pytest.param("tests/conftest.py", False, id="tests"),
        pytest.param("manifests/base/kustomization.yaml", False, id="manifests"),
        pytest.param("admin.key", False, id="a secret that lies about"),
    ],
)  # fmt: skip
def test_build_context_holds_packages_alone(path: str, sent: bool) -> None:
    """Packages and what installs them, nothing else."""
    assert _is_sent(path) is sent


def test_no_image_names_devices() -> None:
    """An image that names all of them gives each to every pod of its node, whoever asked for none."""
    assert "NVIDIA_VISIBLE_DEVICES" not in (ROOT / "Dockerfile").read_text()
