"""How much memory this process has."""

import resource


def resident_memory() -> int:
    """In bytes, without what is not in RAM."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
