"""Labels and annotations of our objects on a cluster: who manages them, whom they belong to, and where they run."""

from typing import Final

NamespacedName = tuple[str, str]  # namespace and name

MANAGER: Final = "kelvin"  # also the field manager that owns what we apply
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
OURS: Final = {MANAGED_BY: MANAGER}
OURS_SELECTOR: Final = f"{MANAGED_BY}={MANAGER}"
PART_OF: Final = {"app.kubernetes.io/part-of": MANAGER}  # of objects that an operator applies
RUNTIME: Final = {**OURS, "app.kubernetes.io/component": "runtime"}  # of pods that serve versions

# Labels, which selectors use.
TENANT: Final = "kelvin.dev/tenant"
MODEL: Final = "kelvin.dev/model"
POOL: Final = "kelvin.dev/pool"
ROLE: Final = "kelvin.dev/role"  # of a control plane's pod: its Service selects the leader
CAPACITY: Final = "kelvin.dev/capacity"  # of nodes that may be taken away, if no other label says so

# Annotations.
VERSION: Final = "kelvin.dev/version"
STREAMS: Final = "kelvin.dev/streams"  # of a pod, for requests; queue-proxy admits a few more
# digest of the applied state: a field that is no longer set leaves no other trace
APPLIED: Final = "kelvin.dev/applied"
RENDERING: Final = "kelvin.dev/rendering"  # digest of a Service as Kelvin renders it, without its scale
ATTEMPT: Final = "kelvin.dev/attempt"  # number of Revisions that were made for one rendering, if more than one
INSTALLATION: Final = "kelvin.dev/installation"  # the writer: the namespace of its control plane
