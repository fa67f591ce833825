"""How much memory this process has."""

import resource


def mapped_memory() -> int:
    """In bytes, with what is only reserved."""
    return _pages(0)


def resident_memory() -> int:
    """In bytes, without what is not in RAM."""
    return _pages(1)


def _pages(field: int) -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[field]) * resource.getpagesize()
