"""Why a pod of a Revision's spec would be refused: Knative asks the API server that on a dry run of a Service.

From the nine rows of webhook_dry_run_differs: without `dryRun` all of those are created, and fail later.
"""

import re
import secrets
from collections.abc import Callable, Iterator
from typing import Final

from tests.cluster.answers import Json
from tests.cluster.objects import LABEL, LABEL_RULE
from tests.cluster.quantities import amount

POLICIES: Final = ("Always", "IfNotPresent", "Never")
STANDARD: Final = ("cpu", "memory", "ephemeral-storage")


def dry_run_pod(spec: Json, namespace: str, has_account: Callable[[str, str], bool]) -> str:
    """Why not; "" if it would be created."""
    account = spec.get("serviceAccountName") or "default"
    if account != "default" and not has_account(namespace, account):
        why = f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
        return f'pods "dry-run-validation" is forbidden: {why}'
    if runtime := spec.get("runtimeClassName"):
        return f'pods "dry-run-validation" is forbidden: pod rejected: RuntimeClass "{runtime}" not found'
    each_at = [(each, f"spec.containers[{index}]") for index, each in enumerate(spec["containers"])]
    faults = [fault for each, at in each_at for fault in _container(each, at)]
    if not faults:
        return ""
    suffix = "".join(secrets.choice("bcdfghjklmnpqrstvwxz2456789") for _ in range(5))
    shown = faults[0] if len(faults) == 1 else f"[{', '.join(faults)}]"
    return f'Pod "dry-run-validation{suffix}" is invalid: {shown}'


def _container(container: Json, at: str) -> Iterator[str]:
    name = container["name"]
    if not re.fullmatch(LABEL, name):
        yield f'{at}.name: Invalid value: "{name}": {LABEL_RULE}'
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    requests = limits | (resources.get("requests") or {})  # what is limited is requested
    for where, given in (("limits", limits), ("requests", requests)):
        for resource, value in given.items():
            yield from _resource(resource, value, f"{at}.resources.{where}")
    for resource in resources.get("requests") or {}:
        yield from _against(resource, resources["requests"][resource], limits.get(resource), f"{at}.resources")
    startup = container.get("startupProbe") or {}
    for handler in ("httpGet", "tcpSocket"):
        if (startup.get(handler) or {}).get("port") == 0:
            why = "Invalid value: 0: must be between 1 and 65535, inclusive"
            yield f"{at}.startupProbe.{handler}.port: {why}"
    policy = container.get("imagePullPolicy", "Always")
    if policy not in POLICIES:
        listed = ", ".join(f'"{each}"' for each in POLICIES)
        yield f'{at}.imagePullPolicy: Unsupported value: "{policy}": supported values: {listed}'


def _resource(name: str, value: str, at: str) -> Iterator[str]:
    if "/" in name:
        number = amount(value)
        if number is not None and number.denominator != 1:
            yield f'{at}[{name}]: Invalid value: "{value}": must be an integer'
    elif name not in STANDARD and not name.startswith("hugepages-"):
        for why in ("type or fully qualified", "for containers"):
            yield f'{at}[{name}]: Invalid value: "{name}": must be a standard resource {why}'


def _against(name: str, request: str, limit: str | None, at: str) -> Iterator[str]:
    extended = "/" in name
    if limit is None:
        if extended:
            yield f"{at}.limits: Required value: Limit must be set for non overcommitable resources"
        return
    asked, most = amount(request), amount(limit)
    assert asked is not None
    assert most is not None
    if extended and asked != most:
        yield f'{at}.requests: Invalid value: "{request}": must be equal to {name} limit of {limit}'
    elif asked > most:
        yield f'{at}.requests: Invalid value: "{request}": must be less than or equal to {name} limit of {limit}'
