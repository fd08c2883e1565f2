"""The admin and push APIs answer only as documented, with any key and any input.

`KELVIN_TEST_EXAMPLES=200` tries more inputs.
"""

import contextlib
import copy
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest

from coldstart_bench.harness.installation import Installation, running_installation
from kelvin.cli.artifacts.push_source import scan
from kelvin.contracts.errors import Internal
from kelvin.contracts.problem import PROBLEM_CONTENT_TYPE, problem_details
from kelvin.contracts.wire import encode
from tests.consistency.api_conformance import Operation, drive, operations, with_examples
from tests.e2e.conftest import SETTINGS
from tests.e2e.installation_state import chunks

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1200)]

EXAMPLES: Final = int(os.environ.get("KELVIN_TEST_EXAMPLES", "3"))
DOCUMENTS: Final = ("/admin/v1/openapi.json", "/push/v1/openapi.json")
# Operations that succeed only in a sequence of calls or with matching bytes. Each has its own tests.
NEED_MORE: Final[set[Operation]] = {
    ("PUT", "/push/v1/plans/{plan_id}/chunks/{digest}"),
    ("POST", "/push/v1/plans/{plan_id}/attestations"),
    ("GET", "/push/v1/originals/{version}"),
    ("DELETE", "/admin/v1/models/{model}"),
    ("DELETE", "/admin/v1/models/{model}/versions/{version}"),
    ("DELETE", "/admin/v1/tenants/{tenant}"),
    ("POST", "/admin/v1/tenants/{tenant}/suspend"),
    ("POST", "/admin/v1/tenants/{tenant}/resume"),
    ("PUT", "/admin/v1/tenants/{tenant}/limits"),
    ("POST", "/admin/v1/cache/evict"),
    ("PUT", "/admin/v1/models/{model}/grants/{grantee}"),
    ("DELETE", "/admin/v1/models/{model}/grants/{grantee}"),
}


@contextlib.contextmanager
def _installed(data: Path, llama: Path, qwen2: Path) -> Iterator[Installation]:
    settings = {**SETTINGS, "KELVIN_DEVICE_SLOTS": "1"}
    with running_installation(data, settings=settings) as installation:
        installation.push(llama, "llama")
        installation.push(qwen2, "llama")  # a version without an alias
        yield installation


@pytest.fixture
def fresh(tmp_path: Path, llama: Path, qwen2: Path) -> Iterator[Installation]:
    """A separate installation, because the test stops, scales, suspends, revokes and deletes everything in it."""
    with _installed(tmp_path / "data", llama, qwen2) as installation:
        yield installation


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory, llama: Path, qwen2: Path) -> Iterator[Installation]:
    """An installation for tests that change nothing that another test needs."""
    with _installed(tmp_path_factory.mktemp("openapi") / "data", llama, qwen2) as installation:
        yield installation


@pytest.fixture(scope="module")
def described(ours: Installation, llama: Path) -> dict[str, Any]:
    return _described(ours, llama)


def _described(ours: Installation, llama: Path) -> dict[str, Any]:
    """Return both documents as served, with examples of things that exist."""
    documents = {path: ours.admin.request("GET", path) for path in DOCUMENTS}
    served = ours.model("llama")["version"]
    spare = next(each["version"] for each in ours.model("llama")["versions"] if each["version"] != served)
    keys = [ours.admin.request("POST", "/admin/v1/keys", {"name": name, "scopes": ["infer"]}) for name in ("a", "b")]
    ours.admin.request("POST", "/admin/v1/tenants", {"tenant": "there"})
    plan, digests = json.loads(encode(scan(llama).request("planned"))), chunks(ours, "llama")

    def planned(model: str) -> str:
        said = json.loads(encode(scan(llama).request(model)))
        return str(ours.admin.request("POST", "/push/v1/plans", said)["plan_id"])

    def pushed(model: str) -> str:
        missing = f"/push/v1/plans/{planned(model)}/missing"
        return str(ours.admin.request("POST", missing, {"digests": digests})["plan_id"])

    parameters = {
        "model": "llama", "version": spare, "month": "2020-01", "digest": digests[0], "plan_id": pushed("pushed"),
        "POST /push/v1/plans/{plan_id}/missing plan_id": planned("planned"),
        "POST /push/v1/plans/{plan_id}/commit plan_id": pushed("committed"),  # a committed plan no longer exists
        "POST /admin/v1/keys/{key_id}/rotate key_id": keys[0]["key"]["key_id"],
        "POST /admin/v1/keys/{key_id}/revoke key_id": keys[1]["key"]["key_id"],
        "DELETE /admin/v1/models/{model} model": "planned",
        "DELETE /admin/v1/tenants/{tenant} tenant": "there",
        "PUT /admin/v1/models/{model}/grants/{grantee} grantee": "there",
        "DELETE /admin/v1/models/{model}/grants/{grantee} grantee": "there",
        "PUT /admin/v1/tenants/{tenant}/limits tenant": "there",
        "POST /admin/v1/tenants/{tenant}/suspend tenant": "there",
        "POST /admin/v1/tenants/{tenant}/resume tenant": "there",
    }  # fmt: skip
    bodies: dict[Operation, Any] = {
        ("POST", "/admin/v1/models/{model}/deploy"): {"version": served},
        ("PUT", "/admin/v1/models/{model}/scale"): {"max": 1},
        ("PUT", "/admin/v1/models/{model}/ladder"): {"steps": [{"step": "cap-output", "tokens": 8}]},
        ("PUT", "/admin/v1/models/{model}/split"): {"weights": {}},  # the spare version may be deleted by then
        ("POST", "/admin/v1/cache/evict"): {"tier": "nvme"},
        ("POST", "/admin/v1/tenants"): {"tenant": "made"},
        ("PUT", "/admin/v1/tenants/{tenant}/limits"): {"requests": 8},
        ("POST", "/admin/v1/keys"): {"name": "made", "scopes": ["push"]},
        ("POST", "/admin/v1/keys/{key_id}/rotate"): {"overlap_s": 60},
        ("POST", "/admin/v1/billing/close"): {"month": "2020-01"},
        ("POST", "/push/v1/plans"): plan,
        ("POST", "/push/v1/plans/{plan_id}/missing"): {"digests": digests},
        ("POST", "/push/v1/plans/{plan_id}/commit"): {"digests": digests},
        ("POST", "/push/v1/collect"): {"run": True},
    }
    return {path: with_examples(document, parameters, bodies) for path, document in documents.items()}


