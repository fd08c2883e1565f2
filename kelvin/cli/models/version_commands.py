"""`kelvin versions` and `kelvin show`: list, delete and describe versions of a model.

Signatures on a version are verified here, by the key that the statement names. Whether that key is trusted is reported
by the installation.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import click
import msgspec
from rich.table import Table

from kelvin.cli.artifacts.export_command import ExportClient, resolve_version
from kelvin.cli.artifacts.push_client import open_client
from kelvin.cli.base.api_client import call_json, json_option
from kelvin.cli.base.tables import print_json, print_table
from kelvin.cli.models.manifest_summary_policy import summarize_manifest
from kelvin.cli.models.model_commands import outdated_lines, split_reference
from kelvin.contracts.artifacts.attestation import OriginPredicate, SealRecord, read_origin, read_seal, shorten_key_id
from kelvin.contracts.artifacts.kind_routes import ROUTES_BY_KIND
from kelvin.contracts.artifacts.manifest import Manifest
from kelvin.contracts.artifacts.object_keys import ORIGIN_PREFIX, SEAL_PREFIX
from kelvin.contracts.artifacts.push_api import AttestationEntry
from kelvin.contracts.errors import Refused


@click.group("versions")
def versions_command() -> None:
    """List and delete versions of a model."""


@versions_command.command("list")
@click.argument("model")
@json_option
def list_command(model: str, as_json: bool) -> None:
    """List the versions of MODEL. The oldest is first; deleted ones are included."""
    found = call_json("GET", f"/admin/v1/models/{model}")
    if as_json:
        print_json(found["versions"])
        return
    print_table(_table(model, found["versions"]))
    for line in outdated_lines([{"model": model, "versions": found["versions"]}]):
        click.echo(line)


@versions_command.command("delete")
@click.argument("reference", metavar="M@VERSION")
def delete_command(reference: str) -> None:
    """Stop serving a version.

    No alias may point to it, and no replica may run it. VERSION is 12 or more hex digits. `kelvin collect --run` frees
    its bytes once it has been unused for the grace period. Pushing the same files again restores it.
    """
    model, digits = split_reference(reference)
    answer = call_json("DELETE", f"/admin/v1/models/{model}/versions/{digits}")
    click.echo(f"deleted {model}@{answer['version']}; `kelvin collect --run` frees its bytes after the grace period")


def _table(model: str, versions: list[dict[str, Any]]) -> Table:
    columns = ("version", "aliases", "health", "state", "architecture", "MB", "pushed")
    table = Table(*columns, title=f"versions of {model}, UTC")
    for row in versions:
        pushed = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row["created_at_s"]))
        size = f"{row['total_bytes'] / 1e6:.1f}"
        aliases = ", ".join(row["aliases"])
        table.add_row(row["version"][:12], aliases, row["health"], row["state"], row["architecture"], size, pushed)
    return table


@click.command("show")
@click.argument("reference", metavar="M@VERSION")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show_command(reference: str, as_json: bool) -> None:
    """Print a version's contents and signatures. Name it M, M@prod, M@HEX, or by its 64 digits."""
    with open_client() as client:
        version = resolve_version(client, reference)
        calls = ExportClient(client)
        manifest, entries = calls.manifest(version), calls.attestations(version)
    found = describe_version(version, manifest, entries)
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(version_lines(found)))


def describe_version(version: str, manifest: Manifest, entries: tuple[AttestationEntry, ...]) -> dict[str, Any]:
    """Return all that is known of a version, as `--json` prints it."""
    seals, origins, faults = [], [], []
    for entry in entries:
        match _open_entry(version, entry):
            case (OriginPredicate() as origin, key_id):
                origins.append({**_signer_of(key_id, entry), **msgspec.to_builtins(origin)})
            case SealRecord(seal=seal, key_id=key_id):
                signed = _signer_of(key_id, entry)
                known = {"fingerprint": msgspec.to_builtins(seal.fingerprint), "tolerance": seal.probe.tolerance}
                seals.append({**signed, **known, "fast_bind": seal.fast_bind})
            case str(fault):
                faults.append({"name": entry.name, "fault": fault})
    plain: dict[str, Any] = msgspec.to_builtins(manifest)
    for key in ("tensors", "chunks"):
        del plain[key]
    return {
        "version": version,
        **plain,
        "routes": list(ROUTES_BY_KIND[manifest.engine.kind]),
        **summarize_manifest(manifest),
        "verified": any(origin["trusted_as"] not in (None, "installation") for origin in origins),
        "origins": sorted(origins, key=lambda origin: -origin["signed_at_s"]),
        "seals": seals,
        "faults": faults,
    }


