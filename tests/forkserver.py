"""Start processes as forks of a process that has already imported their modules, since imports take most of a start."""

import multiprocessing
from typing import Final

FORKS: Final = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["activator.app.app", "tests.activator.forked_activator", "tests.controlplane.fake_zygote"]
)
