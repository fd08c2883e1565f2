"""What our objects on a cluster are known by: who manages them, whose they are, and where they are. Pure names."""

from typing import Final

NamespacedName = tuple[str, str]  # namespace and name

MANAGER: Final = "kelvin"  # also the field manager that owns what we apply
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
OURS: Final = {MANAGED_BY: MANAGER}
OURS_SELECTOR: Final = f"{MANAGED_BY}={MANAGER}"
PART_OF: Final = {"app.kubernetes.io/part-of": MANAGER}  # of what an operator applies
RUNTIME: Final = {**OURS, "app.kubernetes.io/component": "runtime"}  # of what serves versions

# Labels, by which others choose.
TENANT: Final = "kelvin.dev/tenant"
MODEL: Final = "kelvin.dev/model"
POOL: Final = "kelvin.dev/pool"
ROLE: Final = "kelvin.dev/role"  # of a control plane's pod: its Service selects the leader
CAPACITY: Final = "kelvin.dev/capacity"  # of nodes, where nothing else says that they may be taken away

# Annotations.
VERSION: Final = "kelvin.dev/version"
STREAMS: Final = "kelvin.dev/streams"  # of a pod, for requests; queue-proxy lets some more through
APPLIED: Final = "kelvin.dev/applied"  # a field that we no longer name leaves no other trace
RENDERING: Final = "kelvin.dev/rendering"  # digest of a Service as Kelvin renders it, without its scale
ATTEMPT: Final = "kelvin.dev/attempt"  # how many Revisions were made for one rendering, where it is more than one
INSTALLATION: Final = "kelvin.dev/installation"  # whose control plane wrote it: the namespace in which that runs
