"""Start processes as forks of one that has imported what they need, because most of a start is imports."""

import multiprocessing
from typing import Final

FORKS: Final = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["activator.app.app", "tests.activator.hatching", "tests.controlplane.fake_zygote"])
