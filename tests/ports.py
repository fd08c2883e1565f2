"""Ports for processes that a test starts later, or again."""

from coldstart_bench.installation import free_port


def free_ports(count: int) -> list[int]:
    """So many different ones of the loopback interface, each as `free_port` has it."""
    found: dict[int, None] = {}
    while len(found) < count:
        found[free_port()] = None
    return list(found)
