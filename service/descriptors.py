"""How many descriptors a process may have open: as many as whoever started it allows."""

import resource


def raise_descriptors() -> None:
    """To the hard limit, at its start: what takes one is bounded by settings of ours."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
