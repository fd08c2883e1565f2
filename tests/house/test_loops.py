"""Background loops are started in one way, `service/loops.py`. Modules that make other tasks are listed with a reason.

A module that makes tasks says why none of them is a loop. Before a line is added: something that runs for as long as
its process or its owner lives belongs to `Loops.start`, where an unexpected error neither ends it nor its neighbours.
"""

import ast

import pytest

from tests.house.test_rules import PRODUCT, ROOT

REQUEST = "a part of one request or connection, which ends with it"
WORK = "one piece of work, owned, which ends by itself"
SERVER = "a server and what ends it: without the server its process has nothing to do"
TOGETHER = "parts of one loop that share what they see of the cluster, and so are started again together"

MAKERS = {
    "activator/answer.py": REQUEST,
    "activator/app.py": SERVER,
    "activator/asking.py": WORK,
    "activator/edge_connection.py": REQUEST,
    "activator/errands.py": WORK,
    "activator/once.py": REQUEST,
    "activator/second.py": REQUEST,
    "activator/server.py": SERVER,
    "activator/shared_store.py": WORK,
    "activator/stand_in.py": WORK,
    "blobstore/abreast.py": WORK,
    "blobstore/factory.py": WORK,
    "blobstore/s3_upload.py": WORK,
    "controlplane/examiner.py": WORK,
    "controlplane/health.py": SERVER,
    "controlplane/internal_api.py": REQUEST,
    "controlplane/leading.py": WORK,
    "controlplane/scaling/knative/converge.py": TOGETHER,
    "controlplane/scaling/knative/declarations.py": TOGETHER,
    "controlplane/scaling/knative/lease.py": "keeping the lead, which must end the moment it is lost: no back-off",
    "controlplane/scaling/knative/node_waits.py": TOGETHER,
    "controlplane/scaling/knative/plane.py": TOGETHER,
    "controlplane/scaling/knative/pools.py": WORK,
    "controlplane/scaling/knative/tenant_spaces.py": TOGETHER,
    "controlplane/tasks.py": "owns pieces of work, each of which ends by itself",
    "kelvin/supervisor/graves.py": WORK,
    "kelvin/supervisor/pod.py": WORK,
    "kelvin/supervisor/succession.py": WORK,
    "kelvin/supervisor/up.py": WORK,
    "runtime/api.py": REQUEST,
    "runtime/app.py": SERVER,
    "runtime/orders.py": WORK,
    "runtime/orphans.py": WORK,
    "runtime/replica.py": WORK,
    "service/by_role.py": SERVER,
    "service/first.py": WORK,
    "service/greeter.py": REQUEST,
    "service/health_port.py": SERVER,
    "service/inner.py": SERVER,
    "service/jobs.py": WORK,
    "service/loops.py": "makes the tasks of all loops",
    "service/run.py": SERVER,
    "service/zygote.py": WORK,
    "snapshotter/commits.py": WORK,
    "spool/shipper.py": WORK,
    "weightcache/admissions.py": WORK,
    "weightcache/arena.py": WORK,
    "weightcache/holders.py": WORK,
    "weightcache/leases.py": REQUEST,
    "weightcache/loader.py": WORK,
    "weightcache/peer_board.py": WORK,
    "weightcache/prefetch.py": WORK,
    "weightcache/ranges.py": WORK,
    "weightcache/residents.py": WORK,
    "weightcache/slabs.py": WORK,
}


def _makes_tasks(text: str) -> bool:
    """Whether a module makes tasks of its own, or groups of them."""
    calls = (node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    names = (func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls)
    return any(name in ("create_task", "ensure_future", "TaskGroup") for name in names)


def test_loops_are_started_in_one_place() -> None:
    """A module that makes tasks is in the table, and a line of the table is of a module that does."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in PRODUCT if "coldstart_bench" not in path.parts}
    assert sorted(name for name, text in texts.items() if _makes_tasks(text)) == sorted(MAKERS)


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("asyncio.create_task(work())", True),
        ("asyncio.get_running_loop().create_task(work())", True),
        ("asyncio.ensure_future(work())", True),
        ("asyncio.TaskGroup()", True),
        ("create_task(work())", True),
        ("loops.start('feed', feed.run)", False),
        ("task: asyncio.Task[None]", False),
    ],
)
def test_tasks_made(line: str, want: bool) -> None:
    """The rule sees each way."""
    assert _makes_tasks(line) is want
