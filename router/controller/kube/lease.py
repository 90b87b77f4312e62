"""Of several controllers of one release one leads: it holds a Lease object, as Kubernetes' own controllers do.

The holder counts from before it asked, on its own monotonic clock, and stops before anybody else may begin. Who does not hold it
looks at it: it is free once nobody is named in it, or its version has not changed for the whole duration that stands in it, by
the looker's own clock. So no two clocks are ever compared. Each write is a compare-and-swap; of two that try at once one wins. A
holder that learns of another one has lost it for good (`is_lost`): its process ends, and begins anew as one that waits. Blocks.
"""

from __future__ import annotations

import datetime
import math
import threading
import time
from collections.abc import Callable

from baton import clock
from baton.errors import NotFound, Unavailable
from router.controller.kube.api import KubeApi
from router.controller.kube.errors import Conflict
from router.controller.kube.objects import JsonObject, Stored
from router.controller.lease import LEASE_S, RETRY_S, STANDS_S

_TRIES = 3  # somebody may annotate the object meanwhile


class KubeLease:
    """As one process sees it."""

    def __init__(
        self,
        api: KubeApi,
        name: str,
        holder: str,
        now_s: Callable[[], float] = clock.now_s,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        """`now_unix_s`: for those who read the object; nothing is decided by it."""
        self._api = api
        self._name = name
        self._holder = holder
        self._now_s = now_s
        self._now_unix_s = now_unix_s
        self._asking = threading.Lock()  # a `take` whose caller was cancelled ends before `give_back` begins
        self._until_s = float("-inf")
        self._has_led = False
        self._seen = ("", float("-inf"))  # the version last seen, and since when
        self.holder_seen = ""  # who was named in it
        self.is_lost = False

    @property
    def is_held(self) -> bool:
        return self._now_s() < self._until_s

    def check(self) -> None:
        """As Leadership.check. How long another's lease stands nobody here knows: its holder renews it."""
        if not self.is_held:
            who = f"{self.holder_seen} does" if self.holder_seen else "nobody does yet"
            raise Unavailable(f"this controller does not lead: {who}", retry_after_s=RETRY_S)

    def take(self) -> bool:
        """Take it, or keep it for LEASE_S more. Whether it is held. Raises: Unavailable: until it runs out it is held still."""
        with self._asking:
            return self._take()

    def _take(self) -> bool:
        for _ in range(_TRIES):
            asked_s = self._now_s()
            read = self._read()
            self.holder_seen = str(read.data.get("holderIdentity") or "")
            if self.holder_seen != self._holder and not self._is_free(read):
                self._until_s = float("-inf")
                self.is_lost = self._has_led
                return False
            try:
                self._api.put_lease(self._name, read, self._spec(read))
            except Conflict:
                continue
            self.holder_seen = self._holder
            self._until_s, self._has_led, self.is_lost = asked_s + LEASE_S, True, False
            return True
        raise Unavailable(f"the Lease {self._name} changes faster than it can be taken", retry_after_s=1.0)

    def give_back(self) -> None:
        """So that the next holder need not wait. Raises: Unavailable."""
        with self._asking:
            self._give_back()

    def _give_back(self) -> None:
        self._until_s = float("-inf")
        read = self._read()
        if read.data.get("holderIdentity") != self._holder:
            return
        try:
            self._api.put_lease(self._name, read, {**read.data, "holderIdentity": ""})
        except Conflict as error:
            raise Unavailable(f"the Lease {self._name} was written meanwhile; it runs out by itself") from error

    def _read(self) -> Stored:
        try:
            return self._api.lease(self._name)
        except NotFound as error:
            raise Unavailable(f"there is no Lease {self._name}: `helm upgrade` renders it") from error

    def _is_free(self, read: Stored) -> bool:
        now_s = self._now_s()  # it was read by now: what is written later is not it
        if not read.data.get("holderIdentity"):
            return True
        if self._seen[0] != read.version:
            self._seen = (read.version, now_s)
        stands_s = float(read.data.get("leaseDurationSeconds") or STANDS_S)
        return now_s - self._seen[1] > stands_s

    def _spec(self, read: Stored) -> JsonObject:
        now = _micro_time(self._now_unix_s())
        spec = {
            **read.data,
            "holderIdentity": self._holder,
            "leaseDurationSeconds": math.ceil(STANDS_S),
            "renewTime": now,
        }
        if read.data.get("holderIdentity") != self._holder:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(read.data.get("leaseTransitions") or 0) + 1
        return spec


def _micro_time(unix_s: float) -> str:
    """As the API wants it: always six digits of a second."""
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
