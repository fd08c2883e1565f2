"""Tell why a version does not start, as one typed fact for status, the feed and the caller's error."""

from signal import Signals

from kelvin.contracts.errors import Failure
from kelvin.contracts.serving.control_messages import StartProblem
from kelvin.contracts.traffic_errors import StartFailed


def problem_from_failure(failure: Failure) -> StartProblem:
    """Return the start problem of a failed start. A failure without a start reason gives `failed` with its code."""
    if isinstance(failure, StartFailed):
        return StartProblem(reason=failure.reason, message=failure.message, exit_status=failure.exit_status)
    return StartProblem(reason="failed", message=f"{failure.code}: {failure.message}")


def crash_loop(exit_status: int | None = None) -> StartFailed:
    """Return the failure of a version whose processes keep ending while they start."""
    why = "its process ended each time it was started"
    if exit_status is not None:
        why += f", the last time {_describe_exit(exit_status)}"
    return StartFailed(why, "crash_loop", exit_status)


def no_room(slots: int) -> StartProblem:
    """Return the problem of a version that needs a device slot while all of them are taken."""
    why = f"all {slots} device slots of this machine are taken; it starts when one comes free"
    return StartProblem(reason="no_room", message=StartFailed(why, "no_room").message)


def _describe_exit(exit_status: int) -> str:
    """Describe an exit status as in `Popen.returncode`: negative is a signal."""
    if exit_status >= 0:
        return f"with exit status {exit_status}"
    try:
        return f"by signal {-exit_status} ({Signals(-exit_status).name})"
    except ValueError:
        return f"by signal {-exit_status}"