def url_of(kelvin: Installation) -> str:
    return f"https://localhost:{kelvin.port}"


def _key(kelvin: Installation) -> str:
    return (kelvin.data / "admin.key").read_text().strip()


def test_operator_gets_documented_answers(fresh: Installation, llama: Path, tmp_path: Path) -> None:
    """Each admin answer is documented and below 500, and each operation succeeds at least once."""
    _meets_what_is_documented(fresh, _described(fresh, llama)[DOCUMENTS[0]], tmp_path)


def test_pusher_gets_documented_answers(ours: Installation, described: dict[str, Any], tmp_path: Path) -> None:
    """Each push answer is documented and below 500. The test only creates plans."""
    _meets_what_is_documented(ours, described[DOCUMENTS[1]], tmp_path)


def _meets_what_is_documented(kelvin: Installation, document: Any, scratch: Path) -> None:
    verdict = drive(
        url_of(kelvin),
        kelvin.data / "ca.pem",
        document,
        scratch,
        _key(kelvin),
        examples=EXAMPLES,
        phases="examples,fuzzing",
    )
    assert verdict.sound, verdict.said
    worked = {each for each, statuses in verdict.statuses.items() if any(200 <= status < 300 for status in statuses)}
    assert operations(document) - worked <= NEED_MORE


@pytest.mark.parametrize("path", DOCUMENTS)
def test_call_without_a_key_gets_only_401(
    ours: Installation, described: dict[str, Any], path: str, tmp_path: Path
) -> None:
    """Without a key, every operation answers 401, or 404 for an unknown path."""
    verdict = drive(
        url_of(ours), ours.data / "ca.pem", described[path], tmp_path, None, examples=2, phases="examples,fuzzing"
    )
    assert verdict.sound, verdict.said
    assert operations(described[path]) <= verdict.statuses.keys()
    assert set().union(*verdict.statuses.values()) <= {401, 404}


def _without_an_answer(document: Any) -> None:
    del document["paths"]["/admin/v1/tenants"]["get"]["responses"]["200"]


def _of_another_type(document: Any) -> None:
    document["components"]["schemas"]["TenantStatus"]["properties"]["state"] = {"type": "integer"}


def _of_another_form(document: Any) -> None:
    content = document["paths"]["/admin/v1/tenants"]["get"]["responses"]["200"]["content"]
    content["application/problem+json"] = content.pop("application/json")


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        pytest.param(_without_an_answer, "Undocumented status code", id="a status that is not documented"),
        pytest.param(_of_another_type, "Response violates schema", id="a member of another type"),
        pytest.param(_of_another_form, "Undocumented Content-Type", id="an answer of another form"),
    ],
)
def test_control(ours: Installation, described: dict[str, Any], tmp_path: Path, plant: Any, found: str) -> None:
    """Negative control: a document that differs from the answers fails the run."""
    document = copy.deepcopy(described[DOCUMENTS[0]])
    plant(document)
    verdict = drive(
        url_of(ours),
        ours.data / "ca.pem",
        document,
        tmp_path,
        _key(ours),
        examples=3,
        phases="fuzzing",
        only="/admin/v1/tenants",
    )
    assert not verdict.sound
    assert found in verdict.said


class _Failing(BaseHTTPRequestHandler):
    """Answers every GET with a documented 500."""

    def do_GET(self) -> None:
        body = problem_details(Internal())
        self.send_response(500)
        self.send_header("content-type", PROBLEM_CONTENT_TYPE)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_control_of_failures(ours: Installation, described: dict[str, Any], tmp_path: Path) -> None:
    """Negative control: a 500 fails the run even where it is documented."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Failing) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            verdict = drive(
                url, ours.data / "ca.pem", described[DOCUMENTS[0]], tmp_path, None, examples=2,
                phases="fuzzing", only="/admin/v1/models/{model}",
            )  # fmt: skip
        finally:
            server.shutdown()
            serving.join()
    assert not verdict.sound
    assert "Server error" in verdict.said
