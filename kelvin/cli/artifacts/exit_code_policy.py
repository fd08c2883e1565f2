"""Choose the exit code of a push. It says who can fix a failure, and whether to retry. See `docs/api.md`."""

from enum import IntEnum

from kelvin.contracts.errors import Failure, InvalidRequest


class PushExitCode(IntEnum):
    """Exit codes of a failed push. Success is 0."""

    FAILED = 1  # unreachable, not allowed, or given up: the same command may succeed later
    USAGE = 2  # wrong arguments; click uses the same code
    ARTIFACT = 3  # the content of the directory is refused: retrying does not help
    ROOM = 4  # no space: the tenant's quota, a version's limit, the disk


_BY_CODE = {
    "artifact_rejected": PushExitCode.ARTIFACT,
    "probe_failed": PushExitCode.ARTIFACT,
    "version_unverified": PushExitCode.ARTIFACT,
    "capacity_exceeded": PushExitCode.ROOM,
    "storage_quota_exceeded": PushExitCode.ROOM,
}


def exit_code_of(failure: Failure) -> PushExitCode:
    """Return the exit code for a failure. An InvalidRequest raised by the command itself names a wrong argument."""
    if isinstance(failure, InvalidRequest):
        return PushExitCode.USAGE
    return _BY_CODE.get(failure.code, PushExitCode.FAILED)
