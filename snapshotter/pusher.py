"""With which key a commit was asked for: it goes with the context of the task that runs it, as `service.cause` does.

Not a part of the plan, whose name is the digest of what it says, whoever sent it.
"""

from contextvars import ContextVar

_key_id: ContextVar[str] = ContextVar("pushed_by", default="")


def asked_with(key_id: str) -> None:
    """What this task, and those that it starts, are asked for is asked with that key."""
    _key_id.set(key_id)


def pushed_by() -> str:
    """The key's id; empty where no one asked."""
    return _key_id.get()
