"""What a run was asked for and has no figure of. Pure."""

import msgspec

Key = tuple[int, str, str]  # size in bytes, state, system


class Failed(msgspec.Struct, frozen=True):
    """What has no figure, and why: a system from a state, one at any size (not installed), or all of a size."""

    system: str
    reason: str
    size_bytes: int | None = None
    state: str | None = None


def failure_line(failed: Failed) -> str:
    """Return it as the text that a person reads."""
    where = [] if failed.size_bytes is None else [f"{failed.size_bytes / 1e9:.2f} GB"]
    where += [] if failed.state is None else [failed.state]
    return f"{failed.system}{' at ' if where else ''}{', '.join(where)}: {failed.reason}"