def _open_entry(version: str, entry: AttestationEntry) -> tuple[OriginPredicate, str] | SealRecord | str | None:
    """Return the verified statement, or why it is invalid. None for a bundle, which another tool verifies."""
    if entry.fault is not None:
        return entry.fault
    try:
        if entry.name.startswith(ORIGIN_PREFIX):
            return read_origin(entry.content, version)
        return read_seal(entry.content, version) if entry.name.startswith(SEAL_PREFIX) else None
    except Refused as refused:
        return refused.failure.message


def _signer_of(key_id: str | None, entry: AttestationEntry) -> dict[str, Any]:
    return {"name": entry.name, "key": key_id, "trusted_as": entry.trusted_as}


def version_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that `kelvin show` prints."""
    engine, tensors = found["engine"], found["tensors"]
    yield f"version        {found['version']}"
    yield f"format         {found['format']}, chunks of {found['chunk_bytes']} bytes"
    yield f"engine         {engine['architecture']}, {engine['dtype']}, interface {engine['interface']}"
    yield f"answers        {', '.join(found['routes'])}"
    yield "limits         " + ", ".join(f"{name} {value}" for name, value in found["limits"].items())
    by_dtype = ", ".join(f"{nbytes} bytes of {dtype}" for dtype, nbytes in tensors["bytes_by_dtype"].items())
    yield f"tensors        {tensors['count']}, {tensors['parameters']} parameters: {by_dtype}"
    if tensors["largest"] is not None:
        largest = tensors["largest"]
        yield f"largest        {largest['name']} {largest['dtype']}{largest['shape']}"
    chunks = found["chunks"]
    yield f"chunks         {chunks['count']}, {chunks['distinct']} distinct; {found['total_bytes']} bytes"
    for file in found["files"]:
        yield f"file           {file['path']}  {file['size']} bytes  blake3 {file['digest']}"
    yield f"verified       {'yes' if found['verified'] else 'NO: no trust root of this installation signed it'}"
    for origin in found["origins"]:
        yield from _lines_of_origin(origin)
    for seal in found["seals"]:
        engine_of = seal["fingerprint"]
        where = f"torch {engine_of['torch']}, {engine_of['dtype']}, {engine_of['device_class']}"
        yield f"sealed         under {where}; {_signer_phrase(seal)}"
    for fault in found["faults"]:
        yield f"FAULTY         {fault['name']}: {fault['fault']}"


def _lines_of_origin(origin: dict[str, Any]) -> Iterator[str]:
    claims = origin["claims"]
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(origin["signed_at_s"]))
    yield f"signed         {at}; {_signer_phrase(origin)}"
    if "licence" in claims:
        yield f"  licence      {claims['licence']}"
    for name, value in claims.get("training_data", {}).items():
        yield f"  trained on   {name} {value}"
    for name, value in claims.get("metrics", {}).items():
        yield f"  metric       {name} {value:g}"
    for name, value in claims.get("provenance", {}).items():
        yield f"  provenance   {name} {value}"
    if "bundle" in origin:
        yield "  bundle       in the format of OpenSSF Model Signing, for an export"


def _signer_phrase(signed: dict[str, Any]) -> str:
    if signed["key"] is None:
        return "NOT SIGNED"
    trusted = signed["trusted_as"]
    verdict = "which is NOT TRUSTED here" if trusted is None else f"trusted as {trusted}"
    return f"by {shorten_key_id(signed['key'])}, {verdict}"
