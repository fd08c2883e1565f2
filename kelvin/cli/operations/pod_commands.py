"""Run single parts of an installation, as pods do: `kelvin runtime`, `kelvin cache` and `kelvin engine`."""

import os
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from kelvin.cli.base.api_client import CommandFailed
from kelvin.contracts.artifacts.runtime_control import BindRequest, ParkedSpec
from kelvin.contracts.errors import Refused
from kelvin.contracts.names import DEVICE_CLASS_RULE, is_device_class, is_digest, require_dns_label
from kelvin.process.python_command import python_command
from kelvin.supervisor.data_lock import AlreadyRunning
from kelvin.supervisor.settings import agent_environment, load_engine, load_pod, require_data

_NAME: Final = 40  # characters of the host's name in a runtime's id


def _version_option(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    if value is not None and not is_digest(value):
        raise click.BadParameter(f"{value[:80]!r}: must be 64 lowercase hexadecimal digits")
    return value


def dns_label_option(_: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Validate an option that is a DNS label."""
    if value is None:
        return None
    try:
        return require_dns_label(value, parameter.name or "")
    except Refused as refused:
        raise click.BadParameter(refused.failure.message) from refused


def device_class_option(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """Validate an option that is a device class."""
    if value is not None and not is_device_class(value):
        raise click.BadParameter(f"{value[:80]!r}: {DEVICE_CLASS_RULE}")
    return value


@click.command("runtime")
@click.argument("version", required=False, callback=_version_option)
@click.option("--tenant", callback=dns_label_option, help="The tenant that owns the version.")
@click.option("--model", callback=dns_label_option, help="The model's name in messages and records.")
@click.option(
    "--standby",
    metavar="CLASS",
    callback=device_class_option,
    help="Instead of VERSION: wait on this device class until a version is bound.",
)
@click.option("--weights", type=click.IntRange(0), help="With --standby: largest version in bytes. [default: any]")
@click.option("--store", metavar="URL", help="s3://BUCKET/PREFIX or file:///PATH. [default: $KELVIN_STORE]")
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")  # noqa: S104
@click.option("--port", type=click.IntRange(1, 65535), help="Port to listen on. [default: $PORT, else 8080]")
@click.option("--threads", type=click.IntRange(1, 1024), help="Compute threads. [default: one per core]")
@click.option("--device-class", callback=device_class_option, help="Device class in bills. [default: cpu-THREADS]")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for cache, sockets and records. [default: $KELVIN_DATA, else a temporary one]",
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    help="DATA/run of the node's `kelvin cache`. [default: $KELVIN_CACHE_AGENT, else its own cache agent]",
)
def runtime_command(
    version: str | None,
    tenant: str | None,
    model: str | None,
    standby: str | None,
    weights: int | None,
    store: str | None,
    host: str,
    port: int | None,
    threads: int | None,
    device_class: str | None,
    data: Path | None,
    cache: Path | None,
) -> None:
    """Serve one version in this process.

    VERSION is 64 hex digits and is loaded from the store. Exits with 0 after SIGTERM and a drain. With --standby, wait
    at $KELVIN_STANDBY_LISTEN instead, until the control plane binds a version to this process. Wait again after that
    version was released.
    """
    from kelvin.supervisor.pod_supervisor import run_pod

    threads = threads or len(os.sched_getaffinity(0))
    what: BindRequest | ParkedSpec
    if standby is not None:
        for name, value in (
            ("VERSION", version),
            ("--tenant", tenant),
            ("--model", model),
            ("--device-class", device_class),
        ):
            if value is not None:
                raise click.UsageError(f"{name} and --standby: only one of them can be said")
        what = ParkedSpec(device_class=standby, threads=threads, kv_bytes=0, store="", weight_bytes=weights or 0)
    else:
        if version is None or tenant is None or model is None:
            raise click.UsageError("VERSION, --tenant and --model are needed, or --standby")
        what = BindRequest(
            tenant=tenant,
            model=model,
            version=version,
            device_class=device_class or f"cpu-{threads}",
            threads=threads,
            kv_bytes=0,  # `load_pod` computes it from the memory limit
        )
    with _data_directory(data) as place:
        try:
            status = run_pod(load_pod(place, what, _runtime_id(), host, store, port, cache))
        except AlreadyRunning as error:
            raise CommandFailed(str(error)) from error
    sys.exit(128 - status if status < 0 else status)  # 128 + signal, as a shell does


@contextmanager
def _data_directory(chosen: Path | None) -> Iterator[Path]:
    if (place := chosen or require_data()) is not None:
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="kelvin-runtime-") as scratch:
        yield Path(scratch)


def _runtime_id() -> str:
    """Return the host's name with a random suffix. A restarted container is another runtime."""
    host_name = "".join(
        each for each in socket.gethostname().lower() if each.isascii() and (each.isalnum() or each == "-")
    )
    return f"{host_name[:_NAME].strip('-') or 'runtime'}-{uuid.uuid4().hex[:8]}"


@click.command("cache")
@click.option("--tenant", required=True, callback=dns_label_option, help="The only tenant whose versions it serves.")
@click.option("--store", metavar="URL", help="s3://BUCKET/PREFIX or file:///PATH. [default: $KELVIN_STORE]")
@click.option(
    "--data",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the cache. Runtimes connect by DATA/run.",
)
def cache_command(tenant: str, store: str | None, data: Path) -> None:
    """Cache a tenant's versions on this node. Serves `kelvin runtime --cache DATA/run`, until SIGTERM."""
    environment = agent_environment(data, tenant, store)
    os.execve(sys.executable, python_command("weightcache"), environment)  # noqa: S606


@click.command("engine")
@click.option(
    "--store", metavar="URL", help="Snapshotter's store: s3://BUCKET/PREFIX or file:///PATH. [default: $KELVIN_STORE]"
)
@click.option(
    "--data",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Data directory. The snapshotter connects by $KELVIN_ENGINE, which is DATA/run.",
)
def engine_command(store: str | None, data: Path) -> None:
    """Gate and seal pushed versions. Works for a snapshotter, until SIGTERM; serves no requests."""
    from kelvin.supervisor.engine_supervisor import run_engine

    try:
        status = run_engine(load_engine(data, store))
    except AlreadyRunning as error:
        raise CommandFailed(str(error)) from error
    sys.exit(status)
