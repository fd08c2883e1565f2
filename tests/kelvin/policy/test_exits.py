"""The exit code says whom to ask: the operator, the caller, the model's owner."""

import pytest

from contracts.artifact_errors import ArtifactRejected, ProbeFailed, StorageQuotaExceeded
from contracts.errors import CapacityExceeded, Failure, Forbidden, InvalidRequest, Unauthenticated, Unavailable
from contracts.problem import from_wire, to_wire
from kelvin.policy.exits import Exit, exit_of


@pytest.mark.parametrize(
    ("failure", "want"),
    [
        pytest.param(Unavailable("the installation"), Exit.FAILED, id="unreachable"),
        pytest.param(Unauthenticated(), Exit.FAILED, id="an unknown key"),
        pytest.param(Forbidden("admin"), Exit.FAILED, id="a key that may not"),
        pytest.param(ArtifactRejected("x.pt", "pickles"), Exit.ARTIFACT, id="what may not enter"),
        pytest.param(ProbeFailed("0" * 64, "no"), Exit.ARTIFACT, id="what does not compute"),
        pytest.param(StorageQuotaExceeded(1, 2, 2), Exit.ROOM, id="the quota"),
        pytest.param(CapacityExceeded("bytes", 2, 1), Exit.ROOM, id="the disk"),
    ],
)
def test_exit(failure: Failure, want: Exit) -> None:
    """The same for a failure that came over the wire."""
    assert exit_of(failure) is want
    assert exit_of(from_wire(to_wire(failure))) is want


def test_an_argument() -> None:
    """Found here it is wrong usage; what the installation calls invalid is ours to mend, not the caller's."""
    wrong = InvalidRequest("model", "No Label", "must be a DNS label")
    assert exit_of(wrong) is Exit.USAGE
    assert exit_of(from_wire(to_wire(wrong))) is Exit.FAILED
