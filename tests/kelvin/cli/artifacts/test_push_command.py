"""`kelvin push` as a caller sees it: output in text and JSON, and exit codes."""

import json
from pathlib import Path
from typing import Any

import certifi
import httpx
import pytest
from click.testing import CliRunner, Result

from kelvin.cli.artifacts.push_command import push_command
from kelvin.cli.base.api_client import Target
from kelvin.contracts.artifact_errors import ProbeFailed
from kelvin.contracts.errors import Forbidden
from kelvin.contracts.serving.control_messages import StartProblem
from tests.kelvin.cli_targets import SnapshotterTarget, installation_answering
from tests.snapshotter.control import UNSERVED
from tests.snapshotter.house import TENANT, House, open_house, settings_for
from tests.snapshotter.models import Model, default_config
from tests.snapshotter.reader import versions_of


def run(house: House, *arguments: str) -> Result:
    return CliRunner().invoke(push_command, arguments, obj=SnapshotterTarget(house))


def test_push_prints_the_version_last(house: House, tmp_path: Path) -> None:
    """The last line of standard output is the version. Files left out are on standard error, and there is no bar."""
    directory = Model().write(tmp_path / "model")
    first = run(house, str(directory), "--name", "toy")
    assert first.exit_code == 0, first.output
    (version,) = versions_of(house.store, TENANT)
    assert first.stdout.splitlines()[-1] == version
    assert "a new version" in first.stdout
    assert first.stderr == "left out: README.md\n"
    assert "this version was there already" in run(house, str(directory), "--name", "toy").stdout


def test_push_json_is_one_object(house: House, tmp_path: Path) -> None:
    """Success and refusal each print one JSON object and have their own exit code."""
    directory = Model().write(tmp_path / "model")
    good = run(house, str(directory), "--name", "toy", "--json")
    assert good.exit_code == 0
    found = json.loads(good.stdout)
    assert found["version"] == versions_of(house.store, TENANT)[0]
    assert (found["created"], found["ignored"]) == (True, ["README.md"])
    (directory / "x.pt").write_bytes(b"")
    bad = run(house, str(directory), "--name", "toy", "--json")
    assert bad.exit_code == 3
    error = json.loads(bad.stdout)["error"]
    assert (error["code"], error["param"]) == ("artifact_rejected", "x.pt")


def test_push_says_that_the_version_cannot_start_yet(house: House, tmp_path: Path) -> None:
    """The control plane's reason is printed with the version, as text or as a JSON field. The push succeeds all the
    same. Without a reason, nothing is printed."""
    directory, lacking = (
        str(Model().write(tmp_path / "model")),
        "the namespace kelvin-acme lacks the secret kelvin-store",
    )
    house.control.start_problem = StartProblem("missing_secret", lacking)
    done = run(house, directory, "--name", "toy")
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[-1] == f"the version can't start yet: {lacking}"
    assert [done.stdout.splitlines()[-1]] == versions_of(house.store, TENANT)
    again = run(house, directory, "--name", "toy", "--json")
    assert json.loads(again.stdout)["start_problem"] == lacking
    house.control.start_problem = None
    assert "can't start" not in run(house, directory, "--name", "toy").output
    assert "start_problem" not in json.loads(run(house, directory, "--name", "toy", "--json").stdout)


