"""How much memory a process may still take."""

from pathlib import Path


# Of the control groups of versions 2 and 1: the folder, the limit, and the use.
_GROUPS = (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))


def available_memory(root: Path = Path("/")) -> int | None:
    """
    Bytes that are free, or hold files that the system can read again, within the limits of the process's control
    groups. None if it is not known: only Linux is asked.

    Args:
        root: where `proc` and `sys` are.
    """
    try:
        found = [_fields(root / "proc/meminfo")["MemAvailable:"] * 1024]
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or "memory" in controllers.split(","):
                found += _within_group(root, path)
    except (OSError, KeyError, ValueError):
        return None
    return min(found)


def _within_group(root: Path, path: str) -> list[int]:
    """What each control group allows, from one up to the first."""
    found = []
    for folder, limit, use in _GROUPS:
        top = root / "sys/fs/cgroup" / folder
        group = top / path.lstrip("/")
        for each in (group, *group.parents):
            if not each.is_relative_to(top) or not (each / limit).exists():
                continue
            if (most := (each / limit).read_text().strip()) != "max":
                files = _fields(each / "memory.stat")
                used = int((each / use).read_text()) - files["inactive_file"] - files["active_file"]
                found.append(int(most) - used)
    return found


def _fields(path: Path) -> dict[str, int]:
    """The first number of each line, by its name."""
    return {name: int(number) for name, number, *_ in map(str.split, path.read_text().splitlines())}
