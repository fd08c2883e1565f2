"""`kelvin models restart`: every replica of a model is replaced by a new one; no request fails for it."""

import json
import time
from typing import Any, Final

import click
import httpx

from kelvin.client import DoorClosed, json_of, target

POLL_S: Final = 0.2
UNAVAILABLE: Final = 503
AWAY_S: Final = 60.0  # for the control plane, which may be restarted meanwhile


@click.command("restart")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print the API's last answer as it is, and no progress.")
def restart_command(model: str, as_json: bool) -> None:
    """Replace all replicas of a model by new ones, one after another, under load; returns when the old ones are gone.

    A new one serves before the old one is drained, where a device slot is free; else callers wait in between. An
    interrupted command leaves the order as it is.
    """
    path = f"/admin/v1/models/{model}/restart"
    with target().door() as door:
        ordered = found = json_of(door.post(path))
        shown = _show(None, found, as_json)
        while found["state"] == "running":
            time.sleep(POLL_S)
            found = _asked(door, path)
            if found["order"] != ordered["order"]:
                raise DoorClosed(f"{model}: the order ended with its control plane, {_count(shown)}; order it again")
            shown = _show(shown, found, as_json)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    if found["state"] == "failed":
        raise DoorClosed(f"{model}: {found['reason']}; {_count(found)}")
    if not as_json:
        click.echo(f"{model}: restarted, {_count(found)}")


def _asked(door: httpx.Client, path: str) -> dict[str, Any]:
    """How it goes. Without a control plane it is asked again for a while. Raises DoorClosed."""
    limit = time.monotonic() + AWAY_S
    while True:
        try:
            answer: dict[str, Any] = json_of(door.get(path))
        except (DoorClosed, httpx.TransportError) as error:
            if getattr(error, "status", UNAVAILABLE) != UNAVAILABLE or time.monotonic() > limit:
                raise
            time.sleep(POLL_S)
        else:
            return answer


def _show(before: dict[str, Any] | None, found: dict[str, Any], as_json: bool) -> dict[str, Any]:
    """A line for each replica that was replaced."""
    if not as_json and found["replaced"] and (before is None or found["replaced"] != before["replaced"]):
        click.echo(_count(found))
    return found


def _count(found: dict[str, Any]) -> str:
    return f"{found['replaced']} of {found['replicas']} replicas replaced"
