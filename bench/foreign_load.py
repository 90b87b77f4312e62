"""How busy others kept this machine while a bench ran: on few cores that decides what its figures are worth."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

NUM_BUSY = 8  # columns of /proc/stat's first line after "cpu": user nice system idle iowait irq softirq steal; proc(5)
IDLE = (3, 4)  # of them: idle, iowait


class ForeignLoad:
    """Counts from its making."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._busy_s = busy_s()
        self._own_s = own_s()

    def cores(self) -> float:
        """Cores that others used on average. Ask when the bench's processes have ended: ours are told apart by then only."""
        others_s = busy_s() - self._busy_s - (own_s() - self._own_s)
        return max(0.0, others_s / (time.monotonic() - self._started_s))


def busy_s() -> float:
    """Seconds that all cores together were not idle, since the machine started."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split()[1 : 1 + NUM_BUSY]]
    return sum(count for column, count in enumerate(ticks) if column not in IDLE) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """Seconds of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
