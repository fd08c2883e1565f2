"""How many descriptors a process may have open: as many as whoever started it allows."""

import resource


def raise_descriptors() -> None:
    """Raise the soft limit of open files to the hard limit. Our own settings bound what opens them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
