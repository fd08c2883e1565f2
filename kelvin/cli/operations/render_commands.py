"""Render manifests for `kubectl apply -f -`.

`kelvin models render M@VERSION` prints the Knative Service of a version. `kelvin cluster tenant T` prints the objects
that a tenant's first version needs.
"""

import json

import click

from controlplane.knative.policy.knative_service import (
    FEATURES,
    IMAGE_RULE,
    TIMEOUT_S,
    ClusterSpec,
    ControlEndpoints,
    PodVersion,
    is_image,
    parse_cluster_store,
    render_service,
)
from controlplane.knative.policy.namespace_requirements import NamespaceRequirements, render_namespace, store_port
from kelvin.cli.artifacts.export_command import ExportClient, resolve_version
from kelvin.cli.artifacts.push_client import open_client, raise_for_failure
from kelvin.cli.base.api_client import decode_json_object
from kelvin.cli.operations.pod_commands import device_class_option
from kelvin.contracts.names import is_digest, require_dns_label
from kelvin.contracts.setting_parser import BadSetting
from kelvin.doctor.configuration_policy import DEFAULTS


def _store_option(context: click.Context, param: click.Parameter, value: str) -> str:
    try:
        parse_cluster_store(value)
    except BadSetting as bad:
        raise click.BadParameter(f"{bad.shown_value!r}: {bad.rule}") from None
    return value


def _image_option(_: click.Context, __: click.Parameter, value: str) -> str:
    if not is_image(value):
        raise click.BadParameter(f"{value!r}: {IMAGE_RULE}")
    return value


@click.command("render")
@click.argument("reference", metavar="M@VERSION")
@click.option("--tenant", default="default", show_default=True, help="The tenant that owns the version.")
@click.option(
    "--image",
    required=True,
    metavar="IMAGE",
    callback=_image_option,
    help="Runtime image by digest: REGISTRY/NAME@sha256:DIGEST.",
)
@click.option(
    "--store",
    required=True,
    metavar="URL",
    callback=_store_option,
    help="Store from which pods load versions: s3://BUCKET/PREFIX.",
)
@click.option("--store-secret", metavar="NAME", help="Secret whose keys become environment of the store's client.")
@click.option("--namespace", help="[default: kelvin-TENANT]")
@click.option("--cores", type=click.IntRange(1), default=1, show_default=True, help="CPU cores, and compute threads.")
@click.option("--kv-bytes", type=click.IntRange(64 << 20), default=DEFAULTS["KELVIN_KV_BYTES"], show_default=True)
@click.option("--device", metavar="RESOURCE", help="nvidia.com/gpu, or a slice: nvidia.com/mig-1g.10gb.")
@click.option("--device-class", callback=device_class_option, help="Device class in bills. [default: cpu-CORES]")
@click.option("--node", multiple=True, metavar="KEY=VALUE", help="Label of nodes that may run it; repeat.")
@click.option("--tolerate", multiple=True, metavar="KEY", help="Taint that it tolerates, with any value; repeat.")
@click.option("--priority-class", metavar="NAME")
@click.option(
    "--feature",
    "features",
    multiple=True,
    type=click.Choice([each.flag for each in FEATURES]),
    help="A key of the cluster's config-features that is enabled; repeat.",
)
@click.option("--control", metavar="URL", help="https://HOST:PORT of the control plane, for usage records.")
@click.option("--snapshotter", metavar="URL", help="https://HOST:PORT of the snapshotter; needed with --control.")
@click.option("--inner-secret", metavar="NAME", help="Secret with tls.crt, tls.key, ca.crt; needed with --control.")
@click.option("--cache", metavar="DIR", help="Node directory in which `kelvin cache` keeps versions: DIR/TENANT.")
@click.option("--timeout", "timeout_s", type=click.IntRange(1), default=TIMEOUT_S, show_default=True)
def render_command(
    reference: str,
    tenant: str,
    image: str,
    store: str,
    store_secret: str | None,
    namespace: str | None,
    cores: int,
    kv_bytes: int,
    device: str | None,
    device_class: str | None,
    node: tuple[str, ...],
    tolerate: tuple[str, ...],
    priority_class: str | None,
    features: tuple[str, ...],
    control: str | None,
    snapshotter: str | None,
    inner_secret: str | None,
    cache: str | None,
    timeout_s: int,
) -> None:
    """Print a Knative Service of a version. Name it M, M@prod or M@HEX; the scale settings are the model's. The output
    is JSON, which `kubectl apply -f -` accepts.
    """
    require_dns_label(tenant, "tenant")
    if is_digest(reference):  # a bare version names no model whose scale settings to use
        raise click.UsageError(f"{reference}: must be M, M@prod or M@HEX")
    with open_client() as client:
        version = resolve_version(client, reference)
        manifest = ExportClient(client).manifest(version)
        model = reference.partition("@")[0]
        scale = decode_json_object(raise_for_failure(client.request("GET", f"/admin/v1/models/{model}")))["scale"]
    rendered = render_service(
        PodVersion(
            tenant=tenant,
            model=model,
            version=version,
            weight_bytes=manifest.total_bytes,
            kv_bytes=kv_bytes,
            max_streams=manifest.limits.max_streams,
            min_scale=scale["min"],
            max_scale=scale["max"],
            target=scale["target"],
            window_s=scale["window_s"],
            grace_s=scale["grace_s"],
            average=scale["average"],
        ),
        ClusterSpec(
            image=image,
            store_url=store,
            namespace=namespace,
            cores=cores,
            device=device,
            device_class=device_class,
            features=frozenset(features),
            timeout_s=timeout_s,
            secret=store_secret,
            node_selector=dict(_pair(each) for each in node),
            tolerations=tuple({"key": key, "operator": "Exists"} for key in tolerate),
            priority_class=priority_class,
            control=_control_environment(control, snapshotter, inner_secret),
            cache=cache,
        ),
    )
    click.echo(json.dumps(rendered, indent=2))


