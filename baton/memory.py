"""How much memory this process and its children may still take. Read from /proc and the cgroup at each call."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int:
    """Return the machine's available memory, or its cgroup's if that is less; pages of files that can be dropped count."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available_bytes = int(meminfo["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = (_CGROUP / "memory.max").read_text().strip(), int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except OSError:  # cgroup v1, or the root group, which has no limit
        return available_bytes
    reclaimable_bytes = int(stat.get("inactive_file", 0))
    return available_bytes if limit == "max" else min(available_bytes, int(limit) - used + reclaimable_bytes)
