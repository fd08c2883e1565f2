"""What the exit code of a push says: whom to ask, and whether to repeat it. Documented in `docs/api.md`."""

from enum import IntEnum

from kelvin.contracts.errors import Failure, InvalidRequest


class PushExitCode(IntEnum):
    """0 is success."""

    FAILED = 1  # unreachable, not allowed, given up: the same command may succeed later
    USAGE = 2  # as click does: the command itself is wrong
    ARTIFACT = 3  # what the directory holds may not be served, now or later
    ROOM = 4  # no room: the tenant's quota, a version's limit, the disk


_BY_CODE = {
    "artifact_rejected": PushExitCode.ARTIFACT,
    "probe_failed": PushExitCode.ARTIFACT,
    "version_unverified": PushExitCode.ARTIFACT,
    "capacity_exceeded": PushExitCode.ROOM,
    "storage_quota_exceeded": PushExitCode.ROOM,
}


def exit_code_of(failure: Failure) -> PushExitCode:
    """The code that a push ends with. An InvalidRequest of our own names an argument."""
    if isinstance(failure, InvalidRequest):
        return PushExitCode.USAGE
    return _BY_CODE.get(failure.code, PushExitCode.FAILED)