def _control_environment(url: str | None, snapshotter: str | None, secret: str | None) -> ControlEndpoints | None:
    if url is None and snapshotter is None and secret is None:
        return None
    if url is None or snapshotter is None or secret is None:
        raise click.UsageError("--control, --snapshotter and --inner-secret go together")
    return ControlEndpoints(url=url, snapshotter_url=snapshotter, secret=secret)


def _pair(value: str) -> tuple[str, str]:
    key, separator, rest = value.partition("=")
    if not separator or not key:
        raise click.BadParameter(f"{value!r}: must be KEY=VALUE", param_hint="--node")
    return key, rest


@click.group("cluster")
def cluster_group() -> None:
    """Print manifests for an operator to apply. Contacts neither a cluster nor an installation."""


@cluster_group.command("tenant")
@click.argument("tenant")
@click.option(
    "--installation",
    metavar="NAMESPACE",
    envvar="KELVIN_CLUSTER_NAMESPACE",
    default="kelvin",
    show_default=True,
    help="Namespace of the control plane.",
)
@click.option(
    "--store",
    metavar="URL",
    envvar="KELVIN_CLUSTER_STORE",
    help="Store of versions. Pods may reach its port. [default: port 443]",
)
@click.option(
    "--inner-secret",
    metavar="NAME",
    envvar="KELVIN_CLUSTER_INNER_SECRET",
    default="kelvin-inner-runtime",
    show_default=True,
    help="As KELVIN_CLUSTER_INNER_SECRET.",
)
@click.option(
    "--store-secret",
    metavar="NAME",
    envvar="KELVIN_CLUSTER_SECRET",
    default="kelvin-store",
    show_default=True,
    help="As KELVIN_CLUSTER_SECRET; empty if pods need no keys for the store.",
)
@click.option("--trust", metavar="NAME", envvar="KELVIN_CLUSTER_TRUST", help="As KELVIN_CLUSTER_TRUST.")
@click.option(
    "--node-cache", is_flag=True, help="Where KELVIN_CLUSTER_CACHE is set: pods mount a directory of their node."
)
def tenant_command(
    tenant: str,
    installation: str,
    store: str | None,
    inner_secret: str,
    store_secret: str,
    trust: str | None,
    node_cache: bool,
) -> None:
    """Print TENANT's namespace for `kubectl apply -f -`. The output includes network policies and the control plane's
    rights. Secrets that you must create yourself are listed on stderr.
    """
    require_dns_label(tenant, "tenant")
    secrets = {
        inner_secret: "tls.crt, tls.key and ca.crt of the role runtime",
        store_secret: "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    }
    named = {name: keys for name, keys in secrets.items() if name}
    needs = NamespaceRequirements(tuple(named), (trust,) if trust else (), "privileged" if node_cache else "restricted")
    objects = render_namespace(tenant, needs, require_dns_label(installation, "namespace"), store_port(store))
    click.echo(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2))
    where = objects[0]["metadata"]["name"]
    click.echo(f"Create these in {where}, too. No version starts before they are there:", err=True)
    for name, keys in named.items():
        click.echo(f"  secret {name}: {keys}", err=True)
    if trust:
        click.echo(f"  config map {trust}: a public key in PEM for each *.pem", err=True)
