"""A push's exit code shows who can fix the failure: the operator, the caller or the model's owner."""

import pytest

from kelvin.cli.artifacts.exit_code_policy import PushExitCode, exit_code_of
from kelvin.contracts.artifact_errors import ArtifactRejected, ProbeFailed, StorageQuotaExceeded
from kelvin.contracts.errors import CapacityExceeded, Failure, Forbidden, InvalidRequest, Unauthenticated, Unavailable
from kelvin.contracts.problem import from_wire, to_wire


@pytest.mark.parametrize(
    ("failure", "want"),
    [
        pytest.param(Unavailable("the installation"), PushExitCode.FAILED, id="unreachable"),
        pytest.param(Unauthenticated(), PushExitCode.FAILED, id="an unknown key"),
        pytest.param(Forbidden("admin"), PushExitCode.FAILED, id="a key without the scope"),
        pytest.param(ArtifactRejected("x.pt", "pickles"), PushExitCode.ARTIFACT, id="a rejected artifact"),
        pytest.param(ProbeFailed("0" * 64, "no"), PushExitCode.ARTIFACT, id="a failed probe"),
        pytest.param(StorageQuotaExceeded(1, 2, 2), PushExitCode.ROOM, id="the quota"),
        pytest.param(CapacityExceeded("bytes", 2, 1), PushExitCode.ROOM, id="the disk"),
    ],
)
def test_push_exit_code_follows_the_failure(failure: Failure, want: PushExitCode) -> None:
    """A failure received over HTTP has the same exit code."""
    assert exit_code_of(failure) is want
    assert exit_code_of(from_wire(to_wire(failure))) is want


def test_local_invalid_request_is_wrong_usage() -> None:
    """The caller's invalid request is wrong usage. One that the installation reports was made by the CLI."""
    wrong = InvalidRequest("model", "No Label", "must be a DNS label")
    assert exit_code_of(wrong) is PushExitCode.USAGE
    assert exit_code_of(from_wire(to_wire(wrong))) is PushExitCode.FAILED
