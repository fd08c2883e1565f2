"""`kelvin fsck` says what is wrong and how to repair it. Its exit code shows whether it found anything."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result

from kelvin.cli.artifacts.progress import Progress
from kelvin.cli.artifacts.store_commands import fsck_command, read_findings, stream_check
from kelvin.contracts.artifacts.push_api import FsckBroken, FsckFinding, FsckProgress, FsckSummary
from kelvin.contracts.errors import Forbidden, Refused, Unavailable
from kelvin.contracts.problem import problem_details, to_wire
from kelvin.contracts.wire import encode
from tests.kelvin.cli.artifacts.test_push import Told
from tests.kelvin.cli_targets import SnapshotterTarget, push
from tests.snapshotter.house import TENANT, House, open_house, settings_for
from tests.snapshotter.models import Model


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with open_house(settings_for(tmp_path / "data")) as opened, opened.client() as client:
        push(Model().write(tmp_path / "model"), "toy", client, Progress())
        yield opened


def run(house: House, *arguments: str) -> Result:
    return CliRunner().invoke(fsck_command, arguments, obj=SnapshotterTarget(house))


def flip(house: House) -> Path:
    pack = next((house.store / TENANT / "packs").iterdir())
    raw = bytearray(pack.read_bytes())
    raw[100] ^= 1
    pack.write_bytes(raw)
    return pack


def test_clean_store_exits_with_0(house: House) -> None:
    """The exit code is 0, and the output has the numbers of checked objects."""
    result = run(house)
    assert result.exit_code == 0, result.output
    assert "1 versions, 2 packs" in result.stdout
    assert "no fault" in result.stdout


def test_fsck_finding_names_object_fault_and_mend(house: House) -> None:
    """A flipped bit gives exit code 1 and the object, the fault and the repair."""
    pack = flip(house)
    result = run(house)
    assert result.exit_code == 1
    assert f"{TENANT}/packs/{pack.name}: 1 of" in result.stdout
    assert "mend: delete it and" in result.stdout
    assert "2 faults" in result.stdout  # the pack, and the version that needs it


def test_fsck_json_has_the_same_facts(house: House) -> None:
    """The output is one JSON object with the same facts and exit code."""
    clean = run(house, "--json")
    assert clean.exit_code == 0
    assert json.loads(clean.stdout)["findings"] == []
    flip(house)
    found = run(house, "--json")
    assert found.exit_code == 1
    body = json.loads(found.stdout)
    assert body["summary"]["findings"] == len(body["findings"]) == 2


def test_tenants_are_apart(house: House) -> None:
    """Another tenant's check doesn't find it."""
    flip(house)
    with house.client("umbrella") as client:
        findings, summary = read_findings(stream_check(client), Progress())
    assert (findings, summary.packs) == ([], 0)


def test_fsck_progress_ends_at_its_total(house: House) -> None:
    progress = Told()
    with house.client() as client:
        _, summary = read_findings(stream_check(client), progress)
    assert progress.stages == [("checking", summary.checked_bytes)]
    assert progress.done == summary.checked_bytes


SUMMARY = FsckSummary(
    versions=0, unnamed_versions=0, packs=0, chunks=0, checked_bytes=0, unreferenced_chunks=0, unreferenced_bytes=0,
    findings=1, pushes_running=False,
)  # fmt: skip
BROKEN = FsckBroken(failure=to_wire(Unavailable("the object store")))


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        pytest.param(httpx.Response(403, content=problem_details(Forbidden("usage"))), "usage",
                     id="a refusal"),
        pytest.param(httpx.Response(302, content=b""), "fsck answered 302: is the URL Kelvin's", id="a login proxy"),
        pytest.param(httpx.Response(200, content=b""), "the end of the check", id="an empty answer"),
        pytest.param(httpx.Response(200, content=encode(FsckProgress(checked_bytes=1, total_bytes=2)) + b"\n"),
                     "the end of the check", id="an answer that was cut"),
        pytest.param(httpx.Response(200, content=encode(BROKEN)), "the object store is not", id="a store that fails"),
        pytest.param(httpx.Response(200, content=b"nonsense\n"), "a line of the check", id="no check at all"),
    ],
)  # fmt: skip
def test_check_without_summary_is_not_clean(answer: httpx.Response, want: str) -> None:
    """A response without a summary is an error."""
    transport = httpx.MockTransport(lambda request: answer)
    with httpx.Client(transport=transport, base_url="http://x") as client, pytest.raises(Refused, match=want):
        read_findings(stream_check(client), Progress())


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\u0085"])
def test_line_end_of_text_ends_no_line(end: str) -> None:
    """A finding may contain characters that Unicode counts as line ends. The response may arrive in any pieces."""
    finding = FsckFinding(key=f"acme/for{end}eign", fault="no object", mend="delete it")
    raw = encode(finding) + b"\n" + encode(SUMMARY) + b"\n"

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=(raw[at : at + 1] for at in range(len(raw))))

    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://x") as client:
        assert read_findings(stream_check(client), Progress()) == ([finding], SUMMARY)


def test_fsck_without_an_installation_is_a_refusal() -> None:
    """An unreachable installation is an error with a hint."""

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with (
        httpx.Client(transport=httpx.MockTransport(refuse), base_url="http://x") as client,
        pytest.raises(Refused, match=r"can't be reached at http://x: refused; is `kelvin up` running"),
    ):
        read_findings(stream_check(client), Progress())