def in_json(house: House, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = run(house, *arguments, "--json")
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return done.exit_code, found


def test_json_is_complete(house: House, tmp_path: Path) -> None:
    """A dry run, a push and a repeated push print exactly the fields that `docs/api.md` names."""
    directory = str(Model().write(tmp_path / "model"))
    code, dry = in_json(house, directory, "--name", "toy", "--dry-run")
    assert code == 0
    code, first = in_json(house, directory, "--name", "toy")
    assert code == 0
    (version,) = versions_of(house.store, TENANT)
    total = first["total_bytes"]
    missing = {"missing_chunks": first["sent_chunks"], "missing_bytes": first["sent_bytes"]}
    common = {"model": "toy", "version": version, "total_bytes": total, "ignored": ["README.md"]}
    assert dry == {"dry_run": True, "exists": False, **common, **missing}
    assert 0 < first["sent_bytes"] < total  # small files are part of the plan request
    assert first == {
        "dry_run": False, "created": True, "new_chunks": first["new_chunks"], "sent_chunks": first["sent_chunks"],
        "sent_bytes": first["sent_bytes"], **common,
    }  # fmt: skip
    _, again = in_json(house, directory, "--name", "toy")
    assert again == {**first, "created": False, "new_chunks": 0, "sent_chunks": 0, "sent_bytes": 0}
    _, dry_again = in_json(house, directory, "--name", "toy", "--dry-run")
    assert dry_again == {**dry, "exists": True, "missing_chunks": 0, "missing_bytes": 0}


def test_a_dry_run_leaves_nothing(house: House, tmp_path: Path) -> None:
    """A dry run changes neither store nor staging. It prints a sentence and then the version."""
    directory = Model().write(tmp_path / "model")
    done = run(house, str(directory), "--name", "toy", "--dry-run")
    assert done.exit_code == 0
    what, version = done.stdout.splitlines()
    assert what.startswith("toy: would be a new version; 4 chunks, ")
    assert {path.name for path in house.data.rglob("*") if path.is_file()} == {"attest.key", "attest.pub"}
    assert run(house, str(directory), "--name", "toy").stdout.splitlines()[-1] == version
    assert "this version is there already" in run(house, str(directory), "--name", "toy", "--dry-run").stdout


@pytest.mark.parametrize("body", [b"<html>", b'{"plan_id": 3}'])
def test_answer_of_another_server_is_not_wrong_usage(tmp_path: Path, body: bytes) -> None:
    """A proxy or an installation of another release replied with 200, so the exit code isn't that of wrong usage."""
    directory = Model().write(tmp_path / "model")
    answer = httpx.Response(200, content=body)
    done = CliRunner().invoke(
        push_command, [str(directory), "--name", "toy", "--json"], obj=installation_answering(answer)
    )
    error = json.loads(done.stdout)["error"]
    assert (done.exit_code, error["code"]) == (1, "unavailable")
    assert error["message"].endswith("is the URL Kelvin's?")


@pytest.mark.parametrize("what", ["ca", "key"])
def test_unreadable_file_is_a_json_error(tmp_path: Path, what: str) -> None:
    """The CA file or the key file is a directory."""
    (tmp_path / "admin.key").write_text("kv_x\n")
    ca, key = Path(certifi.where()), tmp_path / "admin.key"
    target = Target(tmp_path, ca=tmp_path, key=key) if what == "ca" else Target(tmp_path, ca=ca, key=tmp_path)
    done = CliRunner().invoke(push_command, [str(tmp_path), "--name", "toy", "--json"], obj=target)
    assert (done.exit_code, json.loads(done.stdout)["error"]["code"]) == (1, "unavailable"), done.output


def test_limits(house: House, tmp_path: Path) -> None:
    """One sender and a rate limit give the same push."""
    directory = Model().write(tmp_path / "model")
    done = run(house, str(directory), "--name", "toy", "--parallel", "1", "--limit-rate", "10M")
    assert done.exit_code == 0, done.output
    assert [done.stdout.splitlines()[-1]] == versions_of(house.store, TENANT)


@pytest.mark.deep
@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("case", "exit_code", "code"),
    [
        pytest.param("unknown option", 2, None, id="an unknown option"),
        pytest.param("rate", 2, None, id="an invalid rate"),
        pytest.param("parallel", 2, None, id="no senders"),
        pytest.param("no name", 2, None, id="no model"),
        pytest.param("name", 2, "invalid_request", id="an invalid model name"),
        pytest.param("directory", 2, "invalid_request", id="a missing directory"),
        pytest.param("pickle", 3, "artifact_rejected", id="a pickle"),
        pytest.param("architecture", 3, "artifact_rejected", id="an architecture that the gate refuses"),
        pytest.param("probe", 3, "probe_failed", id="a model that can't be sealed"),
        pytest.param("quota", 4, "storage_quota_exceeded", id="the quota"),
        pytest.param("scope", 1, "insufficient_scope", id="a key without the scope"),
        pytest.param("nowhere", 1, "unavailable", id="no installation"),
    ],
)
def test_push_exit_codes_are_as_documented(
    tmp_path: Path, case: str, exit_code: int, code: str | None, as_json: bool
) -> None:
    """Exit codes are those of `docs/api.md`. With `--json` failures are objects, except for click's own errors."""
    quota = 0 if case == "quota" else 1 << 30
    with open_house(settings_for(tmp_path / "data", tenant_store_bytes=quota)) as house:
        model = Model(
            config=default_config() | ({"architectures": [UNSERVED]} if case == "architecture" else {}),
            more={"x.pt": b""} if case == "pickle" else {},
        )
        arguments = [str(model.write(tmp_path / "model")), "--name", "toy"]
        arguments += {
            "unknown option": ["--fast"], "rate": ["--limit-rate", "fast"], "parallel": ["--parallel", "0"],
        }.get(case, [])  # fmt: skip
        match case:
            case "no name":
                arguments = arguments[:1]
            case "name":
                arguments[2] = "No Label"
            case "directory":
                arguments[0] = str(tmp_path / "nothing")
            case "probe":
                house.control.failures = {"seal": [ProbeFailed("0" * 64, "no")]}
            case "scope":
                house.control.failures = {"gate": [Forbidden("admin")]}
        client: object = Target(tmp_path / "nowhere") if case == "nowhere" else SnapshotterTarget(house)
        done = CliRunner().invoke(push_command, [*arguments, *(["--json"] if as_json else [])], obj=client)
    assert done.exit_code == exit_code, done.output
    if code is None:
        assert done.stderr
    elif as_json:
        assert done.stderr == ""
        error = json.loads(done.stdout)["error"]
        assert set(error) == {"code", "status", "message", "param", "retryable", "retry_after_s"}
        assert error["code"] == code
    else:
        assert done.stdout == ""
        assert done.stderr.startswith("Error: ")
