"""`kelvin cluster tenant T`: print what an operator applies to a cluster before a tenant's first version."""

import json

import click

from contracts.names import dns_label
from controlplane.policy.tenant_space import Needs, render_namespace, store_port


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
    help="The control plane's namespace.",
)
@click.option(
    "--store",
    metavar="URL",
    envvar="KELVIN_CLUSTER_STORE",
    help="The store of versions, whose port pods may reach. [default: port 443]",
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
    """Print TENANT's namespace for `kubectl apply -f -`.

    Its network policies and the control plane's rights in it are printed, too. Secrets that you have to create in it
    yourself are named on stderr.
    """
    dns_label(tenant, "tenant")
    secrets = {
        inner_secret: "tls.crt, tls.key and ca.crt of the role runtime",
        store_secret: "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    }
    named = {name: keys for name, keys in secrets.items() if name}
    needs = Needs(tuple(named), (trust,) if trust else (), "privileged" if node_cache else "restricted")
    objects = render_namespace(tenant, needs, dns_label(installation, "namespace"), store_port(store))
    click.echo(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2))
    where = objects[0]["metadata"]["name"]
    click.echo(f"Create these in {where}, too. No version starts before they are there:", err=True)
    for name, keys in named.items():
        click.echo(f"  secret {name}: {keys}", err=True)
    if trust:
        click.echo(f"  config map {trust}: a public key in PEM for each *.pem", err=True)
